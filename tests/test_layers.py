"""Imports point one way, the engine knows neither Ray nor HTTP, and the top level holds what it may hold."""

import ast
from pathlib import Path

import pytest

LAYERS = ("engine", "workers", "cluster")  # each may import itself and those before it
TOP_LEVEL = {
    "README.md",
    "benchmarks",
    "cluster",
    "configs",
    "engine",
    "k8s",
    "models",
    "pyproject.toml",
    "tests",
    "workers",
}
BUILD_LEFTOVERS = {"build", "dist", "venv", "__pycache__", "shared"}
ENGINE_NEVER_IMPORTS = {"ray", "fastapi", "starlette", "uvicorn", "aiohttp"}
MAX_LINES = 400


def imported_packages(source: str) -> set[str]:
    """Top-level names of all imports in a module, those inside functions included."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"relative import in line {node.lineno}"
            assert node.module is not None
            found.add(node.module.split(".")[0])
    return found


def modules(repo_root: Path, package: str) -> list[Path]:
    return sorted((repo_root / package).rglob("*.py"))


@pytest.mark.parametrize("layer", LAYERS)
def test_imports_point_one_way(repo_root: Path, layer: str) -> None:
    above = set(LAYERS[LAYERS.index(layer) + 1 :]) | {"tests", "benchmarks"}
    wrong = {
        str(path.relative_to(repo_root)): names
        for path in modules(repo_root, layer)
        if (names := imported_packages(path.read_text(encoding="utf-8")) & above)
    }
    assert wrong == {}


def test_engine_knows_neither_ray_nor_http(repo_root: Path) -> None:
    wrong = {
        str(path.relative_to(repo_root)): names
        for path in modules(repo_root, "engine")
        if (names := imported_packages(path.read_text(encoding="utf-8")) & ENGINE_NEVER_IMPORTS)
    }
    assert wrong == {}


def test_top_level_holds_only_what_it_may(repo_root: Path) -> None:
    names = {path.name for path in repo_root.iterdir() if not path.name.startswith(".")}
    names = {name for name in names if not name.endswith(".egg-info")}
    assert names - TOP_LEVEL - BUILD_LEFTOVERS == set()


@pytest.mark.parametrize("layer", LAYERS)
def test_files_stay_readable(repo_root: Path, layer: str) -> None:
    long = {
        str(path.relative_to(repo_root)): count
        for path in modules(repo_root, layer)
        if (count := len(path.read_text(encoding="utf-8").splitlines())) > MAX_LINES
    }
    assert long == {}


def test_the_check_itself_sees_nested_imports() -> None:
    assert imported_packages("def f():\n    from ray.serve import x\n    import os.path as p\n") == {"ray", "os"}
