"""Writes the target's responses to many prompts at once.

Every slot of a fixed batch feeds one token a step: a prompt token while there are any, else the token it drew last, so
prompts need no pass of their own and a free slot takes the next request at once. A step has fixed shapes; on CUDA it is
one captured graph, and the host looks at the slots only every few steps. Shapes: B slots, T positions, V vocabulary.
"""

import itertools
import math
import time
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.training.target import FrozenTarget


@dataclass(frozen=True, kw_only=True)
class SampleRequest:
    """temperature 0 is greedy; max_new counts the end-of-sequence token."""

    prompt: list[int]
    max_new: int
    temperature: float
    tag: int = 0


@dataclass(frozen=True, kw_only=True)
class Sample:
    """tokens: prompt and response. ended: by the end-of-sequence token, not by a limit."""

    request: SampleRequest
    tokens: list[int]
    ended: bool


class BatchSampler:
    """A batch of slots over one cache. min_p: tokens less likely than min_p times the likeliest are not drawn."""

    def __init__(
        self,
        target: FrozenTarget,
        *,
        slots: int,
        max_len: int,
        stop_ids: tuple[int, ...],
        seed: int,
        min_p: float = 0.0,
        steps_per_look: int = 16,
    ) -> None:
        if not 0.0 <= min_p < 1.0:
            raise ValueError(f"min_p must lie in [0, 1), got {min_p}.")
        self.target, self.max_len, self.steps_per_look = target, max_len, steps_per_look
        self.log_min_p = math.log(min_p) if min_p else None
        device = target.device_name
        self.cache = target.new_cache(slots, max_len)
        self.tokens_BT = torch.zeros(slots, max_len, dtype=torch.int64, device=device)
        self.position_B = torch.zeros(slots, dtype=torch.int64, device=device)
        self.prompt_len_B = torch.ones(slots, dtype=torch.int64, device=device)
        self.limit_B = torch.full((slots,), max_len, dtype=torch.int64, device=device)
        self.temperature_B = torch.zeros(slots, dtype=torch.float32, device=device)
        self.done_B = torch.ones(slots, dtype=torch.bool, device=device)
        self.ended_B = torch.zeros(slots, dtype=torch.bool, device=device)
        self.stop_S = torch.tensor(stop_ids, dtype=torch.int64, device=device)
        self.steps = 0
        torch.manual_seed(seed)
        self._graph: torch.cuda.CUDAGraph | None = None
        if device.startswith("cuda"):
            torch.cuda.manual_seed(seed)
            self._graph = self._capture()

    def run(self, requests: Iterable[SampleRequest], *, seconds: float | None = None) -> Iterator[Sample]:
        """Responses in the order they are finished. After `seconds` no request is begun or continued.

        Raises:
            ValueError: a request that does not fit max_len.
        """
        source = iter(requests)
        slots: list[SampleRequest | None] = [None] * len(self.done_B)
        ready = deque(itertools.islice(source, len(slots)))
        finished: list[Sample] = []
        stop_at = math.inf if seconds is None else time.monotonic() + seconds
        while time.monotonic() < stop_at:
            free = [slot for slot, request in enumerate(slots) if request is None]
            self._admit(free, ready, slots)
            if all(request is None for request in slots):
                break
            for _ in range(self.steps_per_look):
                self._step_once()
            # The device is busy from here on: the caller's work on samples and the next requests' making cost no time.
            yield from finished
            ready.extend(itertools.islice(source, max(0, len(slots) // 2 - len(ready))))
            finished = self._harvest(slots)
        yield from finished

    def _admit(self, free: list[int], ready: deque[SampleRequest], slots: list[SampleRequest | None]) -> None:
        taken: list[int] = []
        for slot in free:
            if not ready:
                break
            request = ready.popleft()
            if not 0 < len(request.prompt) < self.max_len or request.max_new < 1:
                raise ValueError(
                    f"a prompt of {len(request.prompt)} tokens and max_new={request.max_new} need 1 <= prompt < "
                    f"{self.max_len} and max_new >= 1."
                )
            slots[slot] = request
            taken.append(slot)
        if not taken:
            return
        device = self.tokens_BT.device
        admitted = [held for slot in taken if (held := slots[slot]) is not None]
        rows = torch.zeros(len(taken), self.max_len, dtype=torch.int64)
        for row, request in zip(rows, admitted, strict=True):
            row[: len(request.prompt)] = torch.tensor(request.prompt)
        index = torch.tensor(taken, device=device)
        lengths = torch.tensor([len(r.prompt) for r in admitted])
        limits = torch.tensor([min(self.max_len, len(r.prompt) + r.max_new) for r in admitted])
        self.tokens_BT[index] = rows.to(device)
        self.position_B[index] = 0
        self.prompt_len_B[index] = lengths.to(device)
        self.limit_B[index] = limits.to(device)
        self.temperature_B[index] = torch.tensor([r.temperature for r in admitted], device=device)
        self.done_B[index] = False
        self.ended_B[index] = False

    def _harvest(self, slots: list[SampleRequest | None]) -> list[Sample]:
        done = self.done_B.tolist()
        finished = [slot for slot, request in enumerate(slots) if request is not None and done[slot]]
        if not finished:
            return []
        index = torch.tensor(finished, device=self.tokens_BT.device)
        rows = self.tokens_BT[index].tolist()
        lengths = (self.position_B[index] + 1).tolist()
        ended = self.ended_B[index].tolist()
        samples = []
        for slot, row, length, end in zip(finished, rows, lengths, ended, strict=True):
            request = slots[slot]
            assert request is not None
            samples.append(Sample(request=request, tokens=row[:length], ended=end))
            slots[slot] = None
        return samples

    def _step_once(self) -> None:
        self.steps += 1
        if self._graph is None:
            self._step()
        else:
            self._graph.replay()

    @torch.no_grad()
    def _step(self) -> None:
        """All in place; a done slot repeats itself and writes nothing new."""
        here_B1 = self.position_B.unsqueeze(1)
        logits_BV = self.target.decode(self.tokens_BT.gather(1, here_B1).squeeze(1), self.position_B, self.cache)
        drawn_B = self._draw(logits_BV.float())
        live_B = ~self.done_B
        next_B = torch.where(live_B, self.position_B + 1, self.position_B)
        forced_B = (next_B < self.prompt_len_B) | ~live_B
        next_B1 = next_B.unsqueeze(1)
        token_B = torch.where(forced_B, self.tokens_BT.gather(1, next_B1).squeeze(1), drawn_B)
        self.tokens_BT.scatter_(1, next_B1, token_B.unsqueeze(1))
        self.position_B.copy_(next_B)
        stopped_B = ~forced_B & (token_B.unsqueeze(1) == self.stop_S).any(1)
        self.ended_B.logical_or_(stopped_B)
        self.done_B.logical_or_(stopped_B | (live_B & (next_B + 1 >= self.limit_B)))

    def _draw(self, logits_BV: Tensor) -> Tensor:
        """argmax(logits + temperature * Gumbel noise): greedy rows are those of temperature 0."""
        heat_B1 = self.temperature_B.unsqueeze(1)
        noise_BV = torch.empty_like(logits_BV).exponential_().log_().neg_()
        if self.log_min_p is not None:
            least_B1 = logits_BV.amax(-1, keepdim=True) + heat_B1 * self.log_min_p
            logits_BV = logits_BV.masked_fill(logits_BV < least_B1, -math.inf)
        return torch.addcmul(logits_BV, noise_BV, heat_B1).argmax(-1)

    def _capture(self) -> torch.cuda.CUDAGraph:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                self._step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._step()
        return graph
