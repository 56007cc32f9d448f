"""Which kind of rank a config needs. Imports a kind only when it is made: a simulated one must not pull in torch."""

from collections.abc import Callable
from typing import Protocol

from engine.config.engine import EngineConfig
from engine.core import Runner
from engine.parallel.plan_ring import PlanReader


class Rank(Protocol):
    """One tensor-parallel rank."""

    @property
    def config(self) -> EngineConfig:
        """What it was made from, with what its device decided."""

    @property
    def runner(self) -> Runner:
        """Executes plans."""

    def follow(self, reader: PlanReader) -> None:
        """Executes plans until the ring is closed."""

    def close(self) -> None:
        """Gives up what the rank holds."""


def make_rank(
    config: EngineConfig, *, rank: int, init_method: str | None, progress: Callable[[str], None] | None = None
) -> Rank:
    """One rank on the config's device. Arguments and errors are those of `engine.rank.EngineRank`."""
    if config.device == "simulated":
        from engine.simulated.rank import SimulatedRank

        return SimulatedRank(config, progress=progress)
    from engine.rank import EngineRank

    return EngineRank(config, rank=rank, init_method=init_method, progress=progress)
