"""Messages survive the round trip; hostile bytes end in ProtocolError and nothing else."""

import contextlib
import struct

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.request import EngineRequest, TokenDelta
from engine.sampling_params import SamplingParams
from engine.step import TokenLogprobs
from workers import protocol as p
from workers.errors import ProtocolError

REQUEST = EngineRequest(
    request_id="r\u00e9q-1",
    prompt_token_ids=(1, 2, 3),
    params=SamplingParams(temperature=0.5, stop=("\n",), stop_token_ids=(7,), logprobs=2, seed=2**63 - 1),
    cache_salt="s",
)
DELTA = TokenDelta(
    request_id="r",
    token_ids=(5, 6),
    finish_reason="stop",
    stop_reason=7,
    logprobs=(TokenLogprobs(token_id=5, logprob=-0.5, rank=1, top_ids=(5,), top_logprobs=(-0.5,)),),
    num_drafted=3,
    num_accepted=1,
    is_decode_step=True,
)
TO_ENGINE = [
    p.AddRequest(request=REQUEST),
    p.Abort(request_id="x"),
    *[p.Call(call_id=9, method=method) for method in p.CallMethod],
    p.ApplySchedule(call_id=1, version=(3, 4), schedule={1: 15, 8: 0}),
    p.Shutdown(),
]
FROM_ENGINE = [
    p.Hello(version=1, pid=2, device_name="a GPU"),
    p.StepMessage(beat=3, deltas=(DELTA, TokenDelta(request_id="q", stop_reason="text"))),
    p.Rejected(request_id="x", message="no"),
    p.CallFailed(call_id=1, is_value_error=True, message="no"),
    p.EngineFailed(cause="c", details="d"),
]


@pytest.mark.parametrize("message", TO_ENGINE, ids=repr)
def test_messages_to_the_engine_round_trip(message: p.ToEngine) -> None:
    (payload,) = p.FrameBuffer().feed(p.encode_frame(message))
    assert p.decode_to_engine(payload) == message


@pytest.mark.parametrize("message", FROM_ENGINE, ids=lambda m: type(m).__name__)
def test_messages_from_the_engine_round_trip(message: p.FromEngine) -> None:
    (payload,) = p.FrameBuffer().feed(p.encode_frame(message))
    assert p.decode_from_engine(payload) == message


def test_reply_carries_any_value() -> None:
    for value in (None, 17, {"a": [1, 2]}):
        (payload,) = p.FrameBuffer().feed(p.encode_frame(p.Reply(call_id=1, value=p.encode_value(value))))
        reply = p.decode_from_engine(payload)
        assert isinstance(reply, p.Reply)
        assert msgspec.msgpack.decode(reply.value) == value


@given(cuts=st.lists(st.integers(1, 40), min_size=1, max_size=60))
@settings(max_examples=50, deadline=None)
def test_frames_survive_any_cutting(cuts: list[int]) -> None:
    stream = b"".join(p.encode_frame(message) for message in TO_ENGINE)
    frames, got, at = p.FrameBuffer(), [], 0
    for cut in cuts:
        got += frames.feed(stream[at : at + cut])
        at += cut
    got += frames.feed(stream[at:])
    assert [p.decode_to_engine(payload) for payload in got] == TO_ENGINE
    frames.finish()


def test_truncated_stream_is_told_at_its_end() -> None:
    frames = p.FrameBuffer()
    assert frames.feed(p.encode_frame(TO_ENGINE[0])[:-1]) == []
    with pytest.raises(ProtocolError, match="ended inside a frame"):
        frames.finish()


@pytest.mark.parametrize("length", [0, p.MAX_FRAME_BYTES + 1, 2**32 - 1])
def test_a_frame_outside_the_limits_is_refused_before_it_is_buffered(length: int) -> None:
    with pytest.raises(ProtocolError, match=rf"a frame announces {length} bytes; 1\.\.{p.MAX_FRAME_BYTES} are allowed"):
        p.FrameBuffer().feed(struct.pack(">I", length))


def test_an_oversized_message_is_refused_by_its_sender() -> None:
    with pytest.raises(ValueError, match=r"Rejected: \d+ bytes exceed the limit of \d+ for one message"):
        p.encode_frame(p.Rejected(request_id="x", message="y" * p.MAX_FRAME_BYTES))


@given(data=st.binary(max_size=200))
@settings(max_examples=300, deadline=None)
def test_garbage_is_a_protocol_error_or_a_message(data: bytes) -> None:
    for decode, kinds in ((p.decode_to_engine, p.ToEngine), (p.decode_from_engine, p.FromEngine)):
        try:
            assert isinstance(decode(data), kinds)
        except ProtocolError:
            continue


@given(data=st.data())
@settings(max_examples=200, deadline=None)
def test_flipped_bytes_are_a_protocol_error_or_a_message(data: st.DataObject) -> None:
    payload = bytearray(p.encode_frame(data.draw(st.sampled_from(TO_ENGINE)))[4:])
    for _ in range(data.draw(st.integers(1, 3))):
        payload[data.draw(st.integers(0, len(payload) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(ProtocolError):
        assert isinstance(p.decode_to_engine(bytes(payload)), p.ToEngine)


@pytest.mark.parametrize(
    "payload",
    [
        b"\x91" * 5000,
        b"\xde\xff\xff",
        msgspec.msgpack.encode({"type": "nope"}),
        msgspec.msgpack.encode({"type": "add"}),
    ],
    ids=["nested", "huge map", "unknown tag", "missing field"],
)
def test_hostile_payloads(payload: bytes) -> None:
    with pytest.raises(ProtocolError):
        p.decode_to_engine(payload)


def test_directions_do_not_mix() -> None:
    with pytest.raises(ProtocolError):
        p.decode_to_engine(p.encode_frame(p.Hello(version=1, pid=1))[4:])
