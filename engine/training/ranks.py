"""The processes of one data-parallel training, one per device; started by `torchrun`, or alone."""

import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """rank of size; device: the one of this rank ("cuda:1", "cpu")."""

    rank: int
    size: int
    device: str

    @classmethod
    def from_environment(cls, device: str) -> "Ranks":
        """Joins the group that torchrun's variables describe (NCCL on CUDA, Gloo elsewhere)."""
        size = int(os.environ.get("WORLD_SIZE", "1"))
        rank, local = int(os.environ.get("RANK", "0")), int(os.environ.get("LOCAL_RANK", "0"))
        if device == "cuda":
            device = f"cuda:{local}"
            torch.cuda.set_device(local)
        if size > 1:
            dist.init_process_group("nccl" if device.startswith("cuda") else "gloo", rank=rank, world_size=size)
        return cls(rank=rank, size=size, device=device)

    def mean_(self, values: Tensor) -> None:
        """Replaces the tensor by its mean over the ranks."""
        if self.size > 1:
            dist.all_reduce(values)
            values.div_(self.size)

    def from_first(self, value: float) -> float:
        """Rank 0's value, on every rank."""
        if self.size == 1:
            return value
        shared = torch.tensor([value], dtype=torch.float64, device=self.device)
        dist.broadcast(shared, 0)
        return float(shared)

    def barrier(self) -> None:
        if self.size > 1:
            self.from_first(0.0)

    def close(self) -> None:
        if self.size > 1:
            dist.destroy_process_group()
