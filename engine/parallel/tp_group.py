"""The tensor-parallel group of one rank: identity at size 1, Gloo on the CPU, NCCL on CUDA."""

from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

# torch 2.13 renamed it; GPU builds still come with earlier versions.
_gather_flat = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


@dataclass(kw_only=True, slots=True)
class CollectiveCount:
    """Collectives made so far. bytes: what this rank contributed (its own part, not what it received)."""

    calls: int = 0
    bytes: int = 0


class TpGroup:
    """Collectives over the ranks of one engine. Every rank makes the same calls in the same order.

    `hidden_gathers` counts the hidden-state gathers of the drafter's context apart from all other collectives; at size
    1 nothing is gathered and nothing is counted.
    """

    def __init__(self, *, rank: int, size: int, backend: str | None) -> None:
        assert 0 <= rank < size and (size == 1) == (backend is None)
        self.rank = rank
        self.size = size
        self.hidden_gathers = CollectiveCount()
        self._backend = backend

    @classmethod
    def solo(cls) -> "TpGroup":
        """A group of one: every collective is the identity."""
        return cls(rank=0, size=1, backend=None)

    @classmethod
    def create(cls, *, rank: int, size: int, init_method: str | None, device: str, timeout_s: float) -> "TpGroup":
        """Joins the group; returns when all ranks have joined.

        init_method: torch's rendezvous address (`tcp://host:port` or `file://path`), the same on every rank.
        timeout_s: limit of the rendezvous and, on Gloo, of each later collective.

        Raises:
            ValueError: a rank outside the group, or no init_method for a group of several ranks.
            RuntimeError: a rank did not join in time (torch's DistError is one).
        """
        if size < 1 or not 0 <= rank < size:
            raise ValueError(f"rank must be in 0..{size - 1}, got {rank} (tensor_parallel_size={size}).")
        if size == 1:
            return cls.solo()
        if init_method is None:
            raise ValueError(f"init_method must be given for tensor_parallel_size={size}, e.g. tcp://127.0.0.1:29500.")
        backend = "nccl" if torch.device(device).type == "cuda" else "gloo"
        if not dist.is_initialized():
            # torch numbers groups per process and uses the number in the keys of the rendezvous. A failed start keeps
            # its number, and ranks that disagree on it wait for each other for ever; destroying a group resets it too.
            distributed_c10d._world.group_count = 0
        dist.init_process_group(
            backend,
            init_method=init_method,
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=timeout_s),
        )
        return cls(rank=rank, size=size, backend=backend)

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum over the ranks, bit for bit the same on each of them. May write into `x`; use the returned tensor.

        Gloo: the parts are gathered and added in rank order (in float32, rounded once), so an element's sum does not
        depend on its place in the tensor, which a ring would make it do. NCCL: one `all_reduce`, order chosen by NCCL.
        """
        if self.size == 1:
            return x
        if self._backend == "nccl":
            dist.all_reduce(x)
            return x
        parts = self._gather_parts(x)
        total = parts[0].float()
        for part in parts[1:]:
            total = total + part.float()
        return total.to(x.dtype)

    def all_gather(self, x: Tensor, *, dim: int) -> Tensor:
        """The ranks' equally shaped parts concatenated in rank order along `dim`."""
        if self.size == 1:
            return x
        return torch.cat(tuple(self._gather_parts(x)), dim=dim)

    def hidden_state_gather(self, x: Tensor, dim: int = -1) -> Tensor:
        """`all_gather` of captured hidden states (or of their `fc` features), counted in `hidden_gathers`."""
        if self.size == 1:
            return x
        self.hidden_gathers.calls += 1
        self.hidden_gathers.bytes += x.numel() * x.element_size()
        return self.all_gather(x, dim=dim)

    def close(self) -> None:
        """Leaves the group. The group cannot be used afterwards; closing twice is allowed."""
        if self._backend is not None and dist.is_initialized():
            dist.destroy_process_group()
        self._backend = None

    def _gather_parts(self, x: Tensor) -> Tensor:
        """[size, *x.shape], part r from rank r."""
        assert self._backend is not None, "the group is closed"
        parts = x.new_empty((self.size, *x.shape))
        _gather_flat(parts.view(-1), x.contiguous().view(-1))
        return parts
