"""The decoder layers of a model and the norm behind them as one call on the CPU, for few rows.

At few rows a layer takes a third of a millisecond, so that calls from Python and waking the threads for each kernel
would cost as much again as the row-wise kernels themselves. The kernels and their order are those of
`DecoderLayer.forward`, and so are the results, bit for bit.

Shapes: N rows of at most MAX_ROWS, H hidden, T taps.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from engine.attention.context import AttentionContext, AttentionGroup
from engine.attention.cpu_job import Word
from engine.attention.cpu_paged import cpu_paged_attention, group_plan, window_matters
from engine.layers.cpu_rows import row_kernels
from engine.layers.cpu_rows_job import NormWord, RotateWord
from engine.layers.rms_norm import RMSNorm
from engine.models.cpu_phases import MAX_ROWS, CpuPhases

if TYPE_CHECKING:
    from engine.models.decoder import DecoderLayer

_ANGLE_WORDS = (RotateWord.COS, RotateWord.SIN, RotateWord.ANGLE_STRIDE, RotateWord.SLOTS)
_GROUP_WORDS = range(Word.TABLE, Word.TICKET)  # of an attention job, those that a step's group decides


class CpuStack:
    """For one model and one KV cache; runs on the threads of its matrices."""

    def __init__(
        self,
        layers: Sequence["DecoderLayer"],
        norm: RMSNorm,
        kv: Sequence[tuple[Tensor, Tensor]],
        tap_layers: Sequence[int],
    ) -> None:
        self._num_heads, self._k_cache = layers[0].num_heads, kv[0][0]
        self._phases = CpuPhases(dtype=norm.weight.dtype, threads=layers[0].qkv.matrix.threads)
        H = norm.weight.shape[0]
        self._x, self._hidden = self._phases.room(H), self._phases.room(H)
        self._taps = [self._phases.room(H) for _ in tap_layers]
        self._tail_words: list[tuple[int, Tensor]] = []
        self._build(layers, norm, kv, tap_layers)
        shift = self._phases.close()
        self._angle_index = np.array([self._phases.rotate_jobs + word for word in _ANGLE_WORDS])
        groups = np.array([self._phases.attention_jobs + word for word in _GROUP_WORDS])
        self._group_index, self._tail_group_index = groups[:, :-1], groups[:, -1]
        self._tail_index = np.array([word for word, _ in self._tail_words]) + shift
        self._tail_address = np.array([tensor.data_ptr() for _, tensor in self._tail_words])
        self._tail_row_bytes = np.array([tensor.stride(0) * tensor.element_size() for _, tensor in self._tail_words])

    @staticmethod
    def suits(layers: Sequence["DecoderLayer"]) -> bool:
        """Whether one can be made: of an unsharded model on the CPU whose matrices are prepared."""
        return all(
            layer.tp.size == 1
            and layer.suits_kernels
            and layer.attention is cpu_paged_attention
            and layer.qkv.is_prepared
            and row_kernels(layer.post_norm.weight.dtype) is not None
            for layer in layers
        )

    @staticmethod
    def takes(num_rows: int, ctx: AttentionContext) -> bool:
        """Whether `run` can be called with these rows: few, and all of one group that sees everything before it."""
        if num_rows > MAX_ROWS or len(ctx.groups) != 1:
            return False
        (group,) = ctx.groups
        return group.num_rows == num_rows and not window_matters(group)

    def run(
        self,
        x_NH: Tensor,
        angles: tuple[Tensor, Tensor],
        ctx: AttentionContext,
        wanted: range | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """(hidden states after the norm [N, H], outputs of the tapped layers [N, T, H] or None). x_NH is kept.

        wanted: the only rows whose hidden states are returned, of a lone sequence without a causal mask and a model
            without taps: the last layer then does less. None: all.
        """
        N, (cos, sin), (group,) = x_NH.shape[0], angles, ctx.groups
        assert cos.stride() == sin.stride()
        assert cos.stride(-1) == 1
        wanted = wanted or range(N)
        slots_N = ctx.slot_mapping_N.contiguous()
        words = self._phases.fresh(N, len(wanted))
        words[self._angle_index] = [[cos.data_ptr()], [sin.data_ptr()], [cos.stride(0)], [slots_N.data_ptr()]]
        plan = self._plan(group)
        words[self._group_index] = plan.job_words[:, None]
        if len(wanted) < N:
            assert len(group.q_lens) == 1
            assert not group.causal
            assert not self._taps
            plan_of_tail = self._plan(replace(group, q_lens=(len(wanted),)))
            words[self._tail_group_index] = plan_of_tail.job_words
            words[self._tail_index] = self._tail_address + wanted.start * self._tail_row_bytes
        else:
            words[self._tail_group_index] = plan.job_words
        self._x[:N].copy_(x_NH)
        self._phases.run()
        taps = torch.stack([tap[:N] for tap in self._taps], dim=1) if self._taps else None
        return self._hidden[: len(wanted)].clone(), taps

    def _plan(self, group: AttentionGroup) -> "_Plan":
        return _Plan(group, self._num_heads, self._k_cache, self._phases.threads)

    def _build(
        self,
        layers: Sequence["DecoderLayer"],
        norm: RMSNorm,
        kv: Sequence[tuple[Tensor, Tensor]],
        tap_layers: Sequence[int],
    ) -> None:
        """The residual stream stays in one place, but for what a tapped layer gives out: that is kept beside it.

        In the tail, row r of q and of the residual stream meets row r - wanted.start of the rest.
        """
        phases, first, x = self._phases, layers[0], self._x
        taps = dict(zip(tap_layers, self._taps, strict=True))
        delta, q = phases.room(norm.weight.shape[0]), phases.room(first.num_heads * first.head_dim)
        qkv, gate_up = phases.room(first.qkv.matrix.o), phases.room(first.gate_up.matrix.o)
        for index, (layer, layer_kv) in enumerate(zip(layers, kv, strict=True)):
            out = taps.get(index - 1, self._x)
            phases.norm(layer.input_norm, x, delta if index else None, out, phases.operand(layer.qkv))
            x = self._x
            phases.multiply(layer.qkv, qkv)
            phases.rotate(qkv, q, layer_kv, norm_weight=layer.qk_norm_weight, eps=layer.eps, num_heads=layer.num_heads)
            if index == len(layers) - 1:
                phases.begin_tail()
            attention = phases.attend(q, layer_kv, phases.operand(layer.o))
            phases.multiply(layer.o, delta)
            post_norm = phases.norm(layer.post_norm, out, delta, x, phases.operand(layer.gate_up))
            phases.multiply(layer.gate_up, gate_up)
            phases.silu(layer, gate_up)
            phases.multiply(layer.down, delta)
        end = phases.norm(norm, x, delta, taps.get(len(layers) - 1, x), self._hidden)
        self._tail_words = [(attention + Word.Q, q), (post_norm + NormWord.X, out)]
        self._tail_words += [(at + word, x) for at, word in ((post_norm, NormWord.SUM), (end, NormWord.X))]
        self._tail_words.append((end + NormWord.SUM, taps.get(len(layers) - 1, x)))


class _Plan:
    """A group's work as words of an attention job. Holds the memory that they name."""

    def __init__(self, group: AttentionGroup, num_heads: int, k_cache: Tensor, threads: int) -> None:
        self._plan = group_plan(group, num_heads, k_cache, threads=threads)
        self.job_words = np.array(self._plan.job[Word.TABLE : Word.TICKET], dtype=np.int64)


class CpuStacks:
    """The stack of a model for the KV cache and the taps that it is run with, made when they are first seen."""

    def __init__(self, layers: Sequence["DecoderLayer"], norm: RMSNorm) -> None:
        self._layers, self._norm = layers, norm
        self._key: tuple[Sequence[tuple[Tensor, Tensor]], tuple[int, ...]] | None = None
        self._stack: CpuStack | None = None

    def find(
        self,
        x_NH: Tensor,
        ctx: AttentionContext,
        kv: Sequence[tuple[Tensor, Tensor]],
        tap_layers: tuple[int, ...] = (),
    ) -> CpuStack | None:
        """What can run these rows; None: the layers do it one by one."""
        num_rows, first = x_NH.shape[0], self._layers[0]
        if x_NH.device.type != "cpu" or not CpuStack.takes(num_rows, ctx):
            return None
        if not all(matrix.kernel_takes(num_rows) for matrix in (first.qkv, first.o, first.gate_up, first.down)):
            return None
        if self._key is None or self._key[0] is not kv or self._key[1] != tap_layers:
            if not CpuStack.suits(self._layers):
                return None
            self._stack, self._key = CpuStack(self._layers, self._norm, kv, tap_layers), (kv, tap_layers)
        return self._stack
