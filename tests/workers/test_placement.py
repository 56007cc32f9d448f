"""Bundles of a replica, and what a user is told when they fit nowhere."""

import pytest

from engine.parallel.process_identity import ProcessIdentity
from workers.gpu_worker import RankInfo
from workers.placement import PlacementError, _check_bundles, check_ranks, explain_unplaced, rank_bundles

NODES = {"10.0.0.1": {"CPU": 4.0, "node:10.0.0.1": 1.0, "memory": 1e9}, "10.0.0.2": {"CPU": 8.0, "GPU": 2.0}}


def test_bundles_are_rank_by_rank_and_the_replica_sits_in_the_first() -> None:
    bundles = rank_bundles(device="cuda", tensor_parallel_size=2, cpus_per_rank=1, replica_cpus=2)
    assert bundles == [{"CPU": 3.0, "GPU": 1.0}, {"CPU": 1.0, "GPU": 1.0}]
    assert rank_bundles(device="cpu", tensor_parallel_size=1, cpus_per_rank=2) == [{"CPU": 2.0}]


@pytest.mark.parametrize(
    ("bundles", "message"),
    [
        (
            [{"CPU": 16.0}],
            r"bundle 0 \{CPU: 16, GPU: 0\} fits no node\. Nodes \(total\): 10\.0\.0\.1: \{CPU: 4, GPU: 0\}; ",
        ),
        (
            [{"CPU": 1.0, "GPU": 1.0}] * 4,
            r"bundle 2 \{CPU: 1, GPU: 1\} fits no node next to bundles 0\.\.1 on one node",
        ),
        ([{"CPU": 1.0, "H100": 1.0}], r"bundle 0 \{CPU: 1, GPU: 0, H100: 1\} fits no node"),
        ([{"CPU": 8.0, "GPU": 2.0}], "every bundle fits a node, but its resources are in use"),
    ],
)
def test_an_unplaced_group_is_explained(bundles: list[dict[str, float]], message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        raise AssertionError(explain_unplaced(bundles, NODES))


def test_a_cluster_without_nodes_is_explained() -> None:
    assert explain_unplaced([{"CPU": 1.0}], {}).endswith("no nodes")


def test_a_given_group_must_have_a_bundle_and_a_gpu_for_each_rank() -> None:
    with pytest.raises(
        PlacementError, match="tensor_parallel_size: 2 ranks need as many bundles, the placement group has 1"
    ):
        _check_bundles([{"CPU": 1.0}], device="cpu", num_ranks=2)
    with pytest.raises(PlacementError, match="device: cuda needs a GPU in bundle 1"):
        _check_bundles([{"GPU": 1.0}, {"CPU": 1.0}], device="cuda", num_ranks=2)


def test_ranks_must_share_the_replicas_host_and_see_their_gpu() -> None:
    def info(rank: int, hostname: str, devices: str | None) -> RankInfo:
        me = ProcessIdentity.current()
        return RankInfo(rank=rank, process=me, hostname=hostname, visible_devices=devices, free_port=None)

    check_ranks([info(0, "a", "0"), info(1, "a", "1")], device="cuda", hostname="a")
    check_ranks([info(0, "a", "")], device="cpu", hostname="a")
    with pytest.raises(PlacementError, match=r"must share one node, they are on \['a', 'b'\]"):
        check_ranks([info(0, "a", None), info(1, "b", None)], device="cpu", hostname="a")
    with pytest.raises(PlacementError, match=r"CUDA_VISIBLE_DEVICES is empty in ranks \[1\]"):
        check_ranks([info(0, "a", "0"), info(1, "a", "")], device="cuda", hostname="a")
