"""The config's keys and the commands' options are public: a change of them must be a decision, seen in a diff."""

import json
from pathlib import Path

import typer
import yaml
from typer.testing import CliRunner

from cluster.cli.main import app
from cluster.config_reference import keys
from tests.conftest import REPO_ROOT

GOLDEN = Path(__file__).parent / "golden" / "public_surface.txt"


def surface() -> str:
    """One line per config key and per command-line parameter."""
    lines = [f"config {key.path}: {key.type} = {key.default} ({key.applies})" for key in keys()]
    lines += _commands(typer.main.get_command(app), "dflash")
    return "\n".join(lines) + "\n"


def _commands(command: object, name: str) -> list[str]:
    below = getattr(command, "commands", None)
    if below is not None:
        return [line for key in sorted(below) for line in _commands(below[key], f"{name} {key}")]
    return [name] + [f"{name} {'/'.join(sorted(parameter.opts))}" for parameter in command.params]


def test_surface_is_as_recorded() -> None:
    assert surface() == GOLDEN.read_text(encoding="utf-8"), (
        "if the change is meant, record it: python -m tests.cli.test_public_surface"
    )


def test_check_names_what_is_served(smollm2_config_file: Path) -> None:
    result = CliRunner().invoke(app, ["config", "check", str(smollm2_config_file)])
    assert (result.exit_code, result.stdout) == (0, f"{smollm2_config_file}: ok, serves smollm2-135m\n")


def test_check_fails_with_the_problems(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("model: {source: a/b}\nhttps: {}\n")
    result = CliRunner().invoke(app, ["config", "check", str(file)])
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == f'error: {file}: 1 problem\n  https: unknown key; did you mean "http"?\n'


def test_show_prints_a_config_that_checks(tmp_path: Path, smollm2_config_file: Path) -> None:
    shown = CliRunner().invoke(app, ["config", "show", str(smollm2_config_file)])
    assert shown.exit_code == 0
    values = yaml.safe_load(shown.stdout)
    assert values["engine"]["kv_cache"]["block_size"] == 16
    assert values["speculative_config"]["speculative_model"] == str(REPO_ROOT / "models" / "smollm2-135m-dflash")
    file = tmp_path / "shown.yaml"
    file.write_text(shown.stdout)
    assert CliRunner().invoke(app, ["config", "check", str(file)]).exit_code == 0


def test_schema_is_json_and_a_table() -> None:
    schema = json.loads(CliRunner().invoke(app, ["config", "schema"]).stdout)
    sections = {"model", "speculative_config", "engine", "simulation", "deployment", "controller", "http"}
    assert set(schema["properties"]) == sections
    table = CliRunner().invoke(app, ["config", "schema", "--markdown"]).stdout
    assert table.count("\n") == len(keys()) + 2


if __name__ == "__main__":
    GOLDEN.write_text(surface(), encoding="utf-8")
