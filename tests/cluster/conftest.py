"""One API server for the tests of a module; each test starts from its defaults."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from fake_engine import ApiServer, build_tokenizer, running


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory):
    return build_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def module_server(tokenizer) -> Iterator[ApiServer]:
    with running(ApiServer(tokenizer)) as server:
        yield server


@pytest.fixture
def server(module_server: ApiServer) -> Iterator[ApiServer]:
    module_server.reset()
    yield module_server
    module_server.wait_idle()
