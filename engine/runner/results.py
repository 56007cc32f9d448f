"""From a step's device decision to host messages: token lists, counts and, where asked for, log-probabilities."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import msgspec
import torch

from engine.kernels.row_state import ENTRIES
from engine.layers.upload import upload
from engine.parallel.tp_group import TpGroup
from engine.runner.clock import StepClock
from engine.runner.draft_program import Decision
from engine.sampling.logprobs import LogprobTensors, to_messages, token_logprobs
from engine.step import Finish, RowResult, SlotInit, TokenLogprobs

NUM_COUNTS = 4  # numbers of a packed row ahead of its tokens
_NUMBER = 0x7FFFFFFF  # of an upload's number, what an entry holds
_FINISH = tuple(Finish)  # by value: they are 0, 1, 2, ..


@dataclass(frozen=True, kw_only=True)
class LogprobRows:
    """Log-probabilities of every column of the rows that asked for them; which columns count is not known yet.

    rows: indices of those rows in plan order. tensors: num_columns entries of each decode row (the first num_decode
        rows of the step) and one of each prompt that ended, in the order of `rows`.
    """

    rows: tuple[int, ...]
    num_decode: int
    num_columns: int
    tensors: LogprobTensors

    @classmethod
    def of(
        cls, decision: Decision, inits: Sequence[SlotInit], logits_MV: torch.Tensor, num_decode: int, tp: TpGroup
    ) -> Self | None:
        """Raw-model log-probabilities, on their way to the host. None: no row asked.

        logits_MV: K + 1 rows of each decode row, then one of each prompt that ended.
        """
        rows = tuple([i for i, init in enumerate(inits) if init.num_logprobs >= 0])
        if not rows:
            return None
        columns = decision.tokens_SE.shape[1]
        logit_rows: list[int] = []
        for i in rows:
            if i < num_decode:
                logit_rows.extend(range(i * columns, (i + 1) * columns))
            else:
                logit_rows.append(num_decode * columns + i - num_decode)
        index_M = upload(logit_rows, logits_MV.device)
        tokens_M = torch.cat([decision.tokens_SE[:num_decode].reshape(-1), decision.tokens_SE[num_decode:, 0]])
        tensors = token_logprobs(
            logits_MV[index_M], tokens_M[index_M], top_n=max([inits[i].num_logprobs for i in rows]), tp=tp
        )
        return cls(rows=rows, num_decode=num_decode, num_columns=columns, tensors=tensors.sent_to_host())

    def messages(self, inits: Sequence[SlotInit], emitted: list[int]) -> dict[int, tuple[TokenLogprobs, ...]]:
        """The emitted tokens' log-probabilities by row, once the step is done."""
        widths = [self.num_columns if i < self.num_decode else 1 for i in self.rows]
        tops = [inits[i].num_logprobs for i, width in zip(self.rows, widths, strict=True) for _ in range(width)]
        messages = to_messages(self.tensors, tops)
        result: dict[int, tuple[TokenLogprobs, ...]] = {}
        start = 0
        for i, width in zip(self.rows, widths, strict=True):
            if emitted[i]:
                result[i] = messages[start : start + emitted[i]]
            start += width
        return result


class ResultRows(msgspec.Struct, frozen=True, kw_only=True):
    """Where an entry of the ring holds some rows: `num_rows` of `width` numbers each, from `start` on.

    number: of the upload whose rows they are, if the device writes them there itself, with the number ahead of them.
    """

    start: int
    num_rows: int
    width: int
    number: int | None = None


class ResultEntry:
    """Host memory of one step's results, with the marks around the step.

    memory: int32, all entries' (pinned on CUDA), of which this one's begins at `place`.
    """

    def __init__(self, memory: torch.Tensor, place: int, capacity: int, device: torch.device) -> None:
        self.clock = StepClock(device)
        self.place = place
        self._host = memory[place : place + capacity]
        self._array = self._host.numpy()
        self._used = 0

    def begin(self) -> None:
        """A step is about to be launched; the last one's results, which have left, are gone."""
        self.clock.wait()
        self._used = 0
        self.clock.start()

    def expect(self, num_rows: int, width: int, number: int) -> ResultRows:
        """Rows that the device writes behind the upload's number, first of the entry; `place` is where the number goes.

        It may write more rows than these, which later ones replace.
        """
        assert self._used == 0, "rows that the device writes are the first"
        self._used = 1 + num_rows * width
        return ResultRows(start=1, num_rows=num_rows, width=width, number=number)

    def put(self, packed_SW: torch.Tensor) -> ResultRows:
        """Queues the copy of some rows, as `pack` makes them."""
        num_rows, width = packed_SW.shape
        start, self._used = self._used, self._used + num_rows * width
        self._host[start : self._used].view(num_rows, width).copy_(packed_SW, non_blocking=True)
        return ResultRows(start=start, num_rows=num_rows, width=width)

    def read(self, place: ResultRows) -> list[list[int]]:
        """The rows, once the step is done."""
        if place.number is not None:
            found = int(self._array[0])
            assert found == place.number & _NUMBER, f"rows of upload {found} where those of {place.number} should be"
        end = place.start + place.num_rows * place.width
        rows: list[list[int]] = self._array[place.start : end].reshape(place.num_rows, place.width).tolist()
        return rows


class ResultRing:
    """Entries taken in turn: one more than steps can be in flight.

    A step's entry is taken before the host writes anything else for it. By then the results of the step so many before
    it have left the device, so that step's upload, of which there are as many, has been read.
    """

    def __init__(self, *, num_rows: int, num_columns: int, device: torch.device) -> None:
        capacity = 1 + num_rows * (NUM_COUNTS + 2 * num_columns)  # tokens, and the drafts behind them
        pinned = device.type == "cuda"
        self.memory = torch.zeros(ENTRIES * capacity, dtype=torch.int32, pin_memory=pinned)
        self._entries = [ResultEntry(self.memory, n * capacity, capacity, device) for n in range(ENTRIES)]
        self._next = 0

    def wait(self) -> None:
        """Until nothing that was launched uses the host's memory any more."""
        for entry in self._entries:
            entry.clock.wait()

    def take(self) -> ResultEntry:
        entry = self._entries[self._next]
        self._next = (self._next + 1) % len(self._entries)
        entry.begin()
        return entry


def pack(decision: Decision) -> torch.Tensor:
    """int32 [S, NUM_COUNTS + E]: emitted, accepted, drafted, finish, then the tokens of each row."""
    if decision.fused is not None:
        assert decision.fused.packed is not None, "the rows went to the host's memory"
        return decision.fused.packed
    counts_S4 = torch.stack(
        [decision.num_emitted_S, decision.num_accepted_S, decision.num_drafted_S, decision.finish_S], dim=1
    )
    return torch.cat([counts_S4, decision.tokens_SE], dim=1).to(torch.int32)


def unpack(packed_SW: torch.Tensor, slots: Sequence[int]) -> Decision:
    """The decision behind packed rows, as views of them."""
    emitted_S, accepted_S, drafted_S, finish_S = packed_SW[:, :NUM_COUNTS].unbind(dim=1)
    return Decision(
        slots_S=upload(slots, packed_SW.device),
        tokens_SE=packed_SW[:, NUM_COUNTS:],
        num_emitted_S=emitted_S,
        num_accepted_S=accepted_S,
        num_drafted_S=drafted_S,
        finish_S=finish_S,
    )


def row_results(
    packed: list[list[int]],
    inits: Sequence[SlotInit],
    logprobs: LogprobRows | None,
    drafts: Sequence[tuple[int, ...]] | None,
) -> list[RowResult]:
    """One RowResult per sampling row, in the order of `packed` and `inits`. drafts: None where nobody asked."""
    entries = {} if logprobs is None else logprobs.messages(inits, [row[0] for row in packed])
    return [
        RowResult(
            slot=init.slot,
            generation=init.generation,
            token_ids=tuple(row[NUM_COUNTS : NUM_COUNTS + row[0]]),
            num_drafted=row[2],
            num_accepted=row[1],
            finish=_FINISH[row[3]],
            logprobs=entries.get(i),
            drafts=() if drafts is None else drafts[i],
        )
        for i, (row, init) in enumerate(zip(packed, inits, strict=True))
    ]
