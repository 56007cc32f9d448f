"""What a step brings to the decode programs: one packed upload. K drafts, Q = K + 1, R rows.

    4 numbers              the upload's own, counted from 0; 0 in each that is copied
                           limit of the decode rows' own drafts (the plan's verify_len, at most the program's width K)
                           place of the step's results in the memory that D writes them to, where it does
                           length of the upload
    R numbers              slots
    R numbers              where new blocks begin in a slot's block table ..
    R numbers              .. how many there are ..
    R * NEW_BLOCKS         .. and which; behind the last anything

and to programs that take pieces of prompts (`engine.runner.pieces`):

    R numbers              size of a row's piece, 0 where it is none; what follows is not sent where all are
    R numbers              position of a piece's first token
    R * Q numbers          its tokens

It is copied to the device, or taken from where it is by the first kernel of T (`from_host`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from struct import Struct
from typing import TypeVar

import numpy as np
import torch

from engine.kernels.row_state import HEADER, LENGTH_AT, LIMIT_AT, NEW_BLOCKS, NUMBER_AT, PLACE_AT, HostUpload, PieceRows
from engine.runner.pieces import write_pieces
from engine.runner.slots import SlotState
from engine.runner.upload_ring import HostRing, UploadRing
from engine.step import BlockTableUpdate, PrefillChunk

Numbers = TypeVar("Numbers", np.ndarray, torch.Tensor)


@dataclass(frozen=True, kw_only=True)
class ProgramShape:
    """num_rows R and width K of a T program. takes_pieces: its rows may be pieces of prompts."""

    num_rows: int
    width: int
    takes_pieces: bool

    @property
    def num_tokens(self) -> int:
        """Of its forward."""
        return self.num_rows * (self.width + 1)

    @cached_property
    def first_size(self) -> int:
        """Where the sizes of pieces begin."""
        return HEADER + (3 + NEW_BLOCKS) * self.num_rows

    @cached_property
    def usual_length(self) -> int:
        """Of an upload without pieces."""
        return self.first_size + (self.num_rows if self.takes_pieces else 0)

    @cached_property
    def first_numbers(self) -> Struct:
        """The memory of every upload's first numbers, up to the ids of new blocks."""
        return Struct(f"{HEADER + 3 * self.num_rows}q")

    @cached_property
    def length(self) -> int:
        """Of an upload with pieces, where there may be any."""
        return self.first_size + (self.num_rows * (self.width + 3) if self.takes_pieces else 0)


def fits(updates: Sequence[BlockTableUpdate], slots: Sequence[int]) -> bool:
    """Whether an upload has room for these changes of the block tables: of its rows' slots, few of each."""
    if not updates:
        return True
    changed = [update.slot for update in updates]
    return (
        all([len(update.block_ids) <= NEW_BLOCKS for update in updates])
        and len(set(changed)) == len(changed)
        and set(changed) <= set(slots)
    )


class StepUpload:
    """What all programs of these shapes read, and its host side. from_host: T takes it from there."""

    def __init__(
        self, shapes: Sequence[ProgramShape], state: SlotState, device: torch.device, *, from_host: bool = False
    ) -> None:
        capacity = max([shape.length for shape in shapes])
        capacity += -capacity % 16  # entries begin at lines of memory
        self._state = state
        self._copied = None if from_host else UploadRing(capacity, device)
        self._ring = HostRing(capacity, device) if from_host else None
        if from_host:
            rows, columns = max([shape.num_rows for shape in shapes]), state.block_table.shape[1]
            self._table = torch.zeros(rows, columns, dtype=torch.int64, device=device)

    @property
    def number(self) -> int:
        """Of the next upload, counted from 0. Only where `host` is."""
        assert self._ring is not None
        return self._ring.number

    def host(self, shape: ProgramShape) -> HostUpload | None:
        """From where a program's first kernel takes its rows, and to where; None: they are copied."""
        if self._ring is None:
            return None
        return HostUpload(
            entries_EC=self._ring.entries_EC,
            number_1=self._ring.number_1,
            numbers_C=self._ring.device,
            slots_R=self.slots_R(shape),
            size_R=_pieces_of(self.numbers_C, shape)[0] if shape.takes_pieces else None,
            table_RB=self._table[: shape.num_rows],
            usual_length=shape.usual_length,
            most_length=shape.length,
        )

    @property
    def numbers_C(self) -> torch.Tensor:
        """The upload on the device."""
        ring = self._copied if self._ring is None else self._ring
        assert ring is not None
        return ring.device

    @property
    def limit_1(self) -> torch.Tensor:
        """Where programs find the limit."""
        return self.numbers_C[LIMIT_AT : LIMIT_AT + 1]

    def slots_R(self, shape: ProgramShape) -> torch.Tensor:
        """Where a program finds its rows' slots."""
        return self.numbers_C[HEADER : HEADER + shape.num_rows]

    def table_changes(self, shape: ProgramShape) -> tuple[torch.Tensor, torch.Tensor]:
        """Places in the flattened block table, and the block ids they take; unused ones write 0 to the filler slot's
        table."""
        rows, table = shape.num_rows, self._state.block_table
        first, end = HEADER + rows, HEADER + 3 * rows
        first_R1, num_R1 = self.numbers_C[first:end].view(2, rows, 1).unbind()
        ids_RN = self.numbers_C[end : shape.first_size].view(rows, NEW_BLOCKS)
        column_N = torch.arange(NEW_BLOCKS, device=ids_RN.device)
        unused_RN = column_N >= num_R1
        places_RN = self.slots_R(shape)[:, None] * table.shape[1] + first_R1 + column_N
        places_RN = places_RN.masked_fill(unused_RN, self._state.filler_slot * table.shape[1])
        return places_RN.flatten(), ids_RN.masked_fill(unused_RN, 0).flatten()

    def pieces(self, shape: ProgramShape) -> PieceRows | None:
        """Where a program finds its rows' pieces; None: it takes none."""
        if not shape.takes_pieces:
            return None
        size_R, start_R, ids_RQ = _pieces_of(self.numbers_C, shape)
        return PieceRows(size_R=size_R, start_R=start_R, ids_RQ=ids_RQ)

    def send(
        self,
        shape: ProgramShape,
        *,
        limit: int,
        slots: Sequence[int] = (),
        updates: Sequence[BlockTableUpdate] = (),
        prefill: Sequence[PrefillChunk] = (),
        place: int = 0,
    ) -> None:
        """slots: of the decode rows. updates: the block tables' changes, which the caller knows to be such that `fits`.
        prefill: chunks that run as pieces behind the decode rows. place: of the results."""
        if self._ring is not None:
            self._fill(
                self._ring.next(),
                shape,
                number=self._ring.number,
                limit=limit,
                slots=slots,
                updates=updates,
                prefill=prefill,
                place=place,
            )
            self._ring.send()
            return
        assert self._copied is not None
        length = self._fill(
            self._copied.next(), shape, limit=limit, slots=slots, updates=updates, prefill=prefill, place=place
        )
        self._copied.send(length)

    def send_filler(self, shape: ProgramShape) -> None:
        """For programs that run as often as they like until `resume`, of filler rows alone. The device is idle."""
        if self._ring is None:
            self.send(shape, limit=0)
            return
        self._fill(self._ring.next(), shape, number=self._ring.number)
        self._ring.repeat()

    def resume(self) -> None:
        """From now on each upload is for the one program that is launched behind it."""
        if self._ring is not None:
            self._ring.resume()

    def _fill(
        self,
        array: np.ndarray,
        shape: ProgramShape,
        *,
        number: int = 0,
        limit: int = 0,
        slots: Sequence[int] = (),
        updates: Sequence[BlockTableUpdate] = (),
        prefill: Sequence[PrefillChunk] = (),
        place: int = 0,
    ) -> int:
        """Writes an upload, by default of filler rows alone, and returns its length. number: see the module."""
        rows = shape.num_rows
        length = shape.length if prefill else shape.usual_length
        assert len(slots) <= rows, f"{len(slots)} decode rows in a program of {rows}"
        # One list that goes into the array at once: for few rows an access to an array costs as much as ten to a list.
        numbers = [0] * (HEADER + 3 * rows)
        numbers[NUMBER_AT], numbers[LIMIT_AT], numbers[PLACE_AT], numbers[LENGTH_AT] = number, limit, place, length
        numbers[HEADER : HEADER + rows] = *slots, *[self._state.filler_slot] * (rows - len(slots))
        if updates:
            row_of = {slot: row for row, slot in enumerate(slots)}
            for update in updates:
                row, block_ids = row_of[update.slot], update.block_ids
                numbers[HEADER + rows + row], numbers[HEADER + 2 * rows + row] = update.first_index, len(block_ids)
                ids_at = HEADER + 3 * rows + row * NEW_BLOCKS
                array[ids_at : ids_at + len(block_ids)] = block_ids
        shape.first_numbers.pack_into(array.data, 0, *numbers)
        if shape.takes_pieces:
            array[shape.first_size : shape.usual_length] = 0
        if prefill:
            assert shape.takes_pieces, f"pieces in a program without: {shape}"
            size_R, start_R, ids_RQ = _pieces_of(array, shape)
            write_pieces(prefill, len(slots), array[HEADER : HEADER + rows], size_R, start_R, ids_RQ)
        return length


def _pieces_of(numbers: Numbers, shape: ProgramShape) -> tuple[Numbers, Numbers, Numbers]:
    """Sizes, positions and tokens of pieces, as views of an upload."""
    rows, first = shape.num_rows, shape.first_size
    ids_RQ = numbers[first + 2 * rows : shape.length].reshape(rows, shape.width + 1)
    return numbers[first : first + rows], numbers[first + rows : first + 2 * rows], ids_RQ
