"""Captures: nothing is freed by the collector while one runs."""

import contextlib
import gc
from types import SimpleNamespace

import pytest
import torch

from engine.runner.recorder import GraphRecorder


class Graph:
    """What the recorder asks of a CUDA graph."""

    def capture_begin(self, **_: object) -> None:
        pass

    def capture_end(self) -> None:
        pass

    def replay(self) -> None:
        pass


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> GraphRecorder:
    def stream(*_: object) -> SimpleNamespace:
        return SimpleNamespace(wait_stream=lambda _: None, synchronize=lambda: None)

    fakes = {"Stream": stream, "current_stream": stream, "CUDAGraph": Graph, "graph_pool_handle": lambda: None}
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: contextlib.nullcontext())
    return GraphRecorder(torch.device("cuda", 0))


@pytest.mark.parametrize("was_enabled", [True, False])
@pytest.mark.parametrize("fails", [False, True])
def test_the_collector_rests_while_a_program_is_captured(
    recorder: GraphRecorder, was_enabled: bool, fails: bool
) -> None:
    seen: list[bool] = []

    def program() -> None:
        seen.append(gc.isenabled())
        if fails and len(seen) == 2:
            raise RuntimeError("in the capture")

    try:
        (gc.enable if was_enabled else gc.disable)()
        with pytest.raises(RuntimeError) if fails else contextlib.nullcontext():
            recorder.record(program)
        assert seen == [was_enabled, False]  # run once, then captured
        assert gc.isenabled() == was_enabled
    finally:
        gc.enable()
