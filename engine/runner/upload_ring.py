"""A step's numbers on their way to the device: one packed buffer, one copy that nobody waits for."""

import numpy as np
import torch

_ENTRIES = 3  # one being copied, one waiting behind the step in flight, one being filled


class UploadRing:
    """`device`, int64 [capacity], is where every step's numbers arrive: programs read it at fixed places.

    The host fills `next()` and calls `send`. On CUDA the host side is pinned memory, an entry is used again when its
    copy is done, and the copy runs on the current stream, behind the programs that still read the last step's numbers.
    """

    def __init__(self, capacity: int, device: torch.device) -> None:
        self.device = torch.zeros(capacity, dtype=torch.int64, device=device)
        pinned = device.type == "cuda"
        self._hosts = [torch.zeros(capacity, dtype=torch.int64, pin_memory=pinned) for _ in range(_ENTRIES)]
        self._arrays = [host.numpy() for host in self._hosts]
        self._copied = [torch.cuda.Event() for _ in range(_ENTRIES)] if pinned else None
        self._entry = 0

    def next(self) -> np.ndarray:
        """The array to fill for the next `send`; holds what it held three steps ago."""
        if self._copied is not None:
            self._copied[self._entry].synchronize()
        return self._arrays[self._entry]

    def send(self, length: int) -> None:
        """Copies the first `length` numbers of the array that `next` gave to the device."""
        self.device[:length].copy_(self._hosts[self._entry][:length], non_blocking=True)
        if self._copied is not None:
            self._copied[self._entry].record()
        self._entry = (self._entry + 1) % _ENTRIES
