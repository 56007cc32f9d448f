"""Messages between a replica process and its rank 0, and the frames that carry them. Torch-free.

A frame is a big-endian uint32 length and that many bytes of one msgpack-encoded message. Both ends refuse a frame above
`MAX_FRAME_BYTES`, before they buffer it, and both refuse to send one.

    replica -> rank 0   AddRequest, Abort, Call, ApplySchedule, Shutdown
    rank 0 -> replica   Hello (once, when the engine is loaded), StepMessage (one per step), Rejected, Reply,
                        CallFailed, EngineFailed (last)

Every accepted request gets exactly one delta with a finish_reason, aborted ones too; a rejected one gets
`Rejected` instead.
"""

import enum
import struct
from typing import TypeVar

import msgspec

from engine.request import EngineRequest, TokenDelta
from engine.speculative.counters import StepTime
from workers.errors import ProtocolError

PROTOCOL_VERSION = 1
# A prompt of a million tokens is at most 5 MB; a step of 256 rows x 16 tokens with 20 log-probabilities each, 4 MB.
MAX_FRAME_BYTES = 16 << 20
_LENGTH = struct.Struct(">I")


class AddRequest(msgspec.Struct, frozen=True, kw_only=True, tag="add"):
    """Decode this."""

    request: EngineRequest


class Abort(msgspec.Struct, frozen=True, kw_only=True, tag="abort"):
    """Stop a request; an id that has ended already is no error."""

    request_id: str


class CallMethod(enum.StrEnum):
    """Argument-free calls, run by the engine loop between two steps."""

    STATS = "stats"
    COUNTERS = "counters"
    CHECK_HEALTH = "check_health"
    CHECK_INTEGRITY = "check_integrity"
    RESET_GATE = "reset_gate"
    RESET_PREFIX_CACHE = "reset_prefix_cache"


class Call(msgspec.Struct, frozen=True, kw_only=True, tag="call"):
    """Answered by `Reply` or `CallFailed` with the same id."""

    call_id: int
    method: CallMethod


class ApplySchedule(msgspec.Struct, frozen=True, kw_only=True, tag="apply_schedule"):
    """A draft-length schedule; answered by `Reply` with a ScheduleAck, or `CallFailed`."""

    call_id: int
    version: tuple[int, int]
    schedule: dict[int, int]


class Shutdown(msgspec.Struct, frozen=True, kw_only=True, tag="shutdown"):
    """End the loop after the current step."""


ToEngine = AddRequest | Abort | Call | ApplySchedule | Shutdown


class Hello(msgspec.Struct, frozen=True, kw_only=True, tag="hello"):
    """The engine is loaded and its loop runs. step_times: measured before, if that was asked for.

    device_name: the model of rank 0's GPU; empty without one.
    """

    version: int
    pid: int
    step_times: tuple[StepTime, ...] = ()
    device_name: str = ""


class StepMessage(msgspec.Struct, frozen=True, kw_only=True, tag="step"):
    """Everything one engine step produced. beat: steps so far, sent for steps without deltas too."""

    beat: int
    deltas: tuple[TokenDelta, ...]


class Rejected(msgspec.Struct, frozen=True, kw_only=True, tag="rejected"):
    """add_request raised ValueError with this message."""

    request_id: str
    message: str


class Reply(msgspec.Struct, frozen=True, kw_only=True, tag="reply"):
    """value: the msgpack encoding of what the method returned (nil for None)."""

    call_id: int
    value: msgspec.Raw


class CallFailed(msgspec.Struct, frozen=True, kw_only=True, tag="call_failed"):
    """is_value_error: the arguments were wrong; else the check that was asked for failed."""

    call_id: int
    is_value_error: bool
    message: str


class EngineFailed(msgspec.Struct, frozen=True, kw_only=True, tag="failed"):
    """The loop ended by an exception; nothing follows."""

    cause: str
    details: str


FromEngine = Hello | StepMessage | Rejected | Reply | CallFailed | EngineFailed

_encoder = msgspec.msgpack.Encoder()
_to_engine = msgspec.msgpack.Decoder(ToEngine)
_from_engine = msgspec.msgpack.Decoder(FromEngine)
M = TypeVar("M")


def encode_value(value: object) -> msgspec.Raw:
    """The `value` of a `Reply`."""
    return msgspec.Raw(_encoder.encode(value))


def encode_frame(message: ToEngine | FromEngine) -> bytes:
    """A message with its length in front.

    Raises:
        ValueError: the message exceeds MAX_FRAME_BYTES.
    """
    payload = _encoder.encode(message)
    if len(payload) > MAX_FRAME_BYTES:
        raise ValueError(
            f"{type(message).__name__}: {len(payload)} bytes exceed the limit of {MAX_FRAME_BYTES} for one message"
        )
    return _LENGTH.pack(len(payload)) + payload


def decode_to_engine(payload: bytes) -> ToEngine:
    """Raises ProtocolError for anything that is not a message of this direction."""
    return _decode(_to_engine, payload)


def decode_from_engine(payload: bytes) -> FromEngine:
    """Raises ProtocolError for anything that is not a message of this direction."""
    return _decode(_from_engine, payload)


def _decode(decoder: "msgspec.msgpack.Decoder[M]", payload: bytes) -> M:
    try:
        return decoder.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, ValueError) as error:
        raise ProtocolError(f"a frame of {len(payload)} bytes is not a message: {error}") from error


class FrameBuffer:
    """Cuts a byte stream into frames, holding back what is incomplete (at most one frame and one read)."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """The payloads completed by `data`, in order.

        Raises:
            ProtocolError: a length of 0 or above MAX_FRAME_BYTES; the stream cannot be used any further.
        """
        buffer = self._buffer
        buffer += data
        payloads: list[bytes] = []
        at = 0
        while len(buffer) - at >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(buffer, at)
            if not 0 < length <= MAX_FRAME_BYTES:
                raise ProtocolError(f"a frame announces {length} bytes; 1..{MAX_FRAME_BYTES} are allowed")
            end = at + _LENGTH.size + length
            if len(buffer) < end:
                break
            payloads.append(bytes(buffer[at + _LENGTH.size : end]))
            at = end
        del buffer[:at]
        return payloads

    def finish(self) -> None:
        """Call at the end of the stream.

        Raises:
            ProtocolError: it ended inside a frame.
        """
        if self._buffer:
            raise ProtocolError(f"the stream ended inside a frame, {len(self._buffer)} bytes into it")
