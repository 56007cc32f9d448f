"""A launch of `engine.kernels.stream_gemm` or `stream_head` on the CPU: host function, kernel and both its parts from
their source.

Programs run at once, warps take turns at random, copies end late, and what the kernel before writes is there only some
time after the launch. What is not there yet reads as NaN. A tile of shared memory is pieces of 128 bytes of columns,
each of all rows, without the swizzle that no two views of it disagree about.

The warps of a part are one thread. What it has read and written in shared memory is so for all of them only behind
a barrier of theirs: until then the place is marked, and no copy, store or load that could meet the mark is allowed.
What it has stored in global memory others see only from the next barrier on.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from tests.engine.modelled_warps import Barrier, Cells, Turns, Whatever, definitions

KERNELS = Path(__file__).parents[2] / "engine" / "kernels"
FILES = ("stream_copies", "stream_int8", "stream_multiply", "stream_gemm")
LATE = (1, 3, 10, 60)  # turns that a copy takes


def sources(names: Iterable[str] = FILES) -> dict[str, str]:
    return {name: (KERNELS / f"{name}.py").read_text() for name in names}


@dataclass(frozen=True, kw_only=True, slots=True)
class Scaled:
    """What `engine.kernels.row_gemm.Scaled` is, without Triton."""

    x_MK: Tensor
    squares_MP: Tensor
    eps: float


class Constant(int):
    @property
    def value(self) -> int:
        return int(self)


class Pointer:
    """A tensor's memory from some element on, or many places in it."""

    def __init__(self, memory: Tensor, at: Any = 0) -> None:
        self.memory, self.at = memory, at
        self.dtype = SimpleNamespace(element_ty=memory.dtype)

    def __add__(self, more: Any) -> "Pointer":
        return Pointer(self.memory, self.at + more)

    def places(self, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """(where, whether to look), all of those inside."""
        at = torch.as_tensor(self.at)
        asked = torch.ones_like(at, dtype=torch.bool) if mask is None else mask.expand_as(at)
        assert not (asked & ((at < 0) | (at >= self.memory.numel()))).any(), "outside a tensor"
        return torch.where(asked, at, 0), asked


class Shared:
    """One tile or several in shared memory. cells: three rows, which are values, marks of reads, marks of writes.

    marked: the list of whose turn it is, for what it has marked.
    """

    def __init__(self, cells: Tensor, shape: Sequence[int], piece: int, marked: Callable[[], list[Tensor]]) -> None:
        assert cells.shape[1] == math.prod(shape)
        self.cells, self.shape, self.piece, self.marked, self.turned = cells, list(shape), piece, marked, False

    def _part(self, first: int, length: int, shape: Sequence[int]) -> "Shared":
        assert 0 <= first <= first + length <= self.cells.shape[1]
        return type(self)(self.cells[:, first : first + length], shape, self.piece, self.marked)

    def index(self, at: int) -> "Shared":
        size = math.prod(self.shape[1:])
        return self._part(at * size, size, self.shape[1:])

    def _reinterpret(self, _: Any, shape: Sequence[int], __: Any) -> "Shared":
        return self._part(0, self.cells.shape[1], shape)

    def slice(self, start: int, length: int, dim: int) -> "Shared":
        columns = self.shape[1]
        assert dim == 0 and self.piece == columns
        return self._part(start * columns, length * columns, [length, columns])

    def permute(self, _: Any) -> "Shared":
        other = self._part(0, self.cells.shape[1], self.shape)
        other.turned = True
        return other

    def now(self) -> Tensor:
        rows, columns = self.shape
        values = self.cells[0].view(columns // self.piece, rows, self.piece).transpose(0, 1).reshape(rows, columns)
        return values.T if self.turned else values

    def mark(self, row: int) -> None:
        assert not self.cells[2].any(), "other warps may still have to write here"
        assert row == 1 or not self.cells[1].any(), "other warps may still have to read here"
        self.cells[row] = 1
        self.marked().append(self.cells)

    def load(self, _: Any) -> Tensor:
        self.mark(1)
        assert not self.cells[0].isnan().any(), "read before it was there"
        return self.now().clone()

    def store(self, value: Tensor) -> None:
        rows, columns = self.shape
        self.mark(2)
        self.cells[0] = value.view(rows, columns // self.piece, self.piece).transpose(0, 1).reshape(-1)


class Numbers(Shared):
    """Whole numbers in shared memory."""

    def now(self) -> Tensor:
        return self.cells[0].to(torch.int32)

    def store(self, value: Tensor) -> None:
        self.mark(2)
        self.cells[0] = value


class Product:
    """sums + w @ x, of operands that the matrix units read any time between the call and the wait for it."""

    def __init__(self, w: Any, x: Shared, sums: Any) -> None:
        self.operands, self.sums = (w, x), sums
        self.value: Any = None
        self.mark()
        self.first = self._read()

    def mark(self) -> None:
        for operand in self.operands:
            if isinstance(operand, Shared):
                operand.mark(1)

    def _read(self) -> list[Tensor]:
        return [(of.now().clone() if isinstance(of, Shared) else of).float() for of in self.operands]

    def end(self) -> None:
        (w, x), before = self._read(), self.first
        assert torch.equal(w, before[0]) and torch.equal(x, before[1]), "read before it was there, or after it was gone"
        sums = self.sums.value if isinstance(self.sums, Product) else self.sums
        self.value = sums + w @ x


class Launch:
    """late: tensors that the kernel before writes. kernel: its name in files, which come in the order of imports.

    functions: what a host function sees; one of those is to be called, once. After it, ended: whether both parts of
    every program came to their end, the kernel before them being given time.
    """

    def __init__(self, seed: int, files: dict[str, str], late: list[Tensor], *, pdl: bool, kernel: str) -> None:
        self.turns, self.ended, self.barriers = Turns(seed), False, list[Barrier]()
        self._late, self._before_ended = [(tensor, tensor.clone()) for tensor in late], not pdl
        self._code = [definitions(source) for source in files.values()]
        self._kernel = kernel
        self._stores: list[tuple[int, Any]] = []
        if pdl:
            for tensor in late:
                tensor.fill_(math.nan)
            self.turns.coming.append((self.turns.rng.choice((1, 40, 200)), self._end_before))
        self.functions = self._names(0, 0, [])
        self.functions[kernel] = _Grid(self._launch)

    def _end_before(self) -> None:
        self._before_ended = True
        for tensor, values in self._late:
            tensor.copy_(values)

    def _launch(self, programs: int, args: tuple[Any, ...], constants: dict[str, Any]) -> None:
        for of_launch in ("num_warps", "maxnreg", "launch_pdl"):
            constants.pop(of_launch)
        parts: list[tuple[Any, Any]] = []
        pointers = [Pointer(_memory(arg)) if isinstance(arg, Tensor) else arg for arg in args]
        for program in range(programs):
            self._names(program, programs, parts)[self._kernel](*pointers, **constants)
        self.ended = self.turns.run([partial(warps, *given) for warps, given in parts])
        self._store_all()

    def _store_all(self, part: int | None = None) -> None:
        for of, store in self._stores:
            if part in (None, of):
                store()
        self._stores = [later for later in self._stores if part not in (None, later[0])]

    def _names(self, program: int, programs: int, parts: list[tuple[Any, Any]]) -> dict[str, Any]:
        """What the source runs in. parts: gets the kernel's two, with their arguments."""
        turns, whatever = self.turns, Whatever()
        marks: defaultdict[int, list[Tensor]] = defaultdict(list)
        products_of: defaultdict[int, list[Product]] = defaultdict(list)

        def allocate(dtype: torch.dtype, shape: list[int], layout: Any) -> Any:
            if dtype == torch.int64:
                self.barriers += (own := [Barrier() for _ in range(shape[0])])
                return Cells(own)
            cells = torch.zeros(3, math.prod(shape))
            cells[0] = math.nan
            piece = shape[-1] if layout is None else 8 * layout.swizzle_byte_width // layout.element_bitwidth
            kind = Numbers if dtype == torch.int32 else Shared
            return kind(cells, shape, piece, lambda: marks[turns.number])

        def copy(desc: Any, at: list[int], barrier: Barrier, to: Shared) -> None:
            rows, columns = desc.box
            assert [rows, columns] == to.shape and columns == to.piece
            assert not to.cells[1:].any(), "other warps may still have to read here"
            box = torch.zeros(rows, columns)
            values = desc.tensor[at[0] : at[0] + rows, at[1] : at[1] + columns].float()
            assert values.shape[0] and values.shape[1] == columns
            box[: len(values)] = values

            def land() -> None:
                to.cells[0] = box.reshape(-1)
                barrier.missing -= box.numel() * desc.tensor.element_size()
                barrier.settle()

            to.cells[0] = math.nan
            turns.coming.append((turns.now + turns.rng.choice(LATE), land))
            turns.until()

        def multiplied(w: Any, x: Shared, sums: Any, is_async: bool) -> Product:
            turns.until()
            products_of[turns.number].append(product := Product(w, x, sums))
            turns.until()
            return product

        def wait_for_products(number: int, deps: tuple[Product, ...]) -> Any:
            turns.until()
            assert number == 0
            for product in products_of.pop(turns.number, []):
                product.end()
            values = tuple(product.value for product in deps)
            return values if len(values) > 1 else values[0]

        def barrier() -> None:
            turns.until()
            self._store_all(turns.number)
            for cells in marks.pop(turns.number, []):
                cells[1:] = 0
            for product in products_of[turns.number]:
                product.mark()

        def load(pointer: Pointer, mask: Tensor | None = None, other: float = 0.0, **_: str) -> Tensor:
            where, asked = pointer.places(mask)
            return torch.where(asked, pointer.memory[where], torch.tensor(other).to(pointer.memory.dtype))

        def store(pointer: Pointer, value: Any, mask: Tensor | None = None, eviction_policy: str = "") -> None:
            assert self._before_ended, "the kernel before may still read here"
            where, asked = pointer.places(mask)
            values = torch.as_tensor(value, dtype=pointer.memory.dtype).expand_as(where)[asked].clone()
            self._stores.append((turns.number, lambda: pointer.memory.__setitem__(where[asked], values)))

        def forget(pointer: Pointer) -> None:
            turns.until()
            line = 128 // pointer.memory.element_size()
            assert (pointer.at % line == 0).all()
            pointer.memory[(pointer.at[:, None] + torch.arange(line)).flatten()] = math.nan

        def atomic_add(pointer: Pointer, value: int, sem: str) -> int:
            turns.until()
            assert sem == "acq_rel"
            before = int(pointer.memory[pointer.at])
            pointer.memory[pointer.at] += value
            return before

        def wait(barrier: Barrier, parity: int) -> None:
            turns.until(lambda: barrier.ended % 2 != parity)

        def arrive(barrier: Barrier, count: int) -> None:
            turns.until()
            barrier.arrive()

        gl = SimpleNamespace(
            constexpr=Constant,
            **{
                name: getattr(torch, name)
                for name in ("int8", "int32", "int64", "bfloat16", "float32", "rsqrt", "exp", "where")
            },
            **dict.fromkeys(("NVMMADistributedLayout", "BlockedLayout", "SliceLayout"), whatever),
            **dict.fromkeys(("DistributedLinearLayout", "DotOperandLayout"), whatever),
            NVMMASharedLayout=lambda **shape: SimpleNamespace(**shape),
            SwizzledSharedLayout=lambda *_: None,
            allocate_shared_memory=allocate,
            arange=lambda start, end, _: torch.arange(start, end),
            full=lambda shape, value, dtype, _: torch.full(shape, value, dtype=dtype),
            zeros=lambda shape, dtype, _: torch.zeros(shape, dtype=dtype),
            convert_layout=lambda value, *_, **__: value.clone(),
            sum=lambda value, dim: value.sum(dim),
            max=lambda value, dim: value.amax(dim),
            min=lambda value, dim: value.amin(dim),
            static_range=range,
            program_id=lambda _: program,
            num_programs=lambda _: programs,
            warp_specialize=lambda of_warps, *_: parts.extend(of_warps),
            load=load,
            store=store,
            atomic_add=atomic_add,
        )
        names: dict[str, Any] = {
            "gl": gl,
            "tl": SimpleNamespace(debug_barrier=barrier),
            "mbarrier": SimpleNamespace(
                MBarrierLayout=lambda: None,
                init=whatever,
                wait=wait,
                expect=lambda barrier, size: barrier.arrive(size),
                arrive=arrive,
            ),
            "tma": SimpleNamespace(async_copy_global_to_shared=copy),
            "warpgroup_mma": multiplied,
            "warpgroup_mma_wait": wait_for_products,
            "fence_async_shared": whatever,
            "gdc_wait": lambda: turns.until(lambda: self._before_ended),
            "gdc_launch_dependents": whatever,
            "KEPT": "evict_last",
            "forget": forget,
            "torch": SimpleNamespace(
                **{name: getattr(torch, name) for name in ("int8", "int32", "bfloat16", "float32")},
                empty=lambda *shape, dtype, device: torch.full(
                    shape, math.nan if dtype.is_floating_point else -7, dtype=dtype
                ),
            ),
            "Tensor": Tensor,
            "Scaled": Scaled,
            "StreamCut": whatever,
            "PeakCut": whatever,
            "triton": SimpleNamespace(cdiv=lambda a, b: -(-a // b)),
            "STREAM_TILE": 64,
            "TensorDescriptor": SimpleNamespace(
                from_tensor=lambda tensor, box, _: SimpleNamespace(tensor=tensor, box=box)
            ),
        }
        for code in self._code:
            exec(code, names)
        return names


class _Grid:
    """kernel[grid](...)"""

    def __init__(self, launch: Any) -> None:
        self._launch = launch

    def __getitem__(self, grid: tuple[int]) -> Any:
        return lambda *args, **constants: self._launch(grid[0], args, constants)


def _memory(tensor: Tensor) -> Tensor:
    """From its first element to the end of its storage."""
    first = tensor.storage_offset()
    return tensor.as_strided((tensor.untyped_storage().nbytes() // tensor.element_size() - first,), (1,), first)
