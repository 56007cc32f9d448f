"""The decoder layers of a model and the norm behind them as one call on the CPU, for few rows.

At few rows a layer takes a third of a millisecond, so that calls from Python and waking the threads for each kernel
would cost as much again as the row-wise kernels themselves. The kernels and their order are those of
`DecoderLayer.forward`, and so are the results, bit for bit.

Shapes: N rows of at most MAX_ROWS, H hidden, T taps, h query heads, g KV heads, D head size.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from engine.attention.context import AttentionContext
from engine.attention.cpu_job import Word
from engine.attention.cpu_paged import attention_kernel, cpu_paged_attention, group_plan, window_matters
from engine.layers.cpu_gemm import GemmWord, QuantiseWord, panel_counters
from engine.layers.cpu_int8_gemm import Int8Matrix
from engine.layers.cpu_program import TeamProgram
from engine.layers.cpu_rows import float_bits, row_kernels
from engine.layers.cpu_rows_job import WIDE, NormWord, RotateWord, SiluWord
from engine.layers.linear import Linear
from engine.layers.rms_norm import RMSNorm

if TYPE_CHECKING:
    from engine.models.decoder import DecoderLayer

MAX_ROWS = 64  # above, a layer takes milliseconds
_GROUP_WORDS = tuple(range(Word.TABLE, Word.TICKET))  # of an attention job, those that a step's group decides


class CpuStack:
    """Made by `build` for one model and one KV cache; runs on the threads of its matrices."""

    def __init__(
        self,
        layers: Sequence["DecoderLayer"],
        norm: RMSNorm,
        kv: Sequence[tuple[Tensor, Tensor]],
        tap_layers: Sequence[int],
    ) -> None:
        first = layers[0]
        self._dtype = norm.weight.dtype
        kernels = row_kernels(self._dtype)
        assert kernels is not None
        self._kernels = kernels
        self._hidden_size = H = norm.weight.shape[0]
        self._num_heads, self._k_cache = first.num_heads, kv[0][0]
        self._program = TeamProgram(threads=first.qkv.matrix.threads)
        self._rooms: list[Tensor] = []  # the jobs hold addresses
        self._operands: dict[tuple[int, torch.dtype], Tensor] = {}  # by width
        self._row_words: list[int] = []
        self._rotate_jobs: list[int] = []
        self._attention_jobs: list[int] = []
        self._x = self._room(H)
        self._hidden = self._room(H)
        self._taps = [self._room(H) for _ in tap_layers]
        self._build(layers, norm, kv, tap_layers)
        shift = self._program.close()
        self._row_index = np.array(self._row_words) + shift
        rotate, attention = np.array(self._rotate_jobs) + shift, np.array(self._attention_jobs) + shift
        step_words = (RotateWord.COS, RotateWord.SIN, RotateWord.ANGLE_STRIDE, RotateWord.SLOTS)
        self._step_index = np.array(
            [*[rotate + word for word in step_words], *[attention + word for word in _GROUP_WORDS]]
        )
        self._fresh = {0: self._program.words.copy()}  # by the number of rows

    @staticmethod
    def suits(layers: Sequence["DecoderLayer"]) -> bool:
        """Whether `build` can be called: an unsharded model on the CPU whose matrices are prepared."""
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

    def run(self, x_NH: Tensor, angles: tuple[Tensor, Tensor], ctx: AttentionContext) -> tuple[Tensor, Tensor | None]:
        """(hidden states after the norm [N, H], outputs of the tapped layers [N, T, H] or None). x_NH is kept."""
        N, (cos, sin), (group,) = x_NH.shape[0], angles, ctx.groups
        assert cos.stride() == sin.stride()
        assert cos.stride(-1) == 1
        slots_N = ctx.slot_mapping_N.contiguous()
        plan = group_plan(group, self._num_heads, self._k_cache, threads=self._program.threads)
        words = self._program.words
        words[:] = self._fresh_words(N)
        values = [
            cos.data_ptr(),
            sin.data_ptr(),
            cos.stride(0),
            slots_N.data_ptr(),
            *plan.job[Word.TABLE : Word.TICKET],
        ]
        words[self._step_index] = np.array(values, dtype=np.int64)[:, None]
        self._x[:N].copy_(x_NH)
        self._program.run()
        taps = torch.stack([tap[:N] for tap in self._taps], dim=1) if self._taps else None
        return self._hidden[:N].clone(), taps

    def _fresh_words(self, num_rows: int) -> np.ndarray:
        words = self._fresh.get(num_rows)
        if words is None:
            words = self._fresh[0].copy()
            words[self._row_index] = num_rows
            self._fresh[num_rows] = words
        return words

    # ---------------------------------------------------------------------------------------- the program

    def _build(
        self,
        layers: Sequence["DecoderLayer"],
        norm: RMSNorm,
        kv: Sequence[tuple[Tensor, Tensor]],
        tap_layers: Sequence[int],
    ) -> None:
        """The residual stream stays in one place, but for what a tapped layer gives out: that is kept beside it."""
        taps = dict(zip(tap_layers, self._taps, strict=True))
        first = layers[0]
        delta, q = self._room(self._hidden_size), self._room(first.num_heads * first.head_dim)
        qkv, gate_up = self._room(first.qkv.matrix.o), self._room(first.gate_up.matrix.o)
        x = self._x
        for index, (layer, layer_kv) in enumerate(zip(layers, kv, strict=True)):
            out = taps.get(index - 1, self._x)
            self._norm(layer.input_norm, x, delta if index else None, out, self._operand(layer.qkv))
            self._multiply(layer.qkv, qkv)
            self._rotate(layer, qkv, q, layer_kv)
            self._attend(layer, q, layer_kv)
            self._multiply(layer.o, delta)
            self._norm(layer.post_norm, out, delta, self._x, self._operand(layer.gate_up))
            self._multiply(layer.gate_up, gate_up)
            self._silu(layer, gate_up)
            self._multiply(layer.down, delta)
            x = self._x
        self._norm(norm, x, delta, taps.get(len(layers) - 1, self._x), self._hidden)

    def _room(self, width: int, dtype: torch.dtype | None = None) -> Tensor:
        tensor = torch.zeros(MAX_ROWS, width, dtype=dtype or self._dtype)
        self._rooms.append(tensor)
        return tensor

    def _operand(self, linear: Linear) -> Tensor:
        """Where the matrix finds its input: widened, or as it is for the quantiser."""
        matrix = linear.matrix
        key = matrix.k, self._dtype if isinstance(matrix, Int8Matrix) else torch.float32
        if key not in self._operands:
            self._operands[key] = self._room(*key)
        return self._operands[key]

    def _kernel(self, name: str, out: Tensor) -> int:
        """The address of a row-wise kernel that writes to out."""
        return self._kernels.address(name if out.dtype == self._dtype else name + WIDE)

    def _add(self, kernel: int, job: Mapping[int, int], rows: int) -> int:
        """A phase whose job, by its words, counts the step's rows in word `rows`."""
        words = [0] * (max(rows, *job) + 1)
        for word, value in job.items():
            words[word] = value
        at = self._program.add(kernel, words)
        self._row_words.append(at + rows)
        return at

    def _norm(self, norm: RMSNorm, x: Tensor, delta: Tensor | None, total: Tensor, out: Tensor) -> None:
        job = {
            NormWord.X: x.data_ptr(),
            NormWord.OUT: out.data_ptr(),
            NormWord.WEIGHT: norm.weight.data_ptr(),
            NormWord.SIZE: self._hidden_size,
            NormWord.EPS: float_bits(norm.eps),
            NormWord.COUNTER: 0,
            NormWord.DELTA: 0 if delta is None else delta.data_ptr(),
            NormWord.SUM: total.data_ptr(),
        }
        self._add(self._kernel("rms_norm" if delta is None else "add_rms_norm", out), job, NormWord.ROWS)

    def _multiply(self, linear: Linear, out: Tensor) -> None:
        matrix, x = linear.matrix, self._operand(linear)
        job = {GemmWord.LAYER: matrix.address, GemmWord.X: x.data_ptr(), GemmWord.OUT: out.data_ptr()}
        if isinstance(matrix, Int8Matrix):
            pairs, scale = self._room(matrix.k, torch.int16), self._room(1, torch.float32)
            quantise = {
                QuantiseWord.X: x.data_ptr(),
                QuantiseWord.PAIRS: pairs.data_ptr(),
                QuantiseWord.ROW_SCALE: scale.data_ptr(),
                QuantiseWord.SIZE: matrix.k,
                QuantiseWord.COUNTER: 0,
            }
            self._add(matrix.kernels.quantise, quantise, QuantiseWord.ROWS)
            job |= {GemmWord.X: pairs.data_ptr(), GemmWord.ROW_SCALE: scale.data_ptr()}
        room = self._program.reserve(0, first=panel_counters(matrix.packed.shape[0], matrix.threads))
        words = [job.get(word, 0) for word in GemmWord]
        at = self._program.add(matrix.kernels.worker, words, own=[(GemmWord.COUNTERS, room)])
        self._row_words.append(at + GemmWord.ROWS)

    def _rotate(self, layer: "DecoderLayer", qkv: Tensor, q: Tensor, kv: tuple[Tensor, Tensor]) -> None:
        job = {
            RotateWord.QKV: qkv.data_ptr(),
            RotateWord.Q: q.data_ptr(),
            RotateWord.K: kv[0].data_ptr(),
            RotateWord.V: kv[1].data_ptr(),
            RotateWord.NORM_WEIGHT: 0 if layer.qk_norm_weight is None else layer.qk_norm_weight.data_ptr(),
            RotateWord.EPS: float_bits(layer.eps),
            RotateWord.HEADS: layer.num_heads,
            RotateWord.KV_HEADS: layer.num_kv_heads,
            RotateWord.HEAD_DIM: layer.head_dim,
            RotateWord.COUNTER: 0,
        }
        self._rotate_jobs.append(self._add(self._kernels.address("rotate_and_write"), job, RotateWord.ROWS))

    def _attend(self, layer: "DecoderLayer", q: Tensor, kv: tuple[Tensor, Tensor]) -> None:
        out = self._operand(layer.o)
        words = [0] * len(Word)
        words[Word.Q], words[Word.Q_STRIDE] = q.data_ptr(), q.shape[1]
        words[Word.K], words[Word.V] = kv[0].data_ptr(), kv[1].data_ptr()
        words[Word.OUT] = out.data_ptr()
        kernel = attention_kernel(self._dtype, wide=out.dtype != self._dtype)
        self._attention_jobs.append(self._program.add(kernel.address, words))

    def _silu(self, layer: "DecoderLayer", gate_up: Tensor) -> None:
        out = self._operand(layer.down)
        job = {
            SiluWord.X: gate_up.data_ptr(),
            SiluWord.OUT: out.data_ptr(),
            SiluWord.SIZE: layer.mlp_size,
            SiluWord.COUNTER: 0,
        }
        self._add(self._kernel("silu_mul", out), job, SiluWord.ROWS)


class CpuStacks:
    """The stack of a model for the KV cache and the taps that it is run with, made when they are first seen."""

    def __init__(self, layers: Sequence["DecoderLayer"], norm: RMSNorm) -> None:
        self._layers, self._norm_module = layers, norm
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
        if x_NH.device.type != "cpu" or not CpuStack.takes(x_NH.shape[0], ctx):
            return None
        if self._key is None or self._key[0] is not kv or self._key[1] != tap_layers:
            if not CpuStack.suits(self._layers):
                return None
            self._stack, self._key = CpuStack(self._layers, self._norm_module, kv, tap_layers), (kv, tap_layers)
        return self._stack
