"""What a step brings to the decode programs: one packed upload.

    [0]                    limit of the decode rows' own drafts (the plan's verify_len, at most the program's width K)
    [1 .. R]               slots
    [R+1 .. R+U]           places in the flattened block table ..
    [R+U+1 .. R+2U]        .. and the block ids they take; unused ones write 0 to the filler slot's table

and to programs that take pieces of prompts (`engine.runner.pieces`), Q = K + 1:

    R numbers              size of a row's piece, 0 where it is none; what follows is not sent where all are
    R numbers              position of a piece's first token
    R * Q numbers          its tokens
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from engine.kernels.row_state import PieceRows
from engine.runner.pieces import write_pieces
from engine.runner.slots import SlotState
from engine.runner.upload_ring import UploadRing
from engine.step import PrefillChunk


def num_table_entries(num_rows: int) -> int:
    """U, block-table changes that an upload has room for: two a row, as a verify of 16 tokens can fill, and some."""
    return 2 * num_rows + 6


@dataclass(frozen=True, kw_only=True, slots=True)
class ProgramShape:
    """num_rows R and width K of a T program. takes_pieces: its rows may be pieces of prompts."""

    num_rows: int
    width: int
    takes_pieces: bool

    @property
    def num_tokens(self) -> int:
        """Of its forward."""
        return self.num_rows * (self.width + 1)

    @property
    def first_size(self) -> int:
        """Where the sizes of pieces begin."""
        return 1 + self.num_rows + 2 * num_table_entries(self.num_rows)

    @property
    def length(self) -> int:
        """Of an upload with pieces, where there may be any."""
        return self.first_size + (self.num_rows * (self.width + 3) if self.takes_pieces else 0)


class StepUpload:
    """The buffer that all programs of these shapes read, and its host side."""

    def __init__(self, shapes: Iterable[ProgramShape], state: SlotState, device: torch.device) -> None:
        self._ring = UploadRing(max([shape.length for shape in shapes]), device)
        self._filler_slot = state.filler_slot
        self._null_entry = state.filler_slot * state.block_table.shape[1]

    @property
    def limit_1(self) -> torch.Tensor:
        """Where programs find the limit."""
        return self._ring.device[:1]

    def slots_R(self, shape: ProgramShape) -> torch.Tensor:
        """Where a program finds its rows' slots."""
        return self._ring.device[1 : 1 + shape.num_rows]

    def table_changes(self, shape: ProgramShape) -> tuple[torch.Tensor, torch.Tensor]:
        """Where a program finds places in the flattened block table, and the block ids they take."""
        room, first = num_table_entries(shape.num_rows), 1 + shape.num_rows
        entries_U, block_ids_U = self._ring.device[first : first + 2 * room].view(2, room).unbind()
        return entries_U, block_ids_U

    def pieces(self, shape: ProgramShape) -> PieceRows | None:
        """Where a program finds its rows' pieces; None: it takes none."""
        if not shape.takes_pieces:
            return None
        rows, first = shape.num_rows, shape.first_size
        size_R, start_R = self._ring.device[first : first + 2 * rows].view(2, rows).unbind()
        ids_RQ = self._ring.device[first + 2 * rows : shape.length].view(rows, shape.width + 1)
        return PieceRows(size_R=size_R, start_R=start_R, ids_RQ=ids_RQ)

    def send(
        self,
        shape: ProgramShape,
        *,
        limit: int,
        slots: Sequence[int] = (),
        entries: Sequence[int] = (),
        block_ids: Sequence[int] = (),
        prefill: Sequence[PrefillChunk] = (),
    ) -> None:
        """slots: of the decode rows. entries, block_ids: the block table's changes, as many as it has room for.
        prefill: chunks that run as pieces behind the decode rows."""
        rows, room, first_size = shape.num_rows, num_table_entries(shape.num_rows), shape.first_size
        assert len(entries) <= room, f"{len(entries)} block-table changes, room for {room}"
        array = self._ring.next()
        array[0] = limit
        array[1 : 1 + len(slots)] = slots
        array[1 + len(slots) : 1 + rows] = self._filler_slot
        first = 1 + rows
        array[first : first + room] = self._null_entry
        array[first + room : first_size] = 0
        if entries:
            array[first : first + len(entries)] = entries
            array[first + room : first + room + len(entries)] = block_ids
        if not shape.takes_pieces:
            assert not prefill
            self._ring.send(first_size)
            return
        size_R, start_R = array[first_size : first_size + 2 * rows].reshape(2, rows)
        size_R[:] = 0
        if not prefill:
            self._ring.send(first_size + rows)
            return
        ids_RQ = array[first_size + 2 * rows : shape.length].reshape(rows, shape.width + 1)
        write_pieces(prefill, len(slots), array[1 : 1 + rows], size_R, start_R, ids_RQ)
        self._ring.send(shape.length)
