"""Which weights a drafter gets by its config and the machine, and what room those of 8 bits take."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine.config.capacity import int8_copies_bytes, weight_bytes
from engine.kernels import available
from engine.kv_cache.block_bytes import bytes_per_block
from engine.layers import cpu_jit
from tests.engine.resolving import DRAFTER, H200, NUM_PARAMETERS, TARGET, resolve, spec, write_checkpoint


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "target", TARGET)


@pytest.fixture
def drafter(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "drafter", DRAFTER)


def test_drafter_weights_are_rounded_where_the_kernel_may_run(target: Path, drafter: Path) -> None:
    assert resolve(target, spec(drafter)).drafter_weights == "int8"
    assert resolve(target, spec(drafter), drafter_weights="model").drafter_weights == "model"
    assert resolve(target, spec(drafter), dtype="float32").drafter_weights == "model"
    assert resolve(target).drafter_weights == "model"
    with pytest.raises(ValueError, match="drafter_weights: 'int8' cannot be had: 8-bit weights need dtype 'bfloat16'"):
        resolve(target, spec(drafter), dtype="float32", drafter_weights="int8")
    with pytest.raises(ValueError, match="drafter_weights: 'int8' cannot be had: there is no drafter"):
        resolve(target, drafter_weights="int8")


def test_int8_that_cannot_run_is_refused_if_it_was_asked_for(
    target: Path, drafter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_jit, "unavailable_reason", lambda: "the processor is too old")
    with pytest.raises(ValueError, match="drafter_weights: 'int8' cannot be had: the processor is too old; use"):
        resolve(target, spec(drafter), drafter_weights="int8")


def test_a_gpu_s_drafter_is_rounded_if_it_was_asked_for(
    target: Path, drafter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"device": "cuda", "machine": H200}
    assert resolve(target, spec(drafter), **options).drafter_weights == "model"
    monkeypatch.setattr(available, "unavailable_reason", lambda: None)
    assert resolve(target, spec(drafter), **options).drafter_weights == "model"
    assert resolve(target, spec(drafter), drafter_weights="int8", **options).drafter_weights == "int8"
    with pytest.raises(ValueError, match="drafter_weights: 'int8' cannot be had: 8-bit weights need dtype 'bfloat16'"):
        resolve(target, spec(drafter), dtype="float32", drafter_weights="int8", **options)
    with pytest.raises(ValueError, match="drafter_weights: 'int8' cannot be had: there is no drafter"):
        resolve(target, drafter_weights="int8", **options)
    reason = "needs compute capability 8.0, the GPU has 7.5"
    monkeypatch.setattr(available, "unavailable_reason", lambda: reason)
    wanted = re.escape(f"8-bit weights need the Triton kernels, which cannot run ({reason}); use 'auto' or 'model'")
    with pytest.raises(ValueError, match=f"drafter_weights: 'int8' cannot be had: {wanted}"):
        resolve(target, spec(drafter), drafter_weights="int8", **options)


def test_a_gpu_holds_the_drafter_s_matrices_and_the_head_in_8_bits_as_well(
    target: Path, drafter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(available, "unavailable_reason", lambda: None)
    options: dict[str, Any] = {"device": "cuda", "machine": H200, "drafter_weights": "int8"}
    config = resolve(target, spec(drafter), **options)
    assert config.drafter is not None
    H, D, g, L = (getattr(config.drafter, n) for n in ("hidden_size", "head_dim", "num_kv_heads", "num_layers"))
    h, mlp, taps = config.drafter.num_heads, config.drafter.intermediate_size, len(config.drafter.target_layer_ids)
    layer = (h + 2 * g) * D * H + H * h * D + 3 * H * mlp
    layers, fc, head = L * layer + L * 2 * g * D * H, taps * H * H, config.target.vocab_size * H
    assert int8_copies_bytes(config) == layers + fc + head
    assert int8_copies_bytes(resolve(target, spec(drafter))) == 0
    two = replace(config, tensor_parallel_size=2)
    assert int8_copies_bytes(two) == layers + fc + head
    assert int8_copies_bytes(replace(two, drafter_tensor_parallel=False)) == 2 * layers + fc + head
    assert int8_copies_bytes(replace(two, hidden_state_gather="taps")) == layers + 2 * fc + head
    # A GPU that just holds both models and one request, but not the copies.
    weights = weight_bytes(config, 2 * NUM_PARAMETERS)
    cache = (config.max_blocks_per_seq + 1) * bytes_per_block(config)
    assert H200.accelerator is not None
    small = replace(H200.accelerator, memory_bytes=weights + cache)
    options["machine"] = replace(H200, accelerator=small)
    with pytest.raises(ValueError, match=r"weights \d+\.\d\d MiB \+ 8-bit copies for drafts \d+\.\d\d MiB \+ KV cache"):
        resolve(target, spec(drafter), **options)
    with pytest.raises(ValueError, match=r"max_num_seqs, or set drafter_weights to 'model'$"):
        resolve(target, spec(drafter), **options)
    options["drafter_weights"] = "model"
    resolve(target, spec(drafter), **options)
