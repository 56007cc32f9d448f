"""Tables of proofs name tests that exist: of every decoding option, and of faults that other engines had."""

import ast
import re
from pathlib import Path

import pytest

from engine.config.decoding import DFlashDecodingConfig

TESTS = Path(__file__).parent.parent


def rows(repo_root: Path) -> dict[str, list[str]]:
    """Field -> the other cells of its row."""
    text = (repo_root / "engine" / "config" / "README.md").read_text(encoding="utf-8")
    table = text.split("\n| field |", 1)[1].split("\n\n", 1)[0].splitlines()[2:]
    found: dict[str, list[str]] = {}
    for line in table:
        name, *cells = [cell.strip() for cell in line.strip("|").split(" |")]
        for field in re.findall(r"`(\w+)`", name):
            assert field not in found, f"{field} has two rows"
            found[field] = cells
    return found


def proofs(cell: str) -> list[tuple[str, str]]:
    """(file, test) of a cell like "`test_a.py`: `test_x`, `test_y`; `test_b.py`: `test_z`"."""
    found = []
    for group in cell.split("; "):
        match = re.fullmatch(r"`((?:\w+/)?test_\w+\.py)`: (`test_\w+`(?:, `test_\w+`)*)", group)
        assert match is not None, f"not a list of tests: {group}"
        found += [(match[1], name) for name in re.findall(r"`(\w+)`", match[2])]
    return found


def missing(cell: str, folder: Path) -> list[str]:
    """The tests of a cell that are not in the files it names."""
    absent = []
    for file, name in proofs(cell):
        tree = ast.parse((folder / file).read_text(encoding="utf-8"))
        found = {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
        absent += [] if name in found else [f"{file}: {name}"]
    return absent


def test_every_field_has_one_row(repo_root: Path) -> None:
    assert set(rows(repo_root)) == set(DFlashDecodingConfig.model_fields)
    assert all(len(cells) == 4 and cells[0] and cells[2] for cells in rows(repo_root).values())


@pytest.mark.parametrize("field", DFlashDecodingConfig.model_fields)
def test_the_tests_of_an_option_exist(repo_root: Path, field: str) -> None:
    assert missing(rows(repo_root)[field][3], TESTS / "engine") == []


def test_the_tests_of_other_engines_faults_exist() -> None:
    """A row without a test says why the fault cannot arise."""
    text = (TESTS / "README.md").read_text(encoding="utf-8")
    table = text.split("\n| where |", 1)[1].split("\n\n", 1)[0].splitlines()[2:]
    cells = [line.strip("|").split(" |")[2].strip() for line in table]
    assert len(cells) > 30
    with_tests = [cell for cell in cells if not cell.startswith("cannot arise: ")]
    assert [one for cell in with_tests for one in missing(cell, TESTS)] == []
