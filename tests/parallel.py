"""How a run of the whole suite is spread over processes, where pytest-xdist is installed.

A file's tests stay together, since they share fixtures. All files that use the Ray cluster go to one process, one after
the other and before everything else: they share that cluster, and mostly wait. A run of single files or folders, of
slow or of GPU tests, and one with -n stay as pytest makes them.
"""

import os
from functools import cache
from pathlib import Path
from typing import Any

import pytest

MAX_PROCESSES = 4  # each imports torch and transformers: more of them would wait for memory
_RAY = "ray_cluster"  # what every file that uses Ray names: the fixture, or the module it comes from


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """Before pytest-xdist looks at its options."""
    option = config.option
    if hasattr(config, "workerinput") or not config.pluginmanager.hasplugin("xdist"):
        return
    if option.numprocesses is not None or option.usepdb or option.collectonly:
        return
    if config.args_source is not pytest.Config.ArgsSource.TESTPATHS or option.markexpr != _default_marks(config):
        return
    option.numprocesses = min(MAX_PROCESSES, _usable_cores())
    option.dist = "loadscope"
    option.loadscopereorder = False  # the order of `pytest_collection_modifyitems`


def _default_marks(config: pytest.Config) -> str:
    words: list[str] = config.getini("addopts")
    return words[words.index("-m") + 1]


def _usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@cache
def uses_ray(file: Path) -> bool:
    """Whether a test file uses the Ray cluster."""
    return _RAY in file.read_text()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """In a process of a spread run: files that use Ray come first."""
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: not uses_ray(item.path))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """A unit of work is a file, or all files that use Ray."""
    if config.option.dist != "loadscope":
        return None
    from xdist.scheduler import LoadScopeScheduling

    class Files(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            return _RAY if uses_ray(config.rootpath / file) else file

    return Files(config, log)
