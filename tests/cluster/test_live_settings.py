"""Live settings: all or nothing, and what is not in force is said."""

import asyncio
import logging
import tempfile
from types import SimpleNamespace

import pytest

from cluster.admission import Admission
from cluster.live_settings import LiveSettings
from cluster.replica_engine import ReplicaEngine
from engine.speculative.schedule import DraftLengthSchedule, ScheduleAck

STATIC = {4: 7}


class Client:
    """The engine's side of apply_schedule, with `engine.core.EngineCore.apply_schedule`'s rules."""

    def __init__(self) -> None:
        self.version, self.schedule = (0, 0), dict(STATIC)

    async def apply_schedule(self, version: tuple[int, int], schedule: dict[int, int]) -> ScheduleAck:
        live, rounded = DraftLengthSchedule.live(schedule, max_draft_len=7, choices=(0, 1, 3, 7))
        applied = version > self.version
        if applied:
            self.version, self.schedule = version, live.entries
        return ScheduleAck(applied=applied, version=self.version, schedule=self.schedule, rounded=rounded)


@pytest.fixture
def parts() -> tuple[LiveSettings, Client, Admission]:
    client, admission = Client(), Admission(max_num_seqs=2, queue_limit=1)
    engine = ReplicaEngine(
        group=SimpleNamespace(client=client),
        tokenizer=None,
        model_dir=tempfile.gettempdir(),
        max_model_len=100,
        vocab_size=10,
        max_draft_len=7,
        static_schedule=dict(STATIC),
    )
    return LiveSettings(engine=engine, admission=admission, drain_s=2.0), client, admission


def apply(settings: LiveSettings, queue_limit: int, schedule: dict[str, int] | None) -> None:
    live = {"queue_limit": queue_limit, "drain_s": float(queue_limit), "draft_len_schedule": schedule}
    asyncio.run(settings.apply(live))


def test_both_are_taken_over_and_null_is_the_static_schedule(parts) -> None:
    settings, client, admission = parts
    apply(settings, 5, None)
    assert (client.version, admission.capacity, settings.drain_s) == ((0, 0), 7, 5.0)
    apply(settings, 5, {"2": 3})
    assert (client.version, client.schedule) == ((0, 1), {2: 3})
    apply(settings, 5, {"2": 3})
    assert client.version == (0, 1)
    apply(settings, 5, None)
    assert (client.version, client.schedule) == ((0, 2), STATIC)


def test_a_refused_schedule_changes_nothing_else(parts) -> None:
    settings, client, admission = parts
    with pytest.raises(ValueError, match="max_draft_len"):
        apply(settings, 9, {"2": 9})
    assert (admission.capacity, client.schedule) == (3, STATIC)
    apply(settings, 9, {"2": 1})
    assert (admission.capacity, client.schedule) == (11, {2: 1})


def test_a_newer_schedule_of_a_controller_stays_and_a_warning_says_so(parts, caplog: pytest.LogCaptureFixture) -> None:
    settings, client, admission = parts
    client.version, client.schedule = (3, 8), {4: 1}
    with caplog.at_level(logging.WARNING):
        apply(settings, 9, {"2": 3})
    assert "draft_len_schedule {2: 3} (version (0, 1)) is not in force: the engine keeps the newer version (3, 8)" in (
        caplog.text
    )
    assert (client.schedule, admission.capacity) == ({4: 1}, 11)
    assert settings.schedule == {2: 3}  # what the replica returns to without that controller
