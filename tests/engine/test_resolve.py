"""What a user writes becomes an EngineConfig: defaults, refusals by field, warnings."""

import importlib.util
import logging
import os
import pickle
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from engine.config import draft_sampling
from engine.config.decoding import DFlashDecodingConfig
from engine.config.machine import Machine
from tests.engine.resolving import B200, DRAFTER, H200, TARGET, resolve, spec, write_checkpoint


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "target", TARGET)


@pytest.fixture
def drafter(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "drafter", DRAFTER)


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
        {"draft_block_width": 4},
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
