"""The stream that work is queued on now, for a hot loop."""

import torch


class CurrentStream:
    """`torch.cuda.current_stream` of one device, asked for in every step.

    Torch's own, and marks that are given no stream, look the device up in Python first: 10 us of a step's host work.
    Asked for here is the stream's number alone, and the rest where it is another one than before.
    """

    def __init__(self, device: torch.device) -> None:
        self._index = torch.cuda.current_device() if device.index is None else device.index
        self._stream = torch.cuda.current_stream(self._index)

    def get(self) -> torch.cuda.Stream:
        """The calling thread's."""
        if torch._C._cuda_getCurrentRawStream(self._index) != self._stream.cuda_stream:
            self._stream = torch.cuda.current_stream(self._index)
        return self._stream
