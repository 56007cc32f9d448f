"""A program of the CPU kernels of a model's layers, phase by phase: what each reads and writes, and its job's words."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from engine.attention.cpu_job import Word
from engine.attention.cpu_paged import attention_kernel
from engine.layers.cpu_gemm import GemmWord, QuantiseWord, panel_counters
from engine.layers.cpu_int8_gemm import Int8Matrix
from engine.layers.cpu_program import TeamProgram
from engine.layers.cpu_rows import float_bits, row_kernels
from engine.layers.cpu_rows_job import WIDE, NormWord, RotateWord, SiluWord
from engine.layers.linear import Linear
from engine.layers.rms_norm import RMSNorm

if TYPE_CHECKING:
    from engine.models.decoder import DecoderLayer

MAX_ROWS = 128  # above, a layer takes milliseconds and a call next to nothing of it
Words = np.ndarray[Any, np.dtype[np.int64]]


class CpuPhases:
    """First the methods that add a phase, then `close`; then, for every run, `fresh`, the step's own words, `run`.

    Tensors made by `room` are the program's own; a run reads and writes as many of their rows as the step has.
    rotate_jobs, attention_jobs: after `close`, where the jobs of these kernels begin in the words.
    """

    rotate_jobs: Words
    attention_jobs: Words

    def __init__(self, *, dtype: torch.dtype, threads: int) -> None:
        self.threads = threads
        self._dtype, self._program = dtype, TeamProgram(threads=threads)
        kernels = row_kernels(dtype)
        assert kernels is not None
        self._kernels = kernels
        self._rooms: list[Tensor] = []  # the jobs hold addresses
        self._operands: dict[tuple[int, torch.dtype], Tensor] = {}  # by width
        self._row_words: list[int] = []  # where jobs count rows
        self._num_first = 0  # of them, those before the tail
        self._rotations: list[int] = []
        self._attentions: list[int] = []
        self._fresh: dict[tuple[int, int], Words] = {}

    def begin_tail(self) -> None:
        """The phases from here on have a number of rows of their own."""
        self._num_first = len(self._row_words)

    def close(self) -> int:
        """No more phases. Returns what to add to indices of jobs."""
        shift = self._program.close()
        rows = np.array(self._row_words) + shift
        self._first_rows, self._tail_rows = rows[: self._num_first], rows[self._num_first :]
        self.rotate_jobs = np.array(self._rotations, dtype=np.int64) + shift
        self.attention_jobs = np.array(self._attentions, dtype=np.int64) + shift
        self._fresh[0, 0] = self._program.words.copy()
        return shift

    def fresh(self, num_rows: int, num_tail_rows: int) -> Words:
        """The words as a run of so many rows must find them, for the caller to add what is the step's own."""
        words = self._fresh.get((num_rows, num_tail_rows))
        if words is None:
            words = self._fresh[0, 0].copy()
            words[self._first_rows], words[self._tail_rows] = num_rows, num_tail_rows
            self._fresh[num_rows, num_tail_rows] = words
        self._program.words[:] = words
        return self._program.words

    def run(self) -> None:
        """All phases, in order."""
        self._program.run()

    # ---------------------------------------------------------------------------------------- memory

    def room(self, width: int, dtype: torch.dtype | None = None) -> Tensor:
        """[MAX_ROWS, width] of the model's dtype, or another."""
        tensor = torch.zeros(MAX_ROWS, width, dtype=dtype or self._dtype)
        self._rooms.append(tensor)
        return tensor

    def operand(self, linear: Linear) -> Tensor:
        """Where a matrix finds its input: widened, or as it is for the quantiser."""
        matrix = linear.matrix
        return self._shared_room(matrix.k, self._dtype if isinstance(matrix, Int8Matrix) else torch.float32)

    def _shared_room(self, width: int, dtype: torch.dtype) -> Tensor:
        """One for all who are never in use at once."""
        if (width, dtype) not in self._operands:
            self._operands[width, dtype] = self.room(width, dtype)
        return self._operands[width, dtype]

    # ---------------------------------------------------------------------------------------- phases

    def norm(self, norm: RMSNorm, x: Tensor, delta: Tensor | None, total: Tensor, out: Tensor) -> int:
        """out = norm of x; with delta: of total = x + delta. Returns the index of the job."""
        job: dict[int, int] = {
            NormWord.X: x.data_ptr(),
            NormWord.OUT: out.data_ptr(),
            NormWord.WEIGHT: norm.weight.data_ptr(),
            NormWord.SIZE: norm.weight.shape[0],
            NormWord.EPS: float_bits(norm.eps),
            NormWord.COUNTER: 0,
            NormWord.DELTA: 0 if delta is None else delta.data_ptr(),
            NormWord.SUM: total.data_ptr(),
        }
        return self._add(self._kernel("rms_norm" if delta is None else "add_rms_norm", out), job, NormWord.ROWS)

    def multiply(self, linear: Linear, out: Tensor) -> None:
        """out = linear(its operand)."""
        matrix, x = linear.matrix, self.operand(linear)
        job = {GemmWord.LAYER: matrix.address, GemmWord.X: x.data_ptr(), GemmWord.OUT: out.data_ptr()}
        if isinstance(matrix, Int8Matrix):
            pairs, scale = self._shared_room(matrix.k, torch.int16), self._shared_room(1, torch.float32)
            quantise: dict[int, int] = {
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

    def rotate(
        self,
        qkv: Tensor,
        q: Tensor | None,
        kv: tuple[Tensor, Tensor],
        *,
        norm_weight: Tensor | None,
        eps: float,
        num_heads: int,
        first: int = 0,
    ) -> None:
        """Rotated queries to q, keys and values to the cache. first: the column of qkv where they begin."""
        num_kv_heads, head_dim = kv[0].shape[-2:]
        job: dict[int, int] = {
            RotateWord.QKV: qkv.data_ptr() + first * qkv.element_size(),
            RotateWord.QKV_STRIDE: qkv.shape[1],
            RotateWord.Q: 0 if q is None else q.data_ptr(),
            RotateWord.K: kv[0].data_ptr(),
            RotateWord.V: kv[1].data_ptr(),
            RotateWord.NORM_WEIGHT: 0 if norm_weight is None else norm_weight.data_ptr(),
            RotateWord.EPS: float_bits(eps),
            RotateWord.HEADS: num_heads,
            RotateWord.KV_HEADS: num_kv_heads,
            RotateWord.HEAD_DIM: head_dim,
            RotateWord.COUNTER: 0,
        }
        self._rotations.append(self._add(self._kernels.address("rotate_and_write"), job, RotateWord.ROWS))

    def attend(self, q: Tensor, kv: tuple[Tensor, Tensor], out: Tensor) -> int:
        """out = attention of the queries over the cache. Returns the index of the job."""
        words = [0] * len(Word)
        words[Word.Q], words[Word.Q_STRIDE] = q.data_ptr(), q.shape[1]
        words[Word.K], words[Word.V] = kv[0].data_ptr(), kv[1].data_ptr()
        words[Word.OUT] = out.data_ptr()
        kernel = attention_kernel(self._dtype, wide=out.dtype != self._dtype)
        self._attentions.append(self._program.add(kernel.address, words))
        return self._attentions[-1]

    def silu(self, layer: "DecoderLayer", gate_up: Tensor) -> None:
        """The operand of the layer's last matrix."""
        out = self.operand(layer.down)
        job: dict[int, int] = {
            SiluWord.X: gate_up.data_ptr(),
            SiluWord.OUT: out.data_ptr(),
            SiluWord.SIZE: layer.mlp_size,
            SiluWord.COUNTER: 0,
        }
        self._add(self._kernel("silu_mul", out), job, SiluWord.ROWS)

    def _kernel(self, name: str, out: Tensor) -> int:
        """The address of a row-wise kernel that writes to out."""
        return self._kernels.address(name if out.dtype == self._dtype else name + WIDE)

    def _add(self, kernel: int, job: Mapping[int, int], rows: int) -> int:
        """A phase whose job, given by its words, counts the rows in word `rows`."""
        words = [0] * (max(rows, *job) + 1)
        for word, value in job.items():
            words[word] = value
        at = self._program.add(kernel, words)
        self._row_words.append(at + rows)
        return at
