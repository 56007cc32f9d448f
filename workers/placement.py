"""Where a group's ranks go: bundle i of one placement group = rank i, all on one node.

Inside a Serve replica the group is the replica's own; standalone, one is made and removed here.
"""

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.placement_group import (
    PlacementGroup,
    get_current_placement_group,
    placement_group,
    remove_placement_group,
)

Bundle = Mapping[str, float]
_REMOVE_TIMEOUT_S = 5.0


class PlacementError(RuntimeError):
    """The ranks do not fit where they should go; the message has the inventory."""


def rank_bundles(
    *, device: str, tensor_parallel_size: int, cpus_per_rank: float, replica_cpus: float = 0.0
) -> list[dict[str, float]]:
    """Bundles of one replica, rank by rank. replica_cpus: what the replica process itself takes, in bundle 0.

    For `placement_group_bundles` of a Serve deployment, with strategy STRICT_PACK.
    """
    bundles = [{"CPU": float(cpus_per_rank)} for _ in range(tensor_parallel_size)]
    bundles[0]["CPU"] += replica_cpus
    if device == "cuda":
        for bundle in bundles:
            bundle["GPU"] = 1.0
    return [{name: amount for name, amount in bundle.items() if amount} for bundle in bundles]


def explain_unplaced(bundles: Sequence[Bundle], nodes: Mapping[str, Bundle]) -> str:
    """Why a STRICT_PACK group of these bundles is not placed, given each node's total resources."""
    inventory = "; ".join(f"{name}: {_show(total)}" for name, total in nodes.items()) or "no nodes"
    num_fitting = max((_num_fitting(bundles, total) for total in nodes.values()), default=0)
    if num_fitting == len(bundles):
        return f"every bundle fits a node, but its resources are in use. Nodes (total): {inventory}"
    before = f" next to bundles 0..{num_fitting - 1} on one node" if num_fitting else ""
    return f"bundle {num_fitting} {_show(bundles[num_fitting])} fits no node{before}. Nodes (total): {inventory}"


def _num_fitting(bundles: Sequence[Bundle], total: Bundle) -> int:
    left = dict(total)
    for count, bundle in enumerate(bundles):
        for name, amount in bundle.items():
            left[name] = left.get(name, 0.0) - amount
            if left[name] < -1e-6:
                return count
    return len(bundles)


def _show(resources: Bundle) -> str:
    shown = {name: resources.get(name, 0.0) for name in ("CPU", "GPU")}
    shown |= {name: amount for name, amount in resources.items() if name not in shown and _is_users(name)}
    return "{" + ", ".join(f"{name}: {amount:g}" for name, amount in shown.items()) + "}"


def _is_users(name: str) -> bool:
    return not name.startswith(("node:", "object_store_memory", "memory", "bundle_", "accelerator_type:"))


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """A placed placement group. is_owned: made here, so removed here."""

    group: PlacementGroup
    is_owned: bool

    @classmethod
    async def acquire(
        cls, *, device: str, num_ranks: int, given: PlacementGroup | None, timeout_s: float
    ) -> "Placement":
        """`given`, else the current placement group, else a new one with one CPU (and one GPU) per rank.

        Raises:
            PlacementError: not placed within timeout_s, or the existing group has no bundle for a rank.
        """
        existing = given if given is not None else get_current_placement_group()
        if existing is not None:
            _check_bundles(existing.bundle_specs, device=device, num_ranks=num_ranks)
            return cls(group=existing, is_owned=False)
        bundles = rank_bundles(device=device, tensor_parallel_size=num_ranks, cpus_per_rank=1.0)
        # The socket to rank 0 is local: bundle 0, and with STRICT_PACK all of them, belong on this process's node.
        here = f"node:{ray.util.get_node_ip_address()}"  # type: ignore[no-untyped-call]
        if here in ray.cluster_resources():  # type: ignore[no-untyped-call]
            bundles[0][here] = 0.001
        group = placement_group(bundles, strategy="STRICT_PACK")
        placement = cls(group=group, is_owned=True)
        try:
            if not await asyncio.to_thread(group.wait, timeout_s):
                why = await asyncio.to_thread(_explain, bundles)
                raise PlacementError(f"{num_ranks} ranks were not placed on one node within {timeout_s:g} s: {why}")
        except BaseException:
            await asyncio.shield(asyncio.to_thread(placement.release))
            raise
        return placement

    def release(self) -> None:
        """Removes the group if it is ours and waits, for a bounded time, until it is gone. Blocking."""
        if not self.is_owned:
            return
        remove_placement_group(self.group)
        deadline = time.monotonic() + _REMOVE_TIMEOUT_S
        while time.monotonic() < deadline:
            state: dict[str, Any] = ray.util.placement_group_table(self.group)
            if state.get("state") in (None, "REMOVED"):
                return
            time.sleep(0.05)


def _explain(bundles: Sequence[Bundle]) -> str:
    nodes = {node["NodeManagerAddress"]: node["Resources"] for node in ray.nodes() if node["Alive"]}  # type: ignore[no-untyped-call]
    return explain_unplaced(bundles, nodes)


def _check_bundles(bundles: Sequence[Bundle], *, device: str, num_ranks: int) -> None:
    if len(bundles) < num_ranks:
        raise PlacementError(
            f"tensor_parallel_size: {num_ranks} ranks need as many bundles, the placement group has {len(bundles)}: "
            + ", ".join(_show(bundle) for bundle in bundles)
        )
    for index in range(num_ranks):
        if device == "cuda" and bundles[index].get("GPU", 0.0) < 1.0:
            raise PlacementError(f"device: cuda needs a GPU in bundle {index}, which is {_show(bundles[index])}")
