"""The config file: what each key refuses and says, nearest-key hints, relative paths, and the shipped files."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from cluster.config import ClusterConfig, ConfigError, default_served_name, in_config_terms, load_config, parse_config
from cluster.config_reference import json_schema, keys, markdown_table
from cluster.config_sections import parse_size
from engine.config.decoding import DFlashDecodingConfig
from tests.conftest import REPO_ROOT

SHIPPED = sorted((REPO_ROOT / "configs").glob("*.yaml"))


def problems(data: object, base_dir: Path = Path("/")) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        parse_config(data, base_dir=base_dir)
    return caught.value.problems


def with_key(path: str, value: Any) -> dict[str, Any]:
    """A valid config in which one key has `value`, and what that key needs beside it."""
    config: dict[str, Any] = {"model": {"source": "owner/model"}}
    if path.startswith("deployment.autoscaling."):
        config["deployment"] = {"autoscaling": {"max_replicas": 2}}
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
    ("engine.device", "tpu", "engine.device: input should be 'cpu' or 'cuda', got 'tpu'"),
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
    ("engine.hidden_state_gather", "all", "engine.hidden_state_gather: input should be 'taps' or 'fused', got 'all'"),
    ("engine.drafter_tensor_parallel", 1, "engine.drafter_tensor_parallel: input should be a valid boolean, got 1"),
    ("engine.pipeline_depth", 2, "engine.pipeline_depth: input should be less than or equal to 1, got 2"),
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
        True,
        "controller.enabled: this version has no speculation controller; write false and use draft_len_schedule",
    ),
    ("http.host", "", "http.host: string should have at least 1 character, got ''"),
    ("http.port", 70000, "http.port: input should be less than or equal to 65535, got 70000"),
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


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"model": {"source": "a/b", "sorce": 1}}, 'model.sorce: unknown key; did you mean "source"?'),
        ({"model": {"source": "a/b"}, "http": {"prot": 1}}, 'http.prot: unknown key; did you mean "port"?'),
        (
            {"model": {"source": "a/b"}, "engine": {"kv_cache": {"block": 9}}},
            'engine.kv_cache.block: unknown key; did you mean "blocks"?',
        ),
        (
            {"model": {"source": "a/b"}, "deployment": {"autoscaling": {"max_replica": 9, "max_replicas": 1}}},
            'deployment.autoscaling.max_replica: unknown key; did you mean "max_replicas"?',
        ),
        (
            {"model": {"source": "a/b"}, "speculative_config": {"max_draft_length": 3}},
            'speculative_config.max_draft_length: unknown key; did you mean "max_draft_len"?',
        ),
        (
            {"model": {"source": "a/b"}, "max_num_seqs": 3},
            'max_num_seqs: unknown key; did you mean "engine.max_num_seqs"?',
        ),
        (
            {"model": {"source": "a/b"}, "http": {"zzz": 1}},
            "http.zzz: unknown key; known keys here: host, port, max_body_bytes",
        ),
    ],
)
def test_unknown_key_names_the_nearest(data: dict[str, Any], message: str) -> None:
    assert problems(data) == (message,)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (None, "model: required, but missing"),
        ({"model": {}}, "model.source: required, but missing"),
        ([1], "the file: must be a section of keys, got [1]"),
        ({"model": "a/b"}, "model: must be a section of keys, got 'a/b'"),
        (
            {"model": {"source": "a/b"}, "engine": {"kv_cache": {"blocks": 9, "memory": 1}}},
            "engine.kv_cache: give blocks or memory, not both",
        ),
        (
            {"model": {"source": "a/b"}, "deployment": {"replicas": 1, "autoscaling": {"max_replicas": 2}}},
            "deployment: give replicas or autoscaling, not both",
        ),
        (
            {"model": {"source": "a/b"}, "engine": {"draft_len_choices": [0, 1]}},
            "engine.draft_len_choices: has no effect without speculative_config; remove it",
        ),
        (
            {
                "model": {"source": "a/b"},
                "speculative_config": {"max_draft_len": 3, "max_concurrency": 2, "draft_len_schedule": {4: 3}},
            },
            "speculative_config: max_concurrency and draft_len_schedule are mutually exclusive. Use max_concurrency "
            "for a simple speculation cutoff, or draft_len_schedule for dynamic draft-length control.",
        ),
    ],
)
def test_rules_between_keys(data: object, message: str) -> None:
    assert problems(data) == (message,)


def test_all_problems_come_in_one_message(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("model: {source: a/b, dtype: int4}\nhttp: {port: 0}\nhtpp: {}\n")
    with pytest.raises(ConfigError) as caught:
        load_config(file)
    assert str(caught.value) == (
        f"{file}: 3 problems\n"
        "  model.dtype: input should be 'auto', 'float32' or 'bfloat16', got 'int4'\n"
        "  http.port: input should be greater than or equal to 1, got 0\n"
        '  htpp: unknown key; did you mean "http"?'
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model: [", "line 1, column 9: not valid YAML: expected the node content, but found '<stream end>'"),
        ("[" * 3000 + "]" * 3000, "not valid YAML: nested too deeply"),
        ("model: {source: a, source: b}", 'line 1, column 20: not valid YAML: key "source" is given twice'),
    ],
)
def test_unreadable_yaml_names_the_place(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_config(file)
    assert caught.value.problems == (message,)


def test_missing_and_binary_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read the config file: No such file or directory"):
        load_config(tmp_path / "none.yaml")
    (tmp_path / "c.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="cannot read the config file: is not UTF-8 text"):
        load_config(tmp_path / "c.yaml")


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [(7, 7), ("7", 7), ("512MiB", 512 << 20), ("2GB", 2 * 10**9), ("1.5 kib", 1536), ("3 TB", 3 * 10**12), ("9B", 9)],
)
def test_sizes(text: object, num_bytes: int) -> None:
    assert parse_size(text) == num_bytes


@pytest.mark.parametrize("text", [True, None, 1.5, "", "MiB", "-1MiB", "1 PiBx", "1e9"])
def test_sizes_refused(text: object) -> None:
    with pytest.raises(ValueError, match="not a size"):
        parse_size(text)


def test_relative_paths_count_from_the_config_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "configs").mkdir()
    (tmp_path / "target").mkdir()
    (tmp_path / "configs" / "drafter").mkdir()
    (tmp_path / "configs" / "chat.jinja").write_text("{{ messages }}")
    file = tmp_path / "configs" / "c.yaml"
    file.write_text(
        "model: {source: ../target, chat_template: chat.jinja}\n"
        "speculative_config: {speculative_model: drafter, max_draft_len: 3}\n"
    )
    monkeypatch.chdir(tmp_path)
    loaded = load_config("configs/c.yaml")
    assert loaded.model.source == str(tmp_path / "target")
    assert loaded.model.chat_template == "{{ messages }}"
    assert loaded.speculative_config is not None
    assert loaded.speculative_config.speculative_model == str(tmp_path / "configs" / "drafter")
    assert loaded.served_name == "target"


def test_hub_ids_wheels_and_inline_templates_stay(tmp_path: Path) -> None:
    source = "pypi:p==1/p/Model-1B.gguf#sha256=00"
    for given in ("owner/model", source):
        model = {"source": given, "chat_template": "{% for m in messages %}x{% endfor %}"}
        loaded = parse_config({"model": model}, base_dir=tmp_path)
        assert (loaded.model.source, loaded.model.chat_template) == (given, model["chat_template"])


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("owner/model", "owner/model"),
        ("/models/Llama", "Llama"),
        ("/models/Llama.Q4.gguf", "Llama.Q4"),
        ("pypi:p==1/p/Model-1B.gguf#sha256=00", "Model-1B"),
    ],
)
def test_default_served_name(source: str, name: str) -> None:
    assert default_served_name(source) == name


def test_what_show_prints_loads_again() -> None:
    data = {
        "model": {"source": "a/b"},
        "speculative_config": {"max_draft_len": 3, "draft_len_schedule": {8: 1, 2: 3}},
        "engine": {"draft_len_choices": [0, 1, 3], "kv_cache": {"memory": "1GiB"}},
    }
    config = parse_config(data, base_dir=Path("/"))
    again = parse_config(yaml.safe_load(yaml.safe_dump(config.to_plain())), base_dir=Path("/"))
    assert again == config


def test_speculative_section_is_the_engine_class() -> None:
    config = parse_config({"model": {"source": "a/b"}, "speculative_config": {"max_draft_len": 3}}, base_dir=Path("/"))
    assert type(config.speculative_config) is DFlashDecodingConfig


def test_engine_arguments_are_the_resolvers() -> None:
    import inspect

    from engine.config.resolve import resolve_engine_config

    parameters = inspect.signature(resolve_engine_config).parameters
    config = parse_config({"model": {"source": "a/b"}}, base_dir=Path("/"))
    given = config.engine_arguments()
    assert set(given) <= set(parameters)
    # A key left out of the file means the resolver's own default.
    defaults = {name: parameters[name].default for name in given if name != "model"}
    assert {name: value for name, value in given.items() if name != "model"} == defaults


def test_engine_errors_are_said_in_the_configs_terms() -> None:
    assert in_config_terms("kv_cache_memory_bytes: too small") == "engine.kv_cache.memory: too small"
    assert in_config_terms("max_num_seqs: 0") == "engine.max_num_seqs: 0"
    assert in_config_terms("speculative_config.max_draft_len: x") == "speculative_config.max_draft_len: x"
    arguments = set(parse_config({"model": {"source": "a/b"}}, base_dir=Path("/")).engine_arguments())
    for name in arguments - {"speculative_config"}:
        path = in_config_terms(f"{name}: x").removesuffix(": x")
        assert path in {key.path for key in keys()}, name


@pytest.mark.parametrize("file", SHIPPED, ids=[file.name for file in SHIPPED])
def test_shipped_configs_load(file: Path) -> None:
    load_config(file)


def test_the_default_model_is_served_as_promised(smollm2_config_file: Path) -> None:
    config = load_config(smollm2_config_file)
    assert (config.served_name, config.model.dtype) == ("smollm2-135m", "bfloat16")
    assert (config.http.host, config.http.port) == ("127.0.0.1", 8000)
    assert config.speculative_config is not None
    assert config.speculative_config.speculative_model == str(REPO_ROOT / "models" / "smollm2-135m-dflash")


def test_every_key_says_what_it_is_and_when_it_applies() -> None:
    without = [key.path for key in keys() if not key.description and key.path != "speculative_config.decoding_type"]
    assert without == []
    schema = json_schema()
    for definition in schema["$defs"].values():
        for name, key in definition.get("properties", {}).items():
            is_section = "$ref" in key or any("$ref" in arm for arm in key.get("anyOf", ())) or "allOf" in key
            assert "applies" in key or is_section, name
    assert schema["additionalProperties"] is False


def test_live_keys_are_those_a_running_replica_takes_over() -> None:
    assert {key.path for key in keys() if key.applies == "live"} == {
        "speculative_config.draft_len_schedule",
        "deployment.replicas",
        "deployment.autoscaling.min_replicas",
        "deployment.autoscaling.max_replicas",
        "deployment.autoscaling.target_ongoing_requests",
        "deployment.autoscaling.upscale_delay_s",
        "deployment.autoscaling.downscale_delay_s",
        "deployment.queue_limit",
        "deployment.drain_s",
    }


def test_readme_of_the_configs_has_the_schemas_table(repo_root: Path) -> None:
    assert markdown_table() in (repo_root / "configs" / "README.md").read_text(encoding="utf-8")


def test_a_loaded_config_is_frozen() -> None:
    config = ClusterConfig.model_validate({"model": {"source": "a/b"}})
    with pytest.raises(ValueError, match="frozen"):
        config.engine.max_num_seqs = 3


@pytest.mark.parametrize("key", ["cpus", "drain_s", "stall_timeout_s"])
@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_numbers_are_finite(key: str, value: float) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config(with_key(f"deployment.{key}", value), base_dir=Path())
    assert caught.value.problems[0].startswith(f"deployment.{key}: input should be")
