"""The drafter's context of few rows as one call on the CPU: taps -> fc -> norm -> K and V of every layer -> cache.

The kernels are those of `DFlashDrafter.context_features` and `write_context`, and so are the results, bit for bit.
"""

from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from engine.attention.kv_cache_tensors import KvCache
from engine.layers.cpu_rows_job import RotateWord
from engine.models.cpu_phases import MAX_ROWS, CpuPhases
from engine.models.cpu_stack import CpuStack

if TYPE_CHECKING:
    from engine.models.dflash import DFlashDrafter

_ANGLE_WORDS = (RotateWord.COS, RotateWord.SIN, RotateWord.ANGLE_STRIDE, RotateWord.SLOTS)


class CpuContext:
    """For one drafter and one KV cache."""

    def __init__(self, drafter: "DFlashDrafter", kv: KvCache) -> None:
        self.kv = kv
        self._phases = phases = CpuPhases(dtype=drafter.hidden_norm.weight.dtype, threads=drafter.fc.matrix.threads)
        self._taps = phases.operand(drafter.fc)
        features, kv_rows = phases.room(drafter.fc.matrix.o), phases.room(drafter.context_kv.matrix.o)
        phases.multiply(drafter.fc, features)
        phases.norm(drafter.hidden_norm, features, None, features, phases.operand(drafter.context_kv))
        phases.multiply(drafter.context_kv, kv_rows)
        num_columns = kv_rows.shape[1] // len(kv.drafter_kv)
        for index, layer_kv in enumerate(kv.drafter_kv):
            phases.rotate(
                kv_rows,
                None,
                layer_kv,
                norm_weight=drafter.context_k_norm[index],
                eps=drafter.config.rms_norm_eps,
                num_heads=0,
                first=index * num_columns,
            )
        phases.close()
        self._angle_index = np.array([phases.rotate_jobs + word for word in _ANGLE_WORDS])

    @staticmethod
    def suits(drafter: "DFlashDrafter") -> bool:
        """Whether one can be made: of an unsharded drafter whose matrices are prepared."""
        return drafter.tp.size == 1 and drafter.fc.is_prepared and CpuStack.suits(drafter.stacked_layers)

    @staticmethod
    def takes(drafter: "DFlashDrafter", num_rows: int) -> bool:
        """Whether `write` is to be called with so many rows: few, and the kernels multiply both matrices."""
        matrices = (drafter.fc, drafter.context_kv)
        return num_rows <= MAX_ROWS and all(matrix.kernel_takes(num_rows) for matrix in matrices)

    def write(self, taps_NTH: Tensor, angles: tuple[Tensor, Tensor], slot_mapping_N: Tensor) -> None:
        """K and V of every layer at the rows' cache slots."""
        N, (cos, sin) = taps_NTH.shape[0], angles
        assert cos.stride() == sin.stride()
        slots_N = slot_mapping_N.contiguous()
        words = self._phases.fresh(N, N)
        words[self._angle_index] = [[cos.data_ptr()], [sin.data_ptr()], [cos.stride(0)], [slots_N.data_ptr()]]
        self._taps[:N].copy_(taps_NTH.reshape(N, -1))
        self._phases.run()
