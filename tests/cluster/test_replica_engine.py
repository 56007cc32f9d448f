"""A replica's engine starts while its tokenizer is read; the failure of either leaves nothing of the other."""

import asyncio
import os
from types import SimpleNamespace

import pytest

import engine.config.resolve
from cluster.app import read_config
from cluster.replica_engine import Tokenizer, start_engine
from workers.engine_group import EngineGroup
from workers.errors import EngineStartError

CONFIG = {"model": {"source": "org/toy", "served_name": "toy"}}


@pytest.fixture
def closed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was closed; a group starts and a tokenizer loads, unless the test says otherwise."""
    groups: list[str] = []

    async def close() -> None:
        groups.append("group")

    async def start(*args: object, **options: object) -> SimpleNamespace:
        return SimpleNamespace(close=close)

    monkeypatch.setattr(EngineGroup, "start", start)
    monkeypatch.setattr(Tokenizer, "load", lambda *args, **options: object())
    config = SimpleNamespace(model_dir="", drafter=None)
    monkeypatch.setattr(engine.config.resolve, "resolve_engine_config", lambda **options: config)
    monkeypatch.setattr(os, "environ", dict(os.environ))  # it hides the GPUs from its own process
    return groups


def test_a_tokenizer_that_cannot_be_read_ends_the_ranks(closed: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*args: object, **options: object) -> object:
        raise ValueError("model.chat_template: line 1")

    monkeypatch.setattr(Tokenizer, "load", load)
    with pytest.raises(ValueError, match="chat_template: line 1"):
        asyncio.run(start_engine(read_config(CONFIG)))
    assert closed == ["group"]


def test_a_tokenizer_that_cannot_be_read_is_told_while_the_ranks_still_start(
    closed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def start(*args: object, **options: object) -> object:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            closed.append("start")
            raise
        raise AssertionError("waited for the ranks")

    def load(*args: object, **options: object) -> object:
        raise ValueError("model.chat_template: line 1")

    monkeypatch.setattr(EngineGroup, "start", start)
    monkeypatch.setattr(Tokenizer, "load", load)
    with pytest.raises(ValueError, match="chat_template: line 1"):
        asyncio.run(start_engine(read_config(CONFIG)))
    assert closed == ["start"]


def test_a_start_that_is_given_up_leaves_no_group(closed: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    async def start(*args: object, **options: object) -> object:
        try:
            await asyncio.sleep(60)
        finally:
            closed.append("start")

    async def give_up() -> None:
        task = asyncio.create_task(start_engine(read_config(CONFIG)))
        await asyncio.sleep(0.1)
        task.cancel()
        await task

    monkeypatch.setattr(EngineGroup, "start", start)
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(give_up())
    assert closed == ["start"]


def test_ranks_that_do_not_start_are_the_error(closed: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    async def start(*args: object, **options: object) -> object:
        raise EngineStartError("the engine did not start: rank 0 ended", "")

    monkeypatch.setattr(EngineGroup, "start", start)
    with pytest.raises(EngineStartError, match="rank 0 ended"):
        asyncio.run(start_engine(read_config(CONFIG)))
    assert closed == []
