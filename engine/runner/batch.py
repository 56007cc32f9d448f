"""From a plan and the slot state to the flat inputs of one forward: ids, positions, cache slots, attention groups.

Shape letters: R decode rows, K verify length, N flattened token rows (decode rows first, row by row, then the prefill
chunks), W the drafter's block width, B block-table columns.
"""

from dataclasses import dataclass

import torch

from engine.attention.context import AttentionContext, AttentionGroup
from engine.config.engine import EngineConfig
from engine.kernels.row_state import HostResults, PieceRows, TargetRows
from engine.layers.upload import upload
from engine.runner.piece_rows import with_pieces
from engine.runner.slots import SlotState
from engine.step import PrefillChunk


@dataclass(frozen=True, kw_only=True)
class DecodeBlock:
    """The decode rows of a step before T. drafts_RK and k_R are what D verifies; column j >= 1 holds draft j.

    last_R: tokens of column 0, for whoever makes T's inputs of it. size_R: `PieceRows.size_R` where D finds pieces of
    prompts among the rows.
    fused: where the rows were made by `engine.runner.fused_rows`, what it goes on with. results: where it puts the
        rows' results, if not on the device.
    """

    slots_R: torch.Tensor
    drafts_RK: torch.Tensor
    k_R: torch.Tensor
    committed_R: torch.Tensor
    finished_R: torch.Tensor
    last_R: torch.Tensor | None = None
    size_R: torch.Tensor | None = None
    fused: TargetRows | None = None
    results: HostResults | None = None


@dataclass(frozen=True, kw_only=True)
class ForwardInputs:
    ids_N: torch.Tensor
    positions_N: torch.Tensor
    context: AttentionContext


def cache_slots(state: SlotState, slots_R: torch.Tensor, positions_RQ: torch.Tensor, block_size: int) -> torch.Tensor:
    """Flat cache slots [R, Q] of absolute positions, through each slot's block table."""
    blocks_RQ = state.block_table[slots_R[:, None], positions_RQ // block_size]
    return blocks_RQ * block_size + positions_RQ % block_size


def assert_owned(cache_N: torch.Tensor, written_N: torch.Tensor, block_size: int) -> None:
    """The cache slots that a forward writes lie in blocks of their rows and are written once (debug_checks).

    A slot in the null block would lose its K/V silently: the table entry was never sent. Two rows that write one slot
    hold the same block.
    """
    slots_M = cache_N[written_N]
    assert bool((slots_M >= block_size).all()), f"a row writes to the null block: slots {slots_M.tolist()}"
    assert slots_M.unique().numel() == slots_M.numel(), f"two rows write one cache slot: {slots_M.tolist()}"


def decode_block(
    state: SlotState,
    slots_R: torch.Tensor,
    verify_len: int,
    *,
    limit_1: torch.Tensor | None = None,
    pieces: PieceRows | None = None,
) -> DecodeBlock:
    """Read the rows' drafts; k = min(verify_len, draft_count, max_len - 2 - committed_len), 0 for finished rows.

    max_len - 2 - committed_len: the request holds committed_len + 1 tokens and the verify always adds one of its own,
    so a longer draft could never be emitted. limit_1: a smaller verify_len than the program's width, on the device.
    pieces: of prompts, in rows that are none.
    """
    committed_R = state.committed_len[slots_R]
    finished_R = state.finished[slots_R]
    k_R = torch.minimum(state.draft_count[slots_R], state.max_len[slots_R] - 2 - committed_R)
    k_R = k_R.clamp(0, verify_len).masked_fill(finished_R, 0)
    if limit_1 is not None:
        k_R = torch.minimum(k_R, limit_1)
    block = DecodeBlock(
        slots_R=slots_R,
        drafts_RK=state.draft_tokens[slots_R, :verify_len],
        k_R=k_R,
        committed_R=committed_R,
        finished_R=finished_R,
        last_R=state.last_token[slots_R],
    )
    return block if pieces is None else with_pieces(block, pieces)


class InputBuilder:
    """Makes ForwardInputs. Context lengths are padded to multiples of `context_bucket`, so shapes repeat from step to
    step; fixed_shapes: to the longest possible one, so that nothing depends on the step."""

    def __init__(
        self, config: EngineConfig, state: SlotState, device: torch.device, *, fixed_shapes: bool = False
    ) -> None:
        self._state = state
        self._fixed_shapes = fixed_shapes
        self._block_size = config.block_size
        self._bucket = config.context_bucket
        self._max_columns = config.max_blocks_per_seq
        self._debug_checks = config.debug_checks
        self._device = device

    def target_inputs(
        self, decode: DecodeBlock | None, prefill: tuple[PrefillChunk, ...], *, has_pieces: bool = False
    ) -> ForwardInputs:
        """T's inputs: `[last_token, draft_1..draft_K]` per decode row, then the prompt chunks.

        has_pieces: decode rows may be pieces of prompts.
        """
        ids: list[torch.Tensor] = []
        positions: list[torch.Tensor] = []
        cache: list[torch.Tensor] = []
        written: list[torch.Tensor] = []
        groups: list[AttentionGroup] = []
        if decode is not None:
            ids_RQ, positions_RQ, cache_RQ, written_RQ = self._decode_rows(decode)
            ids.append(ids_RQ.flatten())
            positions.append(positions_RQ.flatten())
            cache.append(cache_RQ.masked_fill(~written_RQ, 0).flatten())
            written.append(written_RQ.flatten())
            num_rows, width = ids_RQ.shape
            groups.append(
                self.group(
                    first_row=0,
                    slots_R=decode.slots_R,
                    q_lens=(width,) * num_rows,
                    q_start_R=decode.committed_R,
                    kv_len_R=decode.committed_R + decode.k_R + 1,
                    causal=True,
                    has_filler=True,
                    shares_keys=has_pieces,
                )
            )
        if prefill:
            first_row = sum(g.q_lens[0] * len(g.q_lens) for g in groups)
            chunk_ids, chunk_positions, chunk_cache, group = self._prefill_rows(prefill, first_row)
            ids.append(chunk_ids)
            positions.append(chunk_positions)
            cache.append(chunk_cache)
            written.append(torch.ones_like(chunk_cache, dtype=torch.bool))
            groups.append(group)
        cache_N = torch.cat(cache)
        if self._debug_checks:
            assert_owned(cache_N, torch.cat(written), self._block_size)
        context = AttentionContext(slot_mapping_N=cache_N, groups=tuple(groups))
        return ForwardInputs(ids_N=torch.cat(ids), positions_N=torch.cat(positions), context=context)

    def draft_inputs(
        self, slots_R: torch.Tensor, last_R: torch.Tensor, live_R: torch.Tensor, width: int, mask_id: int, limit: int
    ) -> ForwardInputs:
        """D's drafter inputs: `[last_token, MASK x (W-1)]` at committed_len .. committed_len+W-1, non-causal.

        Rows that are not live write to the null block. limit: the drafter's position table; live rows never pass it.
        """
        committed_R = self._state.committed_len[slots_R]
        columns_W = torch.arange(width, device=self._device)
        ids_RW = torch.full((slots_R.shape[0], width), mask_id, dtype=torch.int64, device=self._device)
        ids_RW[:, 0] = last_R
        positions_RW = (committed_R[:, None] + columns_W).clamp(max=limit - 1)
        cache_RW = cache_slots(self._state, slots_R, positions_RW, self._block_size)
        if self._debug_checks:
            assert_owned(cache_RW, live_R[:, None].expand_as(cache_RW), self._block_size)
        cache_RW = cache_RW.masked_fill(~live_R[:, None], 0)
        group = self.group(
            first_row=0,
            slots_R=slots_R,
            q_lens=(width,) * slots_R.shape[0],
            q_start_R=committed_R,
            kv_len_R=torch.where(live_R, committed_R + width, torch.ones_like(committed_R)),
            causal=False,
        )
        context = AttentionContext(slot_mapping_N=cache_RW.flatten(), groups=(group,))
        return ForwardInputs(ids_N=ids_RW.flatten(), positions_N=positions_RW.flatten(), context=context)

    def _decode_rows(self, decode: DecodeBlock) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """(ids, positions, cache slots, which of them are written), each [R, K+1]."""
        assert decode.last_R is not None
        last_R1 = decode.last_R[:, None]
        ids_RQ = torch.cat([last_R1, decode.drafts_RK], dim=1)
        columns_Q = torch.arange(ids_RQ.shape[1], device=self._device)
        filler_RQ = columns_Q > decode.k_R[:, None]
        # A column past k holds a valid id at a valid position; it is not written and nobody reads its logits.
        ids_RQ = torch.where(filler_RQ, last_R1, ids_RQ)
        positions_RQ = decode.committed_R[:, None] + torch.minimum(columns_Q, decode.k_R[:, None])
        cache_RQ = cache_slots(self._state, decode.slots_R, positions_RQ, self._block_size)
        return ids_RQ, positions_RQ, cache_RQ, ~(filler_RQ | decode.finished_R[:, None])

    def _prefill_rows(
        self, prefill: tuple[PrefillChunk, ...], first_row: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, AttentionGroup]:
        device = self._device
        ids = upload([t for c in prefill for t in c.token_ids], device)
        positions = torch.cat([torch.arange(c.start, c.start + len(c.token_ids), device=device) for c in prefill])
        lens = upload([len(c.token_ids) for c in prefill], device)
        slots = upload([c.slot for c in prefill], device)
        starts = upload([c.start for c in prefill], device)
        row_slots = slots.repeat_interleave(lens, output_size=ids.shape[0])
        cache = cache_slots(self._state, row_slots, positions[:, None], self._block_size).flatten()
        group = self.group(
            first_row=first_row,
            slots_R=slots,
            q_lens=tuple(len(c.token_ids) for c in prefill),
            q_start_R=starts,
            kv_len_R=starts + lens,
            causal=True,
        )
        return ids, positions, cache, group

    def group(
        self,
        *,
        first_row: int,
        slots_R: torch.Tensor,
        q_lens: tuple[int, ...],
        q_start_R: torch.Tensor,
        kv_len_R: torch.Tensor,
        causal: bool,
        has_filler: bool = False,
        shares_keys: bool = False,
        table_RB: torch.Tensor | None = None,
    ) -> AttentionGroup:
        """table_RB: the slots' block tables where somebody has gathered them, all columns."""
        longest = self._state.longest_table * self._block_size
        if self._fixed_shapes:
            longest = self._max_columns * self._block_size
        elif kv_len_R.device.type == "cpu":  # the exact length, where reading it costs nothing
            exact = int(kv_len_R.max())
            assert exact <= longest, f"a row reads {exact} positions, its block table holds {longest}"
            longest = exact
        if self._debug_checks and causal and not has_filler:
            ends_R = q_start_R + torch.tensor(q_lens, device=q_start_R.device)
            assert bool((kv_len_R >= ends_R).all()), "queries past their keys in a group that says it has none"
        padded = -(-longest // self._bucket) * self._bucket
        columns = min(-(-padded // self._block_size), self._max_columns)
        return AttentionGroup(
            first_row=first_row,
            q_lens=q_lens,
            q_start_R=q_start_R,
            kv_len_R=kv_len_R,
            block_table_RB=self._state.block_table[slots_R, :columns] if table_RB is None else table_RB[:, :columns],
            max_kv_len=columns * self._block_size,
            causal=causal,
            has_filler=has_filler,
            shares_keys=shares_keys,
        )
