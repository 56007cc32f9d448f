"""How a fixed-shape program is run again and again: captured as a CUDA graph, or simply called.

A program takes no arguments: it reads and writes tensors that stay where they are. What it returns is read by the
programs recorded right behind it and replayed right behind it, so its memory may serve other programs in between.
"""

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor

Program = Callable[[], None]

# CUDA's array interface has no bfloat16: such tensors travel as 16-bit integers.
_ARRAY_TYPES = {
    torch.float32: "<f4",
    torch.float16: "<f2",
    torch.bfloat16: "<i2",
    torch.int64: "<i8",
    torch.int32: "<i4",
    torch.bool: "|b1",
}


class Recorder(Protocol):
    """Turns programs into something that runs them. records: programs are not called again once they are recorded."""

    records: bool

    def record(self, program: Program) -> Program:
        """What runs the program from now on. Called once a program; the program may run meanwhile."""

    def borrow(self, tensor: Tensor) -> Tensor:
        """The same values without a claim on the memory; valid between the replay of its program and the next."""


class Repeater:
    """No capture: the program is called each time, with the shapes and buffers that a capture would have."""

    records = False

    def record(self, program: Program) -> Program:
        return program

    def borrow(self, tensor: Tensor) -> Tensor:
        return tensor


class _Place:
    """An address with a shape, in the form torch takes over without copying or owning."""

    def __init__(self, tensor: Tensor) -> None:
        itemsize = tensor.element_size()
        self.__cuda_array_interface__ = {
            "shape": tuple(tensor.shape),
            "typestr": _ARRAY_TYPES[tensor.dtype],
            "data": (tensor.data_ptr(), False),
            "strides": tuple([stride * itemsize for stride in tensor.stride()]),
            "version": 2,
        }


@contextmanager
def _nothing_collected() -> Iterator[None]:
    """No cycles of an engine that ended, with graphs or memory of their own, are freed in between: a free in a capture
    makes it void."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class GraphRecorder:
    """Captures programs as CUDA graphs that share one memory pool; each runs once eagerly first.

    num_graphs, seconds: of everything recorded so far. A program that is recorded behind another finds its results.
    """

    records = True

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()
        self.num_graphs = 0
        self.seconds = 0.0

    def record(self, program: Program) -> Program:
        started = time.perf_counter()
        graph = torch.cuda.CUDAGraph()
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            program()  # compiles kernels, makes library handles and workspaces: nothing of that may happen in a capture
            self._stream.synchronize()
            with _nothing_collected():
                # thread_local: other threads of the process may use CUDA meanwhile.
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                try:
                    program()
                finally:
                    graph.capture_end()
        torch.cuda.current_stream(self._device).wait_stream(self._stream)
        graph.replay()
        self.num_graphs += 1
        self.seconds += time.perf_counter() - started
        return graph.replay

    def borrow(self, tensor: Tensor) -> Tensor:
        if tensor.numel() == 0:
            return tensor
        borrowed = torch.as_tensor(_Place(tensor), device=self._device)
        return borrowed.view(tensor.dtype) if borrowed.dtype != tensor.dtype else borrowed
