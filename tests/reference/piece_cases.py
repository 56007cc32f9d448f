"""Decode rows and pieces of prompts in one program: random ones, and what becomes of each, told row by row."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from engine.config.engine import EngineConfig
from engine.kernels.row_state import HEADER, LENGTH_AT, LIMIT_AT, HostUpload, PieceRows
from engine.parallel.tp_group import TpGroup
from engine.runner.batch import DecodeBlock, ForwardInputs, InputBuilder, decode_block
from engine.runner.decode_programs import Variant
from engine.runner.draft_program import DecideAndDraft, Decision
from engine.runner.fused_rows import FusedRows
from engine.runner.slots import SlotState
from engine.runner.step_upload import ProgramShape, StepUpload
from engine.runner.target_program import TargetStep
from engine.step import Finish
from tests.engine.fake_runner import VOCAB_SIZE, make_config

BLOCK_SIZE = 4
NUM_SLOTS = 24
POSITIONS = 40  # of the drafter: some rows are past them


class Case:
    """State, rows and logits of one step at width K; equal for equal arguments, so that it can be run twice."""

    def __init__(self, width: int, device: str, *, seed: int, synthetic: float | None = None) -> None:
        generator = torch.Generator().manual_seed(seed)

        def integers(low: int, high: int, *shape: int) -> Tensor:
            return torch.randint(low, high, shape, generator=generator).to(device)

        self.width, self.device = width, torch.device(device)
        config = make_config(max_num_seqs=NUM_SLOTS, block_size=BLOCK_SIZE, synthetic_acceptance_length=synthetic)
        drafter = replace(config.drafter, max_position_embeddings=POSITIONS)
        # Rows of one prompt lie anywhere here, which the checks forbid.
        self.config: EngineConfig = replace(config, drafter=drafter, max_draft_len=width, debug_checks=False)
        self.state = state = SlotState(self.config, self.device, fixed_shapes=True)
        filler = state.filler_slot
        state.committed_len[:filler] = integers(5, 45, filler)
        state.last_token[:filler] = integers(0, VOCAB_SIZE, filler)
        state.draft_tokens[:filler] = integers(0, 4, filler, state.draft_tokens.shape[1])
        state.draft_count[:filler] = integers(0, width + 1, filler)
        state.finished[:filler] = integers(0, 6, filler) == 0
        state.max_len[:filler] = state.committed_len[:filler] + integers(1, width + 5, filler)
        state.min_len[:filler] = state.committed_len[:filler] + integers(-3, width, filler)
        state.stop_ids[:filler, :2] = torch.where(integers(0, 2, filler, 2) == 0, integers(0, 6, filler, 2), -1)
        state.seed[:filler] = integers(0, 99, filler)
        blocks = torch.randperm(filler * state.block_table.shape[1], generator=generator) + 1
        state.block_table[:filler] = blocks.view(filler, -1).to(device)

        Q = width + 1
        order = torch.randperm(filler, generator=generator).tolist()
        decode, ends, middle = order[:6], order[6:14], order[14:17]
        sizes = [0] * 6 + [-int(integers(1, Q + 1, 1)) for _ in ends]
        slots = [*decode, *ends]
        for slot in [*ends[:4], *middle]:  # several pieces of one prompt, whole ones but for the last
            count = int(integers(1, 4, 1))
            slots += [slot] * count
            sizes += [Q] * (count - 1) + [int(integers(1, Q + 1, 1)) if slot in middle else Q]
        slots += [filler] * 3
        sizes += [0] * 3
        num_rows = len(slots)
        starts = integers(0, 40, num_rows)
        for row, size in enumerate(sizes):
            if size < 0:  # near the prompt's limits, where one token may be the last, or too short to stop
                state.max_len[slots[row]] = starts[row] - size + int(integers(1, 3, 1))
                state.min_len[slots[row]] = starts[row] - size + int(integers(-1, 3, 1))
                state.finished[slots[row]] = (
                    int(integers(0, 2, 1)) == 0
                )  # what an earlier owner left counts for nothing
        self.slots_R = torch.tensor(slots, device=device)
        self.limit_1 = torch.tensor([width], device=device)
        # As in an upload: what is no token of a piece may be any number.
        ids_RQ = integers(10**6, 10**7, num_rows, Q)
        for row, size in enumerate(sizes):
            ids_RQ[row, : abs(size)] = integers(0, VOCAB_SIZE, abs(size))
        starts[torch.tensor(sizes, device=device) == 0] = 10**7
        self.pieces = PieceRows(size_R=torch.tensor(sizes, device=device), start_R=starts, ids_RQ=ids_RQ)
        logits_NV = torch.randn(num_rows * Q, VOCAB_SIZE, generator=generator)
        logits_NV[:, :6] += 4.0  # stop ids and drafts are often right
        logits_NV[torch.rand(num_rows * Q, generator=generator) < 0.08, 3] = torch.nan
        self.logits_NV = logits_NV.to(device)

    @property
    def sizes(self) -> list[int]:
        return self.pieces.size_R.tolist()

    def inputs(self, *, fused: bool) -> tuple[DecodeBlock, ForwardInputs]:
        """T's inputs, by the torch forms or the kernel."""
        builder = InputBuilder(self.config, self.state, self.device, fixed_shapes=True)
        if fused:
            return FusedRows(self.config, self.state, builder).host_inputs(self.upload(), self.width)
        decode = decode_block(self.state, self.slots_R, self.width, limit_1=self.limit_1, pieces=self.pieces)
        return decode, builder.target_inputs(decode, ())

    def upload(self) -> HostUpload:
        """The rows as the host would have written them for the next run of T's first kernel."""
        R = len(self.sizes)
        shape = ProgramShape(num_rows=R, width=self.width, takes_pieces=True)
        host = StepUpload([shape], self.state, self.device, from_host=True).host(shape)
        assert host is not None
        entry = host.entries_EC[0]
        entry[LIMIT_AT], entry[LENGTH_AT] = self.width, shape.length
        entry[HEADER : HEADER + R] = self.slots_R
        pieces = [self.pieces.size_R, self.pieces.start_R, self.pieces.ids_RQ.flatten()]
        entry[shape.first_size : shape.length] = torch.cat(pieces)
        return host

    def decide(self, variant: Variant, *, fused: bool) -> tuple[Decision, tuple[Tensor, Tensor]]:
        """The decision, and the positions and cache slots that the drafter's context was written for."""
        decode, inputs = self.inputs(fused=fused)
        builder = InputBuilder(self.config, self.state, self.device, fixed_shapes=True)
        fed: list[tuple[Tensor, Tensor]] = []

        def feed_context(taps: Any, positions_N: Tensor, slots_N: Tensor, kv: Any) -> None:
            fed.append((positions_N, slots_N))

        drafter: Any = SimpleNamespace(config=self.config.drafter, feed_context=feed_context)
        target: Any = SimpleNamespace(vocab_start=0)
        nothing: Any = None
        program = DecideAndDraft(
            config=self.config,
            target=target,
            drafter=drafter,
            kv=nothing,
            state=self.state,
            builder=builder,
            tp=TpGroup.solo(),
            fused=FusedRows(self.config, self.state, builder) if fused else None,
        )
        step = TargetStep(inputs=inputs, logits_MV=self.logits_NV, taps_NTH=self.logits_NV[:, None])
        decode = replace(decode, size_R=self.pieces.size_R)
        decision = program.decide(step, decode, (), self.width, variant.value)
        assert decision is not None
        program.write_context(step, decision, len(self.sizes), self.width)
        return decision, fed[0]

    def written(self) -> list[Tensor]:
        """What a step may change."""
        state = self.state
        return [state.committed_len.clone(), state.last_token.clone(), state.finished.clone()]

    def cache_slot(self, slot: int, position: int) -> int:
        block = int(self.state.block_table[slot, position // BLOCK_SIZE])
        return block * BLOCK_SIZE + position % BLOCK_SIZE


def check_inputs(case: Case, inputs: ForwardInputs) -> None:
    """T's rows of pieces hold their tokens, at their positions, and the K/V of these alone are written."""
    Q = case.width + 1
    group = inputs.context.groups[0]
    for row, size in enumerate(case.sizes):
        if size == 0:
            continue
        start, num = int(case.pieces.start_R[row]), abs(size)
        of_row = slice(row * Q, row * Q + num)
        assert inputs.ids_N[of_row].tolist() == case.pieces.ids_RQ[row, :num].tolist()
        assert inputs.positions_N[of_row].tolist() == list(range(start, start + num))
        places = [case.cache_slot(int(case.slots_R[row]), start + j) for j in range(num)]
        assert inputs.context.slot_mapping_N[of_row].tolist() == places
        filler = slice(row * Q + num, row * Q + Q)
        assert not inputs.context.slot_mapping_N[filler].any()
        assert (inputs.ids_N[filler] < VOCAB_SIZE).all() and (inputs.positions_N[filler] < start + num).all()
        assert (int(group.q_start_R[row]), int(group.kv_len_R[row])) == (start, start + num)


def check_decision(
    case: Case, before: list[Tensor], decision: Decision, packed: Tensor, fed: tuple[Tensor, Tensor]
) -> set[Finish]:
    """Pieces decide what they should, by their last column alone; greedy. Returns the kinds of ends among them."""
    Q, filler, ends = case.width + 1, case.state.filler_slot, set()
    committed, last, finished = case.written()
    touched = set(case.slots_R[case.pieces.size_R <= 0].tolist())
    for slot in set(range(filler)) - touched:
        assert [int(x[slot]) for x in (committed, last, finished)] == [int(x[slot]) for x in before]
    assert (int(committed[filler]), bool(finished[filler])) == (0, True)
    positions_N, slots_N = fed
    for row, size in enumerate(case.sizes):
        if size == 0:
            continue
        slot, num = int(case.slots_R[row]), abs(size)
        end = int(case.pieces.start_R[row]) + num
        for column in range(Q):
            place, position = int(slots_N[row * Q + column]), end - num + column
            if column < num and position < POSITIONS:
                assert place == case.cache_slot(slot, position)
                assert int(positions_N[row * Q + column]) == position
            else:
                assert place == 0
        if size > 0:
            continue
        logits_V = case.logits_NV[row * Q + num - 1]
        if not torch.isfinite(logits_V).all():
            want, token, finish = 0, 0, Finish.ERROR
        else:
            want, token, finish = 1, int(logits_V.argmax()), Finish.NONE
            if end + 1 >= int(case.state.max_len[slot]):
                finish = Finish.LENGTH
            if token in case.state.stop_ids[slot].tolist() and end >= int(case.state.min_len[slot]):
                finish = Finish.STOP
        ends.add(finish)
        assert packed[row, :4].tolist() == [want, 0, 0, int(finish)]
        assert (int(committed[slot]), bool(finished[slot])) == (end - 1 + want, finish != Finish.NONE)
        if want:
            assert int(packed[row, 4]) == int(last[slot]) == token
    assert int(decision.num_emitted_S[case.pieces.size_R > 0].sum()) == 0
    return ends
