"""Every key of the config file: what it refuses and says."""

from pathlib import Path
from typing import Any

import pytest

from cluster.config import ConfigError, parse_config
from cluster.config_reference import keys
from tests.conftest import REPO_ROOT

SIM_DIR = REPO_ROOT / "configs" / "sim"


def problems(data: object) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        parse_config(data, base_dir=Path("/"))
    return caught.value.problems


def with_key(path: str, value: Any) -> dict[str, Any]:
    """A valid config in which one key has `value`, and what that key needs beside it."""
    config: dict[str, Any] = {"model": {"source": "owner/model"}}
    if path.startswith("deployment.autoscaling."):
        config["deployment"] = {"autoscaling": {"max_replicas": 2}}
    if path.startswith("simulation."):
        config["engine"] = {"device": "simulated"}
        config["simulation"] = {"steps": str(SIM_DIR / "steps" / "cpu2-smollm2-135m.yaml")}
        config["simulation"]["acceptance"] = str(SIM_DIR / "acceptance" / "easy-and-hard.yaml")
    *sections, name = path.split(".")
    target = config
    for section in sections:
        target = target.setdefault(section, {})
    target[name] = value
    return config


# One case per key: a wrong value and everything the user sees about it.
WRONG = [
    ("model.source", "", "model.source: string should have at least 1 character, got ''"),
    ("model.revision", 5, "model.revision: input should be a valid string, got 5"),
    ("model.served_name", [], "model.served_name: input should be a valid string, got []"),
    ("model.dtype", "fp8", "model.dtype: input should be 'auto', 'float32' or 'bfloat16', got 'fp8'"),
    ("model.load_format", "pt", "model.load_format: input should be 'auto', 'safetensors' or 'dummy', got 'pt'"),
    ("model.max_model_len", 1, "model.max_model_len: input should be greater than or equal to 2, got 1"),
    (
        "model.chat_template",
        "./none.jinja",
        "model.chat_template: no such file: /none.jinja; give a Jinja file or the template itself",
    ),
    (
        "speculative_config.max_draft_len",
        -1,
        "speculative_config.max_draft_len: input should be greater than or equal to 0, got -1",
    ),
    (
        "speculative_config.max_total_draft_tokens",
        "x",
        "speculative_config.max_total_draft_tokens: input should be a valid integer, unable to parse string as an "
        "integer, got 'x'",
    ),
    (
        "speculative_config.speculative_model",
        "./none",
        "speculative_config.speculative_model: no such file or directory: /none",
    ),
    (
        "speculative_config.max_concurrency",
        0,
        "speculative_config.max_concurrency: input should be greater than 0, got 0",
    ),
    (
        "speculative_config.draft_len_schedule",
        {0: 1},
        "speculative_config.draft_len_schedule: batch size threshold must be >= 1, got 0",
    ),
    ("speculative_config.load_format", 1, "speculative_config.load_format: input should be a valid string, got 1"),
    (
        "speculative_config.acceptance_rate_window_size",
        -2,
        "speculative_config.acceptance_rate_window_size: input should be greater than or equal to 0, got -2",
    ),
    (
        "speculative_config.acceptance_rate_threshold",
        1.5,
        "speculative_config.acceptance_rate_threshold: input should be less than or equal to 1, got 1.5",
    ),
    (
        "speculative_config.use_rejection_sampling",
        "x",
        "speculative_config.use_rejection_sampling: input should be a valid boolean, unable to interpret input, "
        "got 'x'",
    ),
    (
        "speculative_config.allow_advanced_sampling",
        3,
        "speculative_config.allow_advanced_sampling: input should be a valid boolean, unable to interpret input, got 3",
    ),
    (
        "speculative_config.advanced_sampling_mode",
        "some",
        "speculative_config.advanced_sampling_mode: input should be 'full', 'no_topk', 'no_topp' or "
        "'no_topk_no_topp', got 'some'",
    ),
    (
        "speculative_config.enable_penalty",
        "x",
        "speculative_config.enable_penalty: input should be a valid boolean, unable to interpret input, got 'x'",
    ),
    (
        "speculative_config.mask_token_id",
        "x",
        "speculative_config.mask_token_id: input should be a valid integer, unable to parse string as an integer, "
        "got 'x'",
    ),
    (
        "speculative_config.target_layer_ids",
        3,
        "speculative_config.target_layer_ids: input should be a valid list, got 3",
    ),
    (
        "speculative_config.decoding_type",
        "MTP",
        "speculative_config.decoding_type: input should be 'DFlash', got 'MTP'",
    ),
    (
        "speculative_config.attention_backend",
        "FLASH",
        "speculative_config.attention_backend: input should be 'VANILLA' or 'TRTLLM', got 'FLASH'",
    ),
    ("engine.device", "tpu", "engine.device: input should be 'cpu', 'cuda' or 'simulated', got 'tpu'"),
    ("engine.threads", 0, "engine.threads: input should be greater than or equal to 1, got 0"),
    (
        "engine.tensor_parallel_size",
        True,
        "engine.tensor_parallel_size: input should be a valid integer, got True",
    ),
    ("engine.max_num_seqs", "8", "engine.max_num_seqs: input should be a valid integer, got '8'"),
    (
        "engine.max_num_batched_tokens",
        8,
        "engine: max_num_batched_tokens (8) must be at least max_num_seqs (16): every running request needs one token "
        "a step",
    ),
    ("engine.kv_cache.blocks", 1, "engine.kv_cache.blocks: input should be greater than or equal to 2, got 1"),
    (
        "engine.kv_cache.memory",
        "512 MX",
        'engine.kv_cache.memory: not a size: \'512 MX\'; write bytes as an integer or text such as "512MiB" or "2GB"',
    ),
    ("engine.kv_cache.block_size", 0, "engine.kv_cache.block_size: input should be greater than or equal to 1, got 0"),
    (
        "engine.draft_len_choices",
        [1, 3],
        "engine.draft_len_choices: must ascend strictly and start with 0, such as [0, 1, 3, 7, 15], got [1, 3]",
    ),
    (
        "engine.draft_block_width",
        1,
        "engine.draft_block_width: input should be greater than or equal to 2, got 1",
    ),
    (
        "engine.draft_sampling",
        "hot",
        "engine.draft_sampling: input should be 'greedy', 'coupled' or 'probabilistic', got 'hot'",
    ),
    ("engine.hidden_state_gather", "all", "engine.hidden_state_gather: input should be 'taps' or 'fused', got 'all'"),
    ("engine.drafter_weights", 8, "engine.drafter_weights: input should be 'auto', 'model' or 'int8', got 8"),
    ("engine.drafter_tensor_parallel", 1, "engine.drafter_tensor_parallel: input should be a valid boolean, got 1"),
    ("engine.pipeline_depth", 2, "engine.pipeline_depth: input should be less than or equal to 1, got 2"),
    ("engine.inter_token_target_ms", 0, "engine.inter_token_target_ms: input should be greater than 0, got 0"),
    (
        "engine.synthetic_acceptance_length",
        0.5,
        "engine.synthetic_acceptance_length: input should be greater than or equal to 1, got 0.5",
    ),
    ("engine.unsafe_dummy_weights", 1, "engine.unsafe_dummy_weights: input should be a valid boolean, got 1"),
    ("simulation.steps", "none.yaml", "simulation.steps: no such file: /none.yaml"),
    ("simulation.acceptance", "none.yaml", "simulation.acceptance: no such file: /none.yaml"),
    ("simulation.speed", 0, "simulation.speed: input should be greater than 0, got 0"),
    ("deployment.app", "a b", "deployment.app: string should match pattern '^[A-Za-z0-9][A-Za-z0-9_-]*$', got 'a b'"),
    (
        "deployment.route_prefix",
        "llm",
        "deployment.route_prefix: string should match pattern '^/([^/\\s{}]+(/[^/\\s{}]+)*)?$', got 'llm'",
    ),
    ("deployment.replicas", 0, "deployment.replicas: input should be greater than or equal to 1, got 0"),
    (
        "deployment.autoscaling.min_replicas",
        3,
        "deployment.autoscaling: min_replicas (3) is above max_replicas (2)",
    ),
    (
        "deployment.autoscaling.max_replicas",
        0,
        "deployment.autoscaling.max_replicas: input should be greater than or equal to 1, got 0",
    ),
    (
        "deployment.autoscaling.target_ongoing_requests",
        0,
        "deployment.autoscaling.target_ongoing_requests: input should be greater than 0, got 0",
    ),
    (
        "deployment.autoscaling.upscale_delay_s",
        -1,
        "deployment.autoscaling.upscale_delay_s: input should be greater than or equal to 0, got -1",
    ),
    (
        "deployment.autoscaling.downscale_delay_s",
        "1m",
        "deployment.autoscaling.downscale_delay_s: input should be a valid number, got '1m'",
    ),
    ("deployment.cpus", 0, "deployment.cpus: input should be greater than 0, got 0"),
    ("deployment.queue_limit", -1, "deployment.queue_limit: input should be greater than or equal to 0, got -1"),
    ("deployment.drain_s", -1, "deployment.drain_s: input should be greater than or equal to 0, got -1"),
    ("deployment.stall_timeout_s", 0, "deployment.stall_timeout_s: input should be greater than 0, got 0"),
    (
        "controller.enabled",
        "on",
        "controller.enabled: input should be a valid boolean, got 'on'",
    ),
    ("controller.margin", 1.0, "controller.margin: input should be less than 1, got 1.0"),
    ("controller.dwell_s", -1, "controller.dwell_s: input should be greater than or equal to 0, got -1"),
    ("controller.per_replica", 1, "controller.per_replica: input should be a valid boolean, got 1"),
    ("controller.fallback_s", 0, "controller.fallback_s: input should be greater than 0, got 0"),
    ("http.host", "", "http.host: string should have at least 1 character, got ''"),
    ("http.port", 70000, "http.port: input should be less than or equal to 65535, got 70000"),
    ("http.proxy", "nginx", "http.proxy: input should be 'python' or 'haproxy', got 'nginx'"),
    (
        "http.max_body_bytes",
        "0.3B",
        "http.max_body_bytes: not a whole number of bytes: '0.3B'",
    ),
]


@pytest.mark.parametrize(("path", "value", "message"), WRONG, ids=[case[0] for case in WRONG])
def test_wrong_value_is_refused_with_its_path(path: str, value: Any, message: str) -> None:
    assert problems(with_key(path, value)) == (message,)


def test_every_key_has_a_case() -> None:
    assert [key.path for key in keys()] == [case[0] for case in WRONG]


def test_a_simulation_and_a_simulated_device_need_each_other() -> None:
    files = with_key("simulation.speed", 2.0)
    assert parse_config(files, base_dir=Path("/")).is_simulated
    assert problems({**files, "engine": {}}) == ("simulation: only applies with engine.device: simulated; remove it",)
    del files["simulation"]
    assert problems(files) == ("engine.device: simulated needs the section simulation: steps and acceptance",)


@pytest.mark.parametrize("key", ["cpus", "drain_s", "stall_timeout_s"])
@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_numbers_are_finite(key: str, value: float) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config(with_key(f"deployment.{key}", value), base_dir=Path())
    assert caught.value.problems[0].startswith(f"deployment.{key}: input should be")
