"""What a CPU holds of the weights is what its memory check counts, by processor and type, seen on loaded models."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.config import machine as machine_module
from engine.config.capacity import num_matrix_elements, packed_copies_bytes, weight_bytes
from engine.config.machine import Machine, cpu_flags, has_bfloat16_instructions, probe_machine
from engine.layers import cpu_jit
from engine.layers.cpu_jit import obstacle
from engine.layers.linear import Linear
from engine.models.dflash import DFlashDrafter
from engine.models.target import TargetModel
from engine.parallel.tp_group import TpGroup
from tests.reference.paged import PagedModels, engine_config
from tests.reference.toy import make_drafter, make_target


def held_bytes(*models: TargetModel | DFlashDrafter) -> int:
    """Of all matrices in every order, a tensor that several share once."""
    found: dict[int, torch.Tensor] = {}
    for model in models:
        tensors = [p for name, p in model.named_parameters() if p.dim() == 2 and "norm" not in name]
        tensors += [m.matrix.packed for m in model.modules() if isinstance(m, Linear) and m.is_prepared]
        found |= {tensor.data_ptr(): tensor for tensor in tensors if tensor.numel()}
    return sum(tensor.numel() * tensor.element_size() for tensor in found.values())


@pytest.mark.skipif(obstacle() is not None, reason=f"kernel: {obstacle()}")
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("has_instructions", [False, True])
@pytest.mark.parametrize(("dtype", "weights"), [("bfloat16", "model"), ("bfloat16", "int8"), ("float32", "model")])
def test_counted_bytes_are_held(
    tmp_path: Path, tied: bool, has_instructions: bool, dtype: str, weights: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No matrix of these models is padded."""
    monkeypatch.setenv("DFLASH_CPU_KERNELS", "auto")
    monkeypatch.setattr(cpu_jit, "has_bfloat16_instructions", lambda: has_instructions)
    target = make_target(tmp_path / "target", "llama", vocab_size=128, tie_word_embeddings=tied)
    make_drafter(tmp_path / "drafter", target)
    config = engine_config(tmp_path / "target", tmp_path / "drafter", dtype=dtype, drafter_weights=weights)
    models = PagedModels.load(config, num_seqs=1)
    drafter = config.drafter
    assert drafter is not None and models.drafter is not None
    machine = Machine(
        cores=2, memory_bytes=1 << 40, accelerator=None, packs_weights=True, keeps_both_orders=has_instructions
    )
    is_twice, size = has_instructions and dtype == "bfloat16", 4 if dtype == "float32" else 2
    in_order = 1 if weights == "int8" else size
    # Left out of the check: the copies of K's and V's rows that make the context, and what 8 bits alone save.
    rows = 2 * drafter.num_layers * drafter.num_kv_heads * drafter.head_dim * drafter.hidden_size
    left_out = rows * (in_order + size * is_twice)
    saved = 0 if is_twice else num_matrix_elements(drafter) * (size - in_order)
    counted = weight_bytes(config, num_matrix_elements(config.target) + num_matrix_elements(drafter))
    assert packed_copies_bytes(config, machine) > 0 or not (tied or is_twice or weights == "int8")
    assert (
        counted + packed_copies_bytes(config, machine) == held_bytes(models.target, models.drafter) - left_out + saved
    )
    assert packed_copies_bytes(config, Machine(cores=2, memory_bytes=1 << 40, accelerator=None)) == 0


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("gather", ["taps", "fused"])
@pytest.mark.parametrize("sharded", [False, True])
def test_ranks_hold_what_is_counted(tmp_path: Path, tied: bool, ranks: int, gather: Any, sharded: bool) -> None:
    """No matrix of these models is padded."""
    target = make_target(tmp_path / "target", "llama", vocab_size=128, tie_word_embeddings=tied)
    make_drafter(tmp_path / "drafter", target)
    config = replace(
        engine_config(tmp_path / "target", tmp_path / "drafter", dtype="bfloat16"),
        tensor_parallel_size=ranks,
        hidden_state_gather=gather,
        drafter_tensor_parallel=sharded,
    )
    drafter = config.drafter
    assert drafter is not None
    held = 0
    for rank in range(ranks):
        tp = TpGroup(rank=rank, size=ranks, backend=None if ranks == 1 else "gloo")
        layer_tp = tp if sharded else TpGroup.solo()
        common: Any = dict(tp=tp, dtype=torch.bfloat16, num_positions=64)
        models = (
            TargetModel(config.target, **common),
            DFlashDrafter(drafter, layer_tp=layer_tp, hidden_state_gather=gather, **common),
        )
        held += held_bytes(*models) - 2 * models[1].context_kv.weight.numel()  # copies, which the check leaves out
    counted = weight_bytes(config, num_matrix_elements(config.target) + num_matrix_elements(drafter))
    assert counted == held


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("processor\t: 0\nflags\t\t: fpu avx2 fma avx512_bf16 amx_tile\n\nprocessor\t: 1\nflags\t\t: fpu\n", True),
        ("processor\t: 0\nmodel name\t: flags: avx512_bf16\nflags\t\t: fpu avx2 fma avx512f\n", False),
    ],
)
def test_instructions_are_read_from_cpuinfo(
    tmp_path: Path, text: str, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "cpuinfo"
    file.write_text(text)
    monkeypatch.setattr(machine_module, "_CPUINFO", file)
    monkeypatch.setattr(machine_module, "cpu_flags", cpu_flags.__wrapped__)
    assert has_bfloat16_instructions() == expected
    for choice, packs, both in (("auto", True, expected), ("llvm", True, False), ("torch", False, False)):
        monkeypatch.setenv("DFLASH_CPU_KERNELS", choice)
        machine = probe_machine(with_accelerator=False)
        assert (machine.packs_weights, machine.keeps_both_orders) == (packs, both), choice
    monkeypatch.setattr(machine_module, "_CPUINFO", tmp_path / "none")
    llvm = pytest.importorskip("llvmlite.binding")
    monkeypatch.setattr(llvm, "get_host_cpu_features", lambda: {"avx512bf16": expected})
    assert has_bfloat16_instructions() == expected


def test_the_check_says_what_the_copies_take(tmp_path: Path) -> None:
    """The same cache fits a machine whose processor keeps the weights once."""
    from engine.config.resolve import resolve_engine_config

    make_target(tmp_path, "llama", vocab_size=128, hidden_size=256, intermediate_size=512)
    options = {"model": str(tmp_path), "dtype": "bfloat16", "num_blocks": 20}
    once = Machine(cores=2, memory_bytes=9 << 20, accelerator=None, packs_weights=True)
    resolve_engine_config(**options, machine=once)
    twice = Machine(cores=2, memory_bytes=9 << 20, accelerator=None, packs_weights=True, keeps_both_orders=True)
    with pytest.raises(
        ValueError, match=r"num_blocks: weights \d\.\d\d MiB \+ copies for the CPU kernels \d\.\d\d MiB \+"
    ):
        resolve_engine_config(**options, machine=twice)
