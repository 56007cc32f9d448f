"""`dflash simulate`: table, bars, JSON and plot of a small scenario; mistakes in the scenario are the user's."""

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner

from cluster.cli.main import app
from tests.simulate.toy import DRAFT_LENS, write

POLICIES = {*(f"K={k}" for k in DRAFT_LENS), "static", "per-replica", "ours", "clairvoyant"}


def test_everything_a_scenario_shows(tmp_path: Path) -> None:
    groups = [{"steps": "toy.yaml"}, {"steps": "toy.yaml", "from_s": 4}]
    bars = {"over_static": 0.5, "regret": 0.5, "recovered": 0.1, "over_per_replica": 1.5}
    path = write(tmp_path, replicas=groups, duration_s=12.0, cold_replicas_s=5, bars=bars)
    record, plot = tmp_path / "r.json", tmp_path / "p.svg"
    result = CliRunner().invoke(app, ["simulate", str(path), "--json", str(record), "--plot", str(plot)])
    assert result.exit_code == 1  # nothing is half again as fast as per-replica
    assert "ours / per-replica:" in result.stdout and ">= 1.5 FAILS" in result.stdout
    assert result.stdout.count("holds") >= 2
    figures = json.loads(record.read_text())
    assert set(figures["policies"]) == POLICIES
    best = max(figures["policies"][name]["score"] for name in POLICIES - {"clairvoyant"})
    assert figures["policies"]["clairvoyant"]["score"] > 0.98 * best
    assert figures["policies"]["static"]["score"] >= max(figures["policies"][f"K={k}"]["score"] for k in DRAFT_LENS)
    assert figures["measured_step_times"] is True
    assert [bar["holds"] for bar in figures["bars"]][:2] == [True, False]
    assert ElementTree.parse(plot).getroot().tag.endswith("svg")


def test_a_quick_look_judges_nothing(tmp_path: Path) -> None:
    path = write(tmp_path, seeds=[1, 2, 3], duration_s=4.0, bars={"over_static": 9})
    result = CliRunner().invoke(app, ["simulate", str(path), "--quick"])
    assert result.exit_code == 0, result.output
    assert "FAILS" not in result.stdout and " 0.00" in result.stdout


def test_a_mistake_ends_with_status_2_and_its_key(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["simulate", str(write(tmp_path, seeds=[]))])
    assert (result.exit_code, result.stdout) == (2, "")
    assert "seeds: " in result.stderr


@pytest.mark.parametrize("option", ["--json", "--plot"])
def test_a_file_that_cannot_be_written_is_said_before_the_simulation(tmp_path: Path, option: str) -> None:
    path = write(tmp_path)
    for file, problem in (
        (tmp_path / "none" / "r", f"no such directory: {tmp_path / 'none'}"),
        (tmp_path, f"{tmp_path} is a directory; name a file"),
    ):
        result = CliRunner().invoke(app, ["simulate", str(path), "--quick", option, str(file)])
        assert (result.exit_code, result.stdout) == (2, "")
        assert result.stderr == f"error: {option}: {problem}\n"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is full")
def test_a_disk_that_is_full_is_an_error_without_a_traceback(tmp_path: Path) -> None:
    path = write(tmp_path, duration_s=4.0)
    result = CliRunner().invoke(app, ["simulate", str(path), "--quick", "--json", "/dev/full"])
    assert (result.exit_code, result.exception.__class__) == (1, SystemExit)
    assert "policy" in result.stdout and "error: " in result.stderr and "No space left" in result.stderr
