"""What a user writes becomes an EngineConfig: defaults, refusals by field, warnings, arithmetic."""

import importlib.util
import json
import logging
import os
import pickle
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from engine.config import draft_sampling
from engine.config.capacity import penalty_workspace_bytes
from engine.config.decoding import DFlashDecodingConfig
from engine.config.draft_lengths import resolve_choices, rows_of_largest_step
from engine.config.engine import EngineConfig
from engine.config.machine import Accelerator, Machine, probe_machine
from engine.config.resolve import resolve_engine_config
from engine.layers import cpu_jit

CPU = Machine(cores=6, memory_bytes=8 << 30, accelerator=None)
H200 = Machine(
    cores=16,
    memory_bytes=128 << 30,
    accelerator=Accelerator(name="H200", memory_bytes=139 << 30, compute_capability=(9, 0)),
)
B200 = Machine(
    cores=16,
    memory_bytes=128 << 30,
    accelerator=Accelerator(name="B200", memory_bytes=180 << 30, compute_capability=(10, 0)),
)
TARGET = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "eos_token_id": 2,
    "dtype": "bfloat16",
}
DRAFTER = {
    **TARGET,
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    "num_hidden_layers": 2,
    "num_target_layers": 4,
    "block_size": 16,
    "dflash_config": {"mask_token_id": 5, "target_layer_ids": [1, 2]},
}
NUM_PARAMETERS = 1000  # of each checkpoint


def write_checkpoint(directory: Path, config: dict[str, Any]) -> Path:
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    save_file({"w": np.zeros((10, NUM_PARAMETERS // 10), np.float32)}, directory / "model.safetensors")
    return directory


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "target", TARGET)


@pytest.fixture
def drafter(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "drafter", DRAFTER)


def spec(drafter: Path | None, **options: Any) -> DFlashDecodingConfig:
    return DFlashDecodingConfig(**{"max_draft_len": 7, "speculative_model": drafter, **options})


def resolve(target: Path, speculative_config: DFlashDecodingConfig | None = None, **options: Any) -> EngineConfig:
    options.setdefault("machine", CPU)
    return resolve_engine_config(model=str(target), speculative_config=speculative_config, **options)


def test_defaults_without_a_drafter(target: Path) -> None:
    config = resolve(target)
    assert (config.model_dir, config.drafter_dir, config.drafter) == (str(target), None, None)
    assert (config.dtype, config.device, config.num_threads, config.pipeline_depth) == ("bfloat16", "cpu", 6, 0)
    assert (config.max_model_len, config.max_num_seqs, config.block_size) == (512, 16, 16)
    assert (config.max_draft_len, config.draft_len_choices, config.draft_len_schedule) == (0, (0,), ())
    assert (config.gate_window, config.gate_threshold) == (0, 0.0)
    assert config.num_blocks == 16 * 512 // 16 + 1
    assert pickle.loads(pickle.dumps(config)) == config


def test_defaults_with_a_drafter(target: Path, drafter: Path) -> None:
    config = resolve(target, spec(drafter), tensor_parallel_size=2)
    assert config.drafter is not None
    assert (config.drafter.mask_token_id, config.drafter.target_layer_ids) == (5, (1, 2))
    assert config.draft_len_choices == (0, 1, 2, 3, 5, 7)
    assert config.draft_len_schedule == ((16, 7),)
    assert config.num_threads == 3
    assert config.hidden_state_gather == "fused"
    assert config.num_blocks == 16 * ((512 + 16) // 16) + 1
    assert config.drafter_load_format == "auto"


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


def test_a_cpu_s_config_is_resolved_without_torch(target: Path, drafter: Path, repo_root: Path) -> None:
    """The command and the replica resolve it too; torch takes them seconds and hundreds of megabytes."""
    script = (
        "import sys; from engine.config.decoding import DFlashDecodingConfig;"
        "from engine.config.resolve import resolve_engine_config;"
        f"spec = DFlashDecodingConfig(max_draft_len=3, speculative_model={str(drafter)!r});"
        f"config = resolve_engine_config(model={str(target)!r}, speculative_config=spec, dtype='bfloat16');"
        "assert config.drafter_weights == 'int8'; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], check=True, cwd=repo_root, env=os.environ | {"PYTHONPATH": "."})


def test_given_values_arrive(target: Path, drafter: Path) -> None:
    given = spec(
        drafter,
        max_draft_len=4,
        draft_len_schedule={2: 4, 8: 1},
        acceptance_rate_window_size=20,
        acceptance_rate_threshold=0.25,
        mask_token_id=9,
        target_layer_ids=[0, 3],
        load_format="safetensors",
    )
    config = resolve(
        target,
        given,
        dtype="float32",
        max_model_len=100,
        tensor_parallel_size=2,
        drafter_tensor_parallel=False,
        hidden_state_gather="taps",
        threads=5,
        max_num_seqs=3,
        max_num_batched_tokens=77,
        block_size=8,
        num_blocks=50,
        enable_prefix_caching=False,
        pipeline_depth=1,
        draft_len_choices=[0, 1, 4],
        load_format="safetensors",
        debug_checks=True,
    )
    assert config.drafter is not None
    assert (config.drafter.mask_token_id, config.drafter.target_layer_ids) == (9, (0, 3))
    assert (config.gate_window, config.gate_threshold) == (20, 0.25)
    assert config.draft_len_schedule == ((2, 4), (8, 1))
    assert config.draft_len_choices == (0, 1, 4)
    assert (config.dtype, config.max_model_len, config.num_threads, config.num_blocks) == ("float32", 100, 5, 50)
    assert (config.max_num_seqs, config.max_num_batched_tokens, config.block_size) == (3, 77, 8)
    assert (config.drafter_tensor_parallel, config.hidden_state_gather) == (False, "taps")
    assert (config.enable_prefix_caching, config.pipeline_depth, config.debug_checks) == (False, 1, True)
    assert (config.load_format, config.drafter_load_format) == ("safetensors", "safetensors")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "float16"}, "dtype: must be one of auto, float32, bfloat16, got 'float16'"),
        ({"device": "tpu"}, "device: must be one of cpu, cuda, simulated, got 'tpu'"),
        ({"device": "cuda"}, "device: 'cuda' needs an NVIDIA GPU and a CUDA build of torch, and none is visible"),
        ({"drafter_weights": "int4"}, "drafter_weights: must be one of auto, model, int8, got 'int4'"),
        ({"hidden_state_gather": "both"}, "hidden_state_gather: must be one of taps, fused, got 'both'"),
        ({"load_format": "pt"}, "load_format: must be one of auto, safetensors, dummy, got 'pt'"),
        ({"draft_sampling": "random"}, "draft_sampling: must be one of greedy, coupled, probabilistic, got 'random'"),
        (
            {"draft_sampling": "probabilistic"},
            "draft_sampling: 'probabilistic' needs speculative_config.use_rejection_sampling: true",
        ),
        ({"pipeline_depth": 2}, "pipeline_depth: must be 0 or 1, got 2"),
        ({"tensor_parallel_size": 0}, "tensor_parallel_size: must be at least 1, got 0"),
        ({"threads": 0}, "threads: must be at least 1, got 0"),
        ({"max_num_seqs": 0}, "max_num_seqs: must be at least 1, got 0"),
        ({"block_size": 0}, "block_size: must be at least 1, got 0"),
        ({"num_blocks": 0}, "num_blocks: must be at least 1, got 0"),
        ({"kv_cache_memory_bytes": 0}, "kv_cache_memory_bytes: must be at least 1, got 0"),
        ({"max_model_len": 1}, "max_model_len: must be at least 2"),
        ({"max_model_len": 513}, "max_model_len: 513 is above the target's max_position_embeddings=512"),
        ({"max_num_batched_tokens": 15}, "max_num_batched_tokens: 15 is too small"),
        (
            {"max_num_batched_tokens": 7, "max_num_seqs": 1},
            "max_draft_len + 1 = 8 tokens of one; raise it to at least 8",
        ),
        ({"num_blocks": 60, "kv_cache_memory_bytes": 1 << 20}, "num_blocks and kv_cache_memory_bytes: give one"),
        ({"draft_len_choices": [1, 7]}, "draft_len_choices: must ascend strictly and start with 0, got [1, 7]"),
        ({"draft_len_choices": [0, 3, 3, 7]}, "draft_len_choices: must ascend strictly"),
        ({"draft_len_choices": []}, "draft_len_choices: must ascend strictly"),
        ({"draft_len_choices": [0, 3]}, "draft_len_choices: the largest must be max_draft_len=7, got [0, 3]"),
        ({"revision": "main"}, "revision applies to Hugging Face ids only"),
    ],
)
def test_bad_options(target: Path, drafter: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        resolve(target, spec(drafter), **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"speculative_model": None}, "speculative_config.speculative_model: must be specified for DFlash"),
        (
            {"max_draft_len": None},
            "speculative_config.max_draft_len: must be set, to at most the drafter's block_size - 1",
        ),
        ({"max_draft_len": 0}, "speculative_config.max_draft_len: DFlash max_draft_len must be > 0"),
        (
            {"max_draft_len": 20},
            "speculative_config.max_draft_len: DFlash checkpoint was trained with block_size=16. Lower max_draft_len "
            "to at most 15. Current max_draft_len=20.",
        ),
        (
            {"load_format": "npcache"},
            "speculative_config.load_format: must be one of auto, safetensors, dummy, got 'npcache'",
        ),
        (
            {"attention_backend": "TRTLLM"},
            "speculative_config.attention_backend: DFlash TRTLLM attention backend is unavailable: requires SM100 or "
            "SM103, got device 'cpu'",
        ),
        (
            {"speculative_model": "/no/such"},
            "speculative_config.speculative_model: model source '/no/such': no such file",
        ),
        ({"mask_token_id": 64}, "mask_token_id=64 is outside the target's embedding (0..63)"),
        ({"target_layer_ids": [1, 4]}, "4 is out of range; the target has layers 0..3"),
    ],
)
def test_refused_speculative_configs(target: Path, drafter: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        resolve(target, spec(drafter, **options))


@pytest.mark.parametrize(
    ("machine", "message"),
    [
        (H200, "DFlash TRTLLM attention backend is unavailable: requires SM100 or SM103, got SM90."),
        (B200, "speculative_config.attention_backend: TRTLLM needs the package flashinfer-python; install it"),
    ],
)
def test_trtllm_backend_on_gpus(target: Path, drafter: Path, machine: Machine, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        resolve(target, spec(drafter, attention_backend="TRTLLM"), device="cuda", machine=machine)


def test_trtllm_backend_where_it_runs(target: Path, drafter: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name == "flashinfer" or found(name))
    options = {"device": "cuda", "machine": B200}
    config = resolve(target, spec(drafter, attention_backend="TRTLLM"), dtype="bfloat16", **options)
    assert config.drafter_attention == "TRTLLM"
    assert resolve(target, spec(drafter), **options).drafter_attention == "VANILLA"
    with pytest.raises(
        ValueError, match=r"speculative_config\.attention_backend: TRTLLM needs dtype bfloat16, got float32"
    ):
        resolve(target, spec(drafter, attention_backend="TRTLLM"), dtype="float32", **options)


@pytest.mark.parametrize(
    "options",
    [
        {"draft_len_choices": [0, 3]},
        {"draft_sampling": "greedy"},
        {"synthetic_acceptance_length": 1.0},
        {"shadow_time_share": 0.01},
    ],
    ids=str,
)
def test_drafting_options_without_a_drafter(target: Path, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(options))}: has no effect without speculative_config"):
        resolve(target, **options)


NO_FLASHINFER = (
    "speculative_config.use_rejection_sampling: use_rejection_sampling=True requires FlashInfer, which is not "
    "available in this environment. Install flashinfer-python or set use_rejection_sampling=False."
)
OLD_FLASHINFER = "Rejection sampling for one-model speculative decoding requires flashinfer>=0.6.4, found 0.6.3"


class InheritsRejection(DFlashDecodingConfig):
    """A user's own default: not the same as a value that was asked for."""

    use_rejection_sampling: bool = True


@pytest.mark.parametrize(
    ("rejection", "sampling", "device", "flashinfer", "expected"),
    [
        (False, None, "cpu", None, ("coupled", False)),
        (False, "greedy", "cpu", None, ("greedy", False)),
        (True, None, "cpu", None, ("greedy", True)),
        (True, None, "cuda", None, ("greedy", True)),
        (True, "probabilistic", "cpu", None, ("probabilistic", True)),
        (True, "probabilistic", "cuda", (0, 6, 4), ("probabilistic", True)),
        (True, "probabilistic", "cuda", None, NO_FLASHINFER),
        (True, "probabilistic", "cuda", (0, 6, 3), OLD_FLASHINFER),
        (True, "coupled", "cpu", None, "use_rejection_sampling=True is not supported for this configuration: draft_"),
        (InheritsRejection, "coupled", "cpu", None, ("coupled", False)),
        (InheritsRejection, None, "cpu", None, ("greedy", True)),
        (InheritsRejection, "probabilistic", "cuda", None, "'probabilistic' needs speculative_config.use_rejection"),
    ],
)
def test_rejection_sampling_is_kept_refused_or_dropped(
    target: Path,
    drafter: Path,
    monkeypatch: pytest.MonkeyPatch,
    rejection: bool | type,
    sampling: str | None,
    device: str,
    flashinfer: tuple[int, ...] | None,
    expected: tuple[str, bool] | str,
) -> None:
    """A value that the config itself gives is kept or refused; one that a default brought in is dropped."""
    monkeypatch.setattr(draft_sampling, "_flashinfer_version", lambda: flashinfer)
    if isinstance(rejection, bool):
        given = spec(drafter, use_rejection_sampling=rejection)
    else:
        given = rejection(max_draft_len=7, speculative_model=drafter)
    options: dict[str, Any] = {"draft_sampling": sampling, "device": device, "machine": H200}
    if isinstance(expected, str):
        with pytest.raises(ValueError, match=re.escape(expected)):
            resolve(target, given, **options)
    else:
        config = resolve(target, given, **options)
        assert (config.draft_sampling, config.use_rejection_sampling) == expected


def test_draft_probabilities_are_part_of_the_memory(target: Path, drafter: Path) -> None:
    given = spec(drafter, use_rejection_sampling=True)
    config = resolve(target, given, draft_sampling="probabilistic", tensor_parallel_size=3)
    assert config.padded_vocab_size == 66
    assert config.draft_logits_bytes == 4 * 17 * 7 * 66
    small = Machine(cores=2, memory_bytes=config.draft_logits_bytes, accelerator=None)
    with pytest.raises(ValueError, match=r"\+ draft probabilities 0\.03 MiB per rank \+"):
        resolve(target, given, draft_sampling="probabilistic", num_blocks=34, machine=small)


@pytest.mark.parametrize("of_target", [True, False])
def test_dummy_weights_need_no_checkpoint(tmp_path: Path, target: Path, drafter: Path, of_target: bool) -> None:
    """Either model can be random while the other is read."""
    bare = write_checkpoint(tmp_path / "bare", TARGET if of_target else DRAFTER)
    (bare / "model.safetensors").unlink()
    if of_target:
        config = resolve(bare, spec(drafter), load_format="dummy")
        assert (config.load_format, config.drafter_load_format) == ("dummy", "auto")
        with pytest.raises(ValueError, match=r"has no \.safetensors files"):
            resolve(bare, spec(drafter))
    else:
        config = resolve(target, spec(bare, load_format="dummy"))
        assert (config.load_format, config.drafter_load_format) == ("auto", "dummy")
        with pytest.raises(ValueError, match=r"speculative_config\.speculative_model: .* has no \.safetensors files"):
            resolve(target, spec(bare))
    # Matrices of 4 layers with 6 + 3 + 3 + 6 heads of 8, and the tied embedding; 2 layers and fc of 2 taps.
    elements = 4 * (18 * 8 * 32 + 3 * 32 * 48) + 64 * 32 if of_target else 2 * (18 * 8 * 32 + 3 * 32 * 48) + 2 * 32 * 32
    tight = Machine(cores=2, memory_bytes=2 * elements, accelerator=None)
    given = {"load_format": "dummy"} if of_target else {"speculative_config": spec(bare, load_format="dummy")}
    with pytest.raises(ValueError, match="num_blocks: weights"):
        resolve(bare if of_target else target, num_blocks=34, machine=tight, **given)


@pytest.mark.parametrize(
    ("options", "spec_options", "message"),
    [
        ({}, {"acceptance_rate_window_size": 10}, "acceptance_rate_window_size=10 and acceptance_rate_threshold=None"),
        ({}, {"acceptance_rate_threshold": 0.3}, "the acceptance gate needs both"),
        ({}, {"acceptance_rate_window_size": 0, "acceptance_rate_threshold": 0.3}, "so it is off"),
        ({}, {"draft_len_schedule": {4: 7, 8: 6}}, "draft_len_schedule[8]: 6 is not one of draft_len_choices"),
        ({"max_num_batched_tokens": 64}, {}, "64 is less than the 128 tokens that the schedule's largest decode batch"),
    ],
)
def test_warnings(
    target: Path,
    drafter: Path,
    caplog: pytest.LogCaptureFixture,
    options: dict[str, Any],
    spec_options: dict[str, Any],
    message: str,
) -> None:
    with caplog.at_level(logging.WARNING):
        config = resolve(target, spec(drafter, **spec_options), **options)
    assert message in caplog.text
    assert config.gate_window == 0
    if "draft_len_schedule" in spec_options:
        assert config.draft_len_schedule == ((4, 7), (8, 5))


def test_no_warning_where_all_is_well(target: Path, drafter: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        resolve(target, spec(drafter, acceptance_rate_window_size=5, acceptance_rate_threshold=0.0))
    assert not caplog.records


def test_drafter_with_fewer_positions_warns(target: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    short = write_checkpoint(tmp_path / "short", {**DRAFTER, "max_position_embeddings": 128})
    resolve(target, spec(short))
    assert "the drafter has 128 positions but max_model_len is 512" in caplog.text


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
