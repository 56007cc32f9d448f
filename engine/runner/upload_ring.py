"""A step's numbers on their way to the device: one packed buffer that nobody waits for, copied or read where it is."""

import numpy as np
import torch

from engine.kernels.row_state import ENTRIES


class UploadRing:
    """`device`, int64 [capacity], is where every step's numbers arrive: programs read it at fixed places.

    The host fills `next()` and calls `send`. On CUDA the host side is pinned memory, an entry is used again when its
    copy is done, and the copy runs on the current stream, behind the programs that still read the last step's numbers.
    """

    def __init__(self, capacity: int, device: torch.device) -> None:
        self.device = torch.zeros(capacity, dtype=torch.int64, device=device)
        pinned = device.type == "cuda"
        self._hosts = [torch.zeros(capacity, dtype=torch.int64, pin_memory=pinned) for _ in range(ENTRIES)]
        self._arrays = [host.numpy() for host in self._hosts]
        self._copied = [torch.cuda.Event() for _ in range(ENTRIES)] if pinned else None
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
        self._entry = (self._entry + 1) % ENTRIES


class HostRing:
    """Numbers that the device takes from host memory: see `engine.kernels.row_state.HostUpload`.

    Between two calls of `send` exactly one program that takes an upload is launched. Whoever calls `next` knows that
    the one that took the entry, ENTRIES uploads ago, has ended. device: int64 [capacity], where they are taken to.
    """

    def __init__(self, capacity: int, device: torch.device) -> None:
        self.entries_EC = torch.zeros(ENTRIES, capacity, dtype=torch.int64, pin_memory=device.type == "cuda")
        self.device = torch.zeros(capacity, dtype=torch.int64, device=device)
        self.number_1 = torch.zeros(1, dtype=torch.int64, device=device)
        self._arrays = self.entries_EC.numpy()
        self.number = 0  # of the next upload

    def next(self) -> np.ndarray:
        """The array to fill for the next `send`."""
        return self._arrays[self.number % ENTRIES]

    def send(self) -> None:
        """The array that `next` gave is filled: the program launched now may take it."""
        self.number += 1

    def repeat(self) -> None:
        """Instead of `send`: whatever runs until `resume` takes this array, as often as it runs. The device is idle."""
        self._arrays[:] = self.next().copy()

    def resume(self) -> None:
        """The next program takes the next upload, however many have run."""
        self.number_1.fill_(self.number)
