"""The end of a group's ranks: every step is bounded, also when processes hang or the cluster itself is going away."""

import asyncio
import contextlib
import logging
import os
import signal
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import ray
from ray.exceptions import RayError

from engine.parallel.plan_ring import unlink_ring
from workers.gpu_worker import RankInfo
from workers.placement import Placement

logger = logging.getLogger(__name__)

_RAY_CALL_S = 6.0  # one call to the cluster
_KILL_S = 1.5  # for Ray to end an actor, before its pid gets SIGKILL


async def end_ranks(
    *, actors: Sequence[Any], infos: Sequence[RankInfo], ring_name: str | None, placement: Placement | None
) -> None:
    """Ends the actors and their processes, then removes the plan ring's name and the placement group.

    Raises nothing: what does not succeed in time is logged.
    """
    for actor in actors:
        await _bounded("ending a rank's actor", partial(ray.kill, actor, no_restart=True))
    if not await _all_gone(infos, _KILL_S):
        for info in infos:
            if info.process.is_alive():
                with contextlib.suppress(ProcessLookupError):  # it ended after we looked
                    os.kill(info.process.pid, signal.SIGKILL)
        if not await _all_gone(infos, _KILL_S):
            alive = [info.process.pid for info in infos if info.process.is_alive()]
            logger.error("rank processes %s did not end on SIGKILL", alive)
    if ring_name is not None:
        unlink_ring(ring_name)
    if placement is not None:
        await _bounded("removing the placement group", placement.release)


async def _bounded(what: str, work: Callable[[], None]) -> None:
    """Blocking Ray work that may fail or hang when the cluster itself is going away."""
    try:
        await asyncio.wait_for(asyncio.to_thread(work), _RAY_CALL_S)
    except (TimeoutError, RayError, ValueError) as error:
        logger.warning("%s failed: %s: %s", what, type(error).__name__, error)


async def _all_gone(infos: Sequence[RankInfo], timeout_s: float) -> bool:
    deadline = time.monotonic() + timeout_s
    while any(info.process.is_alive() for info in infos):
        if time.monotonic() > deadline:
            return False
        await asyncio.sleep(0.02)
    return True
