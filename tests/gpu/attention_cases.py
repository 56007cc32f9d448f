"""Random paged attention problems and their answer in float64, written out with a gather and a mask."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.attention.context import AttentionContext, AttentionGroup


@dataclass(frozen=True, kw_only=True)
class Problem:
    """Sequences over scattered blocks. starts + q_lens - short gives kv_len: `short` of a row's queries are filler."""

    q_lens: tuple[int, ...]
    starts: tuple[int, ...]
    short: tuple[int, ...] = ()
    h: int = 6
    g: int = 2
    D: int = 64
    block_size: int = 16
    causal: bool = True
    spare: int = 0
    first_row: int = 0

    @property
    def kv_lens(self) -> list[int]:
        short = self.short or (0,) * len(self.starts)
        return [s + n - cut for s, n, cut in zip(self.starts, self.q_lens, short, strict=True)]

    def group(self, device: str) -> AttentionGroup:
        longest = max(s + n for s, n in zip(self.starts, self.q_lens, strict=True)) + self.spare
        columns = -(-longest // self.block_size)
        ids = torch.randperm(self.num_blocks - 1, generator=torch.Generator().manual_seed(1)) + 1
        table = ids[: len(self.q_lens) * columns].view(len(self.q_lens), columns)
        return AttentionGroup(
            first_row=self.first_row,
            q_lens=self.q_lens,
            q_start_R=torch.tensor(self.starts, device=device),
            kv_len_R=torch.tensor(self.kv_lens, device=device),
            block_table_RB=table.to(device),
            max_kv_len=columns * self.block_size,
            causal=self.causal,
        )

    @property
    def num_blocks(self) -> int:
        longest = max(s + n for s, n in zip(self.starts, self.q_lens, strict=True)) + self.spare
        return 1 + len(self.q_lens) * -(-longest // self.block_size)

    def tensors(self, dtype: torch.dtype, device: str, *, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
        """(q, K cache, V cache); q is a view with a longer row stride. Unused places hold NaN."""
        generator = torch.Generator().manual_seed(seed)
        rows = self.first_row + sum(self.q_lens)
        q = torch.randn(rows, self.h + 2 * self.g, self.D, generator=generator)
        caches = torch.randn(2, self.num_blocks, self.block_size, self.g, self.D, generator=generator)
        used = torch.zeros(self.num_blocks * self.block_size, dtype=torch.bool)
        for r, table in enumerate(self.group("cpu").block_table_RB):
            places = torch.arange(self.kv_lens[r])
            used[table[places // self.block_size] * self.block_size + places % self.block_size] = True
        caches = caches.view(2, -1, self.g, self.D).masked_fill(~used[:, None, None], float("nan")).view(caches.shape)
        k, v = (cache.to(dtype).to(device) for cache in caches)
        return q.to(dtype).to(device)[:, : self.h], k, v

    def context(self, device: str) -> AttentionContext:
        rows = self.first_row + sum(self.q_lens)
        return AttentionContext(
            slot_mapping_N=torch.zeros(rows, dtype=torch.int64, device=device), groups=(self.group(device),)
        )

    def expected(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        *,
        window: int | None = None,
        soft_cap: float | None = None,
        sink_h: Tensor | None = None,
    ) -> Tensor:
        """float64 [rows of the group, h * D]."""
        q, k_cache, v_cache = (t.cpu().double() for t in (q, k_cache, v_cache))
        group = self.group("cpu")
        outs: list[Tensor] = []
        row = self.first_row
        for r, length in enumerate(self.q_lens):
            places = torch.arange(self.kv_lens[r])
            blocks = group.block_table_RB[r, places // self.block_size]
            k, v = (
                c[blocks, places % self.block_size].repeat_interleave(self.h // self.g, dim=1)
                for c in (k_cache, v_cache)
            )
            score = torch.einsum("qhd,shd->hqs", q[row : row + length], k) / math.sqrt(self.D)
            if soft_cap is not None:
                score = soft_cap * torch.tanh(score / soft_cap)
            position = self.starts[r] + torch.arange(length)
            seen = torch.ones(length, self.kv_lens[r], dtype=torch.bool)
            if self.causal:
                seen = places <= position[:, None]
            if window is not None:
                seen = seen & (places >= (position[:, None] - window + 1).clamp(max=self.kv_lens[r] - 1))
            score = score.masked_fill(~seen, float("-inf"))
            if sink_h is not None:
                sink = sink_h.cpu().double().view(-1, 1, 1).expand(-1, length, 1)
                weight = torch.cat([score, sink], dim=-1).softmax(-1)[..., :-1]
            else:
                weight = score.softmax(-1)
            outs.append(torch.einsum("hqs,shd->qhd", weight, v).reshape(length, -1))
            row += length
        return torch.cat(outs)
