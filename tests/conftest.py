"""What every test may use: paths, the default model, a small Ray cluster. Torch runs on one thread."""

import contextlib
import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

# Read when Ray is imported and by every process it starts, so set before any test module is imported.
os.environ["RAY_AUTH_MODE"] = "disabled"
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import pytest
import torch

# Triton's interpreter stands in for a GPU (`tests.gpu.places`). Triton reads it as it is imported, for functions of its
# own, and torch imports it for parts that transformers asks for: any test module may be the first.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

from tests.parallel import pytest_cmdline_main, pytest_collection_modifyitems, pytest_xdist_make_scheduler

__all__ = ["pytest_cmdline_main", "pytest_collection_modifyitems", "pytest_xdist_make_scheduler"]  # hooks

torch.set_num_threads(1)

REPO_ROOT = Path(__file__).resolve().parent.parent
RAY_OBJECT_STORE_BYTES = 100 * 1024 * 1024
QUIET_RAY = {  # what it records by the clock for a dashboard, which is not there
    "RAY_task_events_report_interval_ms": "0",
    "RAY_event_stats": "0",
    "REPORTER_UPDATE_INTERVAL_MS": "60000",
}


def find_free_port() -> int:
    """A port that nothing listened on a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture(scope="session")
def repo_root() -> Path:
    """The checkout."""
    return REPO_ROOT


@pytest.fixture(scope="session")
def smollm2_config_file() -> Path:
    """The shipped config of the default model."""
    return REPO_ROOT / "configs" / "smollm2-135m.yaml"


@pytest.fixture(scope="session")
def smollm2_dir(smollm2_config_file: Path) -> Path:
    """SmolLM2-135M-Instruct as a local directory: fetched and converted on first use, then from the product's cache."""
    from cluster.config import load_config
    from engine.weights.source import fetch

    return fetch(load_config(smollm2_config_file).model.source)


@pytest.fixture(scope="session")
def smollm2_drafter_dir() -> Path:
    """The DFlash drafter of the default model."""
    return REPO_ROOT / "models" / "smollm2-135m-dflash"


@pytest.fixture
def free_port() -> int:
    """A port that was free a moment ago."""
    return find_free_port()


@pytest.fixture(scope="module")
def free_port_of_module() -> int:
    """A port for a server that a module's tests share."""
    return find_free_port()


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[None]:
    """This process is connected to a Ray cluster of its own (8 logical CPUs, ports of its own choosing).

    One for the session, since a start takes seconds; a test leaves no actor behind. At the end every process that was
    started for it is gone, by its id.
    """
    import ray

    from cluster.cli.local_ray import PROXY_MIDDLEWARES, descendants

    before = set(descendants(os.getpid()))
    with pytest.MonkeyPatch.context() as environment:
        # Not in a runtime_env: with one, every process of an actor starts Python twice, and none is started ahead.
        environment.setenv("PYTHONPATH", f"{REPO_ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
        environment.setenv("RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH", PROXY_MIDDLEWARES)
        for name, value in QUIET_RAY.items():
            environment.setenv(name, value)
        ray.init(
            address="local",
            num_cpus=8,
            include_dashboard=False,
            object_store_memory=RAY_OBJECT_STORE_BYTES,
            log_to_driver=False,
            logging_level="error",
        )
    started = set(descendants(os.getpid())) - before
    yield
    ray.shutdown()
    for pid in started & set(descendants(os.getpid())):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
