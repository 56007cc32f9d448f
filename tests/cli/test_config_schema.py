"""The config file: nearest-key hints, rules between keys, relative paths, and the shipped files."""

import re
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


def problems(data: object) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        parse_config(data, base_dir=Path("/"))
    return caught.value.problems


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
            "http.zzz: unknown key; known keys here: host, port, proxy, max_body_bytes",
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
            {"model": {"source": "a/b", "load_format": "dummy"}},
            "model.load_format: 'dummy' serves random weights; set engine.unsafe_dummy_weights: true if that is meant",
        ),
        (
            {"model": {"source": "a/b"}, "speculative_config": {"load_format": "dummy"}},
            "speculative_config.load_format: 'dummy' serves random weights; set engine.unsafe_dummy_weights: true if "
            "that is meant",
        ),
        (
            {"model": {"source": "a/b"}, "engine": {"draft_sampling": "coupled"}},
            "engine.draft_sampling: has no effect without speculative_config; remove it",
        ),
        (
            {"model": {"source": "a/b"}, "engine": {"draft_len_choices": [0, 1]}},
            "engine.draft_len_choices: has no effect without speculative_config; remove it",
        ),
        (
            {"model": {"source": "a/b"}, "engine": {"draft_block_width": 8}},
            "engine.draft_block_width: has no effect without speculative_config; remove it",
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
        ("model: {source: 2020-13-45}", "line 1, column 17: not valid YAML: '2020-13-45' cannot be read as timestamp"),
        ("a: " + "9" * 5000, f"line 1, column 4: not valid YAML: '{'9' * 76}... cannot be read as int"),
        ("a: !!bool x", "line 1, column 4: not valid YAML: 'x' cannot be read as bool"),
        ("a: !!timestamp x", "line 1, column 4: not valid YAML: 'x' cannot be read as timestamp"),
        ("? [a]\n: b", "line 1, column 3: not valid YAML: a key must be text"),
    ],
)
def test_unreadable_yaml_names_the_place(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_config(file)
    assert caught.value.problems == (message,)


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("a\0b", "embedded null byte"),
        ("x" * 5000, "File name too long"),
        ("~nobody-of-this-name/x", "Could not determine home directory."),
    ],
    ids=["null", "long", "nobody"],
)
def test_what_is_no_path_is_named(value: str, reason: str) -> None:
    data = {
        "model": {"source": value, "chat_template": value},
        "speculative_config": {"speculative_model": value, "max_draft_len": 7},
        "engine": {"device": "simulated"},
        "simulation": {"steps": value, "acceptance": value},
    }
    with pytest.raises(ConfigError) as caught:
        parse_config(data, base_dir=Path("/"))
    assert caught.value.problems == (
        f"model.source: neither a path nor the name of a model: {reason}",
        f"speculative_config.speculative_model: neither a path nor the name of a model: {reason}",
        f"simulation.steps: not a path: {reason}",
        f"simulation.acceptance: not a path: {reason}",
        f"model.chat_template: neither a path nor a Jinja template: {reason}",
    )


def test_missing_and_binary_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read the config file: No such file or directory"):
        load_config(tmp_path / "none.yaml")
    (tmp_path / "c.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="not valid YAML: it is not UTF-8 text"):
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
    for name in arguments - {"speculative_config", "simulation", "shadow_time_share"}:  # no key, or named in full
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


def test_the_readmes_examples_hold(repo_root: Path) -> None:
    from ray.serve.schema import ServeDeploySchema

    text = (repo_root / "README.md").read_text(encoding="utf-8")
    own_model, gpu, on_ray = (yaml.safe_load(block) for block in re.findall(r"```yaml\n(.*?)```", text, re.DOTALL))
    ClusterConfig.model_validate(own_model)
    ClusterConfig.model_validate({"model": own_model["model"], **gpu})
    for application in ServeDeploySchema.model_validate(on_ray).applications:
        assert application.import_path == "cluster.app:build"
        assert set(application.args) == {"config"}
