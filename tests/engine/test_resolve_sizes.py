"""What a configuration leaves to the machine: types, memory, sizes, lengths, identity."""

import os
import re
from pathlib import Path

import pytest

from engine.config.capacity import penalty_workspace_bytes
from engine.config.draft_lengths import resolve_choices, rows_of_largest_step
from engine.config.machine import Machine, probe_machine
from tests.engine.resolving import DRAFTER, H200, TARGET, resolve, spec, write_checkpoint


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "target", TARGET)


@pytest.fixture
def drafter(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "drafter", DRAFTER)


@pytest.mark.parametrize(
    ("stored", "expected"),
    [("float32", "float32"), ("bfloat16", "bfloat16"), ("float16", "bfloat16"), (None, "bfloat16")],
)
def test_auto_dtype(tmp_path: Path, caplog: pytest.LogCaptureFixture, stored: str | None, expected: str) -> None:
    directory = write_checkpoint(tmp_path / "t", {**TARGET, "dtype": stored})
    assert resolve(directory).dtype == expected
    assert ("float16; auto takes bfloat16" in caplog.text) == (stored == "float16")


def test_auto_dtype_refuses_others_and_reads_the_older_key(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path / "t", {**TARGET, "dtype": "float64"})
    with pytest.raises(ValueError, match="dtype: the checkpoint's 'float64' is not supported"):
        resolve(directory)
    older = {key: value for key, value in TARGET.items() if key != "dtype"} | {"torch_dtype": "float32"}
    assert resolve(write_checkpoint(tmp_path / "t", older)).dtype == "float32"


def test_cache_size_by_memory_and_its_arithmetic(target: Path, drafter: Path) -> None:
    # K and V, 4 + 2 layers of 3 heads of 8 numbers of 2 bytes, 16 tokens.
    block_bytes = 2 * (4 + 2) * 3 * 8 * 2 * 16
    config = resolve(target, spec(drafter), kv_cache_memory_bytes=100 * block_bytes + 1)
    assert config.num_blocks == 100
    # Two ranks: 3 KV heads become 4 by padding, 2 per rank.
    half = resolve(target, spec(drafter), kv_cache_memory_bytes=100 * block_bytes, tensor_parallel_size=2)
    assert half.num_blocks == 150
    message = (
        "num_blocks: 33 blocks are fewer than one request can need: (512 tokens of max_model_len + 16 drafting slots) "
        f"/ 16 tokens per block + 1 unused block = 34 blocks = 34 x {block_bytes} bytes = 0.30 MiB"
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        resolve(target, spec(drafter), num_blocks=33)
    assert resolve(target, spec(drafter), num_blocks=34).num_blocks == 34


def test_overcommitted_memory_is_refused_with_the_arithmetic(target: Path) -> None:
    block_bytes = 2 * 4 * 3 * 8 * 2 * 16
    small = Machine(cores=2, memory_bytes=1 << 20, accelerator=None)
    expected = (
        f"num_blocks: weights 0.00 MiB + penalty counts 0.04 MiB + KV cache 1.17 MiB (200 blocks x {block_bytes} "
        "bytes) = 1.21 MiB, but this machine has 1.00 MiB. Lower num_blocks, max_model_len or max_num_seqs"
    )
    with pytest.raises(ValueError, match=re.escape(expected)):
        resolve(target, num_blocks=200, machine=small)
    with pytest.raises(ValueError, match=r"KV cache 0\.78 MiB x 2 ranks"):
        resolve(target, num_blocks=200, machine=small, tensor_parallel_size=2)


def test_penalties_are_part_of_the_budget_where_they_exist(target: Path, drafter: Path) -> None:
    """Always without speculation; with it, where enable_penalty says so."""
    config = resolve(target, max_num_seqs=3)
    assert config.enable_penalty
    assert penalty_workspace_bytes(config) == 4 * (TARGET["vocab_size"] * 5 + 513 * 4)
    assert penalty_workspace_bytes(resolve(target, max_num_seqs=3, tensor_parallel_size=3)) == 4 * (
        66 * 5 + 3 * 513 * 4
    )
    assert penalty_workspace_bytes(resolve(target, spec(drafter))) == 0
    asked = resolve(target, spec(drafter, enable_penalty=True), max_num_seqs=3)
    assert penalty_workspace_bytes(asked) == penalty_workspace_bytes(config)
    crowded = {"device": "cuda", "machine": H200, "max_num_seqs": 1_000_000_000, "max_num_batched_tokens": 1 << 30}
    resolve(target, spec(drafter), **crowded)
    with pytest.raises(ValueError, match=r"weights .* \+ penalty counts \d+\.\d\d GiB \+ KV cache .* but H200 has"):
        resolve(target, spec(drafter, enable_penalty=True), **crowded)


@pytest.mark.parametrize(
    ("mode", "filters"),
    [
        ("full", (True, True)),
        ("no_topk", (False, True)),
        ("no_topp", (True, False)),
        ("no_topk_no_topp", (False, False)),
    ],
)
def test_advanced_sampling_mode_names_the_filters(
    target: Path, drafter: Path, mode: str, filters: tuple[bool, bool]
) -> None:
    config = resolve(target, spec(drafter, advanced_sampling_mode=mode))
    assert (config.enable_top_k, config.enable_top_p) == filters


def test_default_cache_size_is_bounded_but_holds_one_request(tmp_path: Path) -> None:
    wide = {**TARGET, "head_dim": 256, "num_attention_heads": 24, "num_key_value_heads": 24, "num_hidden_layers": 40}
    long = write_checkpoint(tmp_path / "long", {**wide, "max_position_embeddings": 1 << 20})
    machine = Machine(cores=2, memory_bytes=1 << 50, accelerator=None)
    block_bytes = 2 * 40 * 24 * 256 * 2 * 16
    assert resolve(long, machine=machine).num_blocks == (1 << 20) // 16 + 1
    assert resolve(long, machine=machine, max_model_len=256).num_blocks == min(16 * 16 + 1, (1 << 30) // block_bytes)


def test_gpu_defaults(target: Path, drafter: Path) -> None:
    config = resolve(target, spec(drafter), device="cuda", machine=H200)
    assert (config.device, config.pipeline_depth) == ("cuda", 1)
    assert config.num_blocks == 0, "measured when the engine starts"
    assert config.decode_programs == "graphs"
    assert resolve(target, device="cuda", machine=H200, num_blocks=70).num_blocks == 70


def test_decode_programs_follow_the_device(target: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert resolve(target).decode_programs == "eager"
    assert resolve(target, decode_programs="repeated").decode_programs == "repeated"
    assert not caplog.records
    assert resolve(target, device="cuda", machine=H200, debug_checks=True).decode_programs == "repeated"
    assert resolve(target, device="cuda", machine=H200, decode_programs="eager").decode_programs == "eager"
    assert [r.getMessage().split(":")[0] for r in caplog.records] == ["decode_programs"] * 2
    with pytest.raises(ValueError, match=r"decode_programs: 'graphs' needs device 'cuda'; use 'eager' or 'repeated'"):
        resolve(target, decode_programs="graphs")
    with pytest.raises(ValueError, match=r"decode_programs: must be one of graphs, repeated, eager, got 'fast'"):
        resolve(target, decode_programs="fast")


def test_identity_follows_the_checkpoints(target: Path, drafter: Path) -> None:
    plain = resolve(target).identity
    assert plain == resolve(target, max_num_seqs=3).identity
    assert plain != resolve(target, dtype="float32").identity
    with_drafter = resolve(target, spec(drafter)).identity
    assert len({plain, with_drafter, resolve(target, spec(drafter, target_layer_ids=[0, 1])).identity}) == 3
    status = (target / "model.safetensors").stat()
    os.utime(target / "model.safetensors", ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    assert resolve(target).identity != plain


def test_cut_weights_are_noticed(target: Path) -> None:
    file = target / "model.safetensors"
    whole = file.read_bytes()
    for content in (b"\x10\0\0\0\0\0\0\0{", whole[:-1], whole[: len(whole) // 2], whole + b"\0", b""):
        file.write_bytes(content)
        with pytest.raises(ValueError, match=r"model\.safetensors is not a safetensors file, or it is cut short"):
            resolve(target)
    file.unlink()
    file.mkdir()
    with pytest.raises(ValueError, match=r"model\.safetensors is not a file"):
        resolve(target)


@pytest.mark.parametrize(
    ("max_draft_len", "expected"),
    [(1, (0, 1)), (4, (0, 1, 2, 3, 4)), (15, (0, 1, 2, 3, 5, 7, 11, 15)), (20, (0, 1, 2, 3, 5, 7, 11, 15, 20))],
)
def test_default_choices_end_with_max_draft_len(max_draft_len: int, expected: tuple[int, ...]) -> None:
    assert resolve_choices(max_draft_len, None) == expected


@pytest.mark.parametrize("schedule", [(), ((4, 15),), ((4, 7), (8, 3), (32, 1)), ((2, 3), (4, 0)), ((64, 5),)])
@pytest.mark.parametrize("max_num_seqs", [1, 3, 4, 9, 40])
def test_largest_step_equals_brute_force(schedule: tuple[tuple[int, int], ...], max_num_seqs: int) -> None:
    def draft_len(batch: int) -> int:
        return next((k for upper, k in schedule if batch <= upper), 0)

    expected = max(batch * (1 + draft_len(batch)) for batch in range(1, max_num_seqs + 1))
    assert rows_of_largest_step(schedule, max_num_seqs) == expected


def test_probe_of_this_machine() -> None:
    machine = probe_machine()
    assert 1 <= machine.cores <= (os.cpu_count() or 1)
    assert machine.memory_bytes > 1 << 28
