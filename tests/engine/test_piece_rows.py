"""Pieces of prompts as rows: how chunks are cut, which steps take them, and what the torch forms make of them."""

import random

import numpy as np
import pytest
import torch

from engine.row_buckets import row_buckets
from engine.runner.decode_programs import Variant, program_shapes
from engine.runner.pieces import may_mix, most_rows, num_pieces, saves_time, write_pieces
from engine.runner.results import pack
from engine.runner.slots import SlotTraits
from engine.runner.step_upload import StepUpload
from engine.step import Finish, PrefillChunk, StepPlan
from tests.engine.fake_runner import make_config
from tests.reference.piece_cases import Case, check_decision, check_inputs


def chunk(slot: int, start: int, num: int, samples: bool = True, **more) -> PrefillChunk:
    return PrefillChunk(slot=slot, start=start, token_ids=tuple(range(100, 100 + num)), samples=samples, **more)


@pytest.mark.parametrize("width", [1, 2, 7])
def test_chunks_are_cut_into_rows_that_hold_every_token_once(width):
    rng = random.Random(width)
    for _ in range(30):
        prefill = [
            chunk(slot, rng.randrange(50), rng.randrange(1, 30), rng.random() < 0.6)
            for slot in range(rng.randrange(1, 6))
        ]
        first, used = rng.randrange(4), num_pieces(prefill, width)
        rows = first + used + 2
        slots, size, start = np.full(rows, -9), np.zeros(rows, dtype=np.int64), np.full(rows, -9)
        ids = np.full((rows, width + 1), -9)
        write_pieces(prefill, first, slots, size, start, ids)
        assert not size[:first].any() and not size[first + used :].any() and size[first : first + used].all()
        assert (slots[:first] == -9).all() and (slots[first + used :] == -9).all()
        found = {
            (int(slots[row]), int(start[row]) + j): int(ids[row, j])
            for row in range(rows)
            for j in range(abs(size[row]))
        }
        assert found == {(c.slot, c.start + j): token for c in prefill for j, token in enumerate(c.token_ids)}
        assert int(abs(size).sum()) == len(found)
        ends = [c for c in prefill if c.samples]
        assert slots[first : first + len(ends)].tolist() == [c.slot for c in ends]
        last = [c.start + len(c.token_ids) for c in ends]
        assert (start - size)[first : first + len(ends)].tolist() == last
        assert (size < 0).nonzero()[0].tolist() == list(range(first, first + len(ends)))


def test_which_steps_may_be_mixed():
    def plan(**changes) -> StepPlan:
        values = dict(step_id=1, verify_len=3, draft_len=7, decode_slots=(0, 1), prefill=(chunk(2, 16, 20),))
        return StepPlan(**(values | changes))

    assert may_mix(plan(), int(SlotTraits.FILTERS | SlotTraits.MASKS_STOPS))
    assert may_mix(plan(verify_len=0, prefill=(chunk(2, 0, 9, samples=False), chunk(3, 4096, 1))), 0)
    assert may_mix(plan(decode_slots=(), verify_len=0, prefill=(chunk(2, 0, 9), chunk(3, 0, 5, samples=False))), 0)
    assert not may_mix(plan(), int(SlotTraits.LOGPROBS)) and not may_mix(plan(), int(SlotTraits.RULES))
    for changes in (
        {"decode_slots": ()},
        {"prefill": ()},
        {"draft_len": 0, "verify_len": 0},
        {"report_drafts": True},
        {"prefill": (chunk(2, 4097, 20),)},
        {"prefill": (chunk(2, 0, 3), chunk(3, 0, 20, scored_next=(5,)))},
    ):
        assert not may_mix(plan(**changes), 0), changes


def test_filler_columns_may_cost_what_another_program_would():
    def plan(*sizes: int, draft_len: int = 7) -> StepPlan:
        prefill = tuple(chunk(2, 0, size) for size in sizes)
        return StepPlan(step_id=1, verify_len=0, draft_len=draft_len, decode_slots=(0,), prefill=prefill)

    for decode, draft_len, rows in ((4, 7, 48), (16, 7, 48), (32, 7, 64), (4, 15, 24), (16, 15, 32), (32, 15, 48)):
        assert saves_time(plan(256, draft_len=draft_len), rows, decode)
    assert not saves_time(plan(512), 96, 1)  # 65 rows are needed
    assert saves_time(plan(256, 256), 96, 1)


def test_programs_of_mixed_steps():
    """They begin at two rows, end at what holds 512 tokens beside a full batch, and are few."""
    config = make_config(max_num_seqs=128, width=16)
    shapes = program_shapes(config)
    of_width = {k: [s for s in shapes if s.width == k] for k in config.draft_len_choices}
    assert [s.num_rows for s in of_width[0]] == list(row_buckets(128)) and not any(s.takes_pieces for s in of_width[0])
    for k in config.draft_len_choices[1:]:
        rows = [s.num_rows for s in of_width[k]]
        assert set(row_buckets(128)) < set(rows) and rows[-1] == most_rows(128, k) == 128 + 512 // (k + 1)
        assert [s.num_rows for s in of_width[k] if s.takes_pieces] == rows[1:]
    assert len(shapes) < 1.2 * len(config.draft_len_choices) * len(row_buckets(128))
    chained = make_config(use_rejection_sampling=True, draft_sampling="probabilistic")
    assert not any(s.takes_pieces for s in (*program_shapes(chained), *program_shapes(make_config(max_num_seqs=1))))


def test_an_upload_brings_the_pieces_behind_the_rest():
    config = make_config(max_num_seqs=6)
    state = Case(3, "cpu", seed=0).state
    shapes = program_shapes(config)
    upload = StepUpload(shapes, state, torch.device("cpu"))
    for shape in shapes:
        if not shape.takes_pieces or shape.num_rows < 5:
            continue
        Q, n = shape.width + 1, 2 * shape.width + 3
        upload.send(shape, limit=1, slots=(4,), prefill=(chunk(2, 8, n), chunk(3, 0, 1, samples=False)))
        pieces = upload.pieces(shape)
        slots = [4, 2, 2, 2, 3] + [state.filler_slot] * (shape.num_rows - 5)
        assert upload.slots_R(shape).tolist() == slots and upload.limit_1.tolist() == [1]
        assert pieces.size_R.tolist() == [0, -1, Q, Q, 1] + [0] * (shape.num_rows - 5)
        assert pieces.start_R[1:5].tolist() == [8 + 2 * Q, 8, 8 + Q, 0]
        assert pieces.ids_RQ[1, 0] == 100 + 2 * Q and pieces.ids_RQ[2:4].flatten().tolist() == list(
            range(100, 100 + 2 * Q)
        )
        assert pieces.ids_RQ.shape == (shape.num_rows, Q) and pieces.ids_RQ.is_contiguous()
        places_U, block_ids_U = upload.table_changes(shape)
        assert set(places_U.tolist()) == {state.filler_slot * state.block_table.shape[1]} and not block_ids_U.any()
        upload.send(shape, limit=0, slots=(4, 5))
        assert not pieces.size_R.any()


def test_rows_that_a_program_does_not_have_reach_no_table():
    state = Case(3, "cpu", seed=0).state
    shapes = program_shapes(make_config(max_num_seqs=6))
    upload = StepUpload(shapes, state, torch.device("cpu"))
    for shape in shapes:
        with pytest.raises(AssertionError, match=f"in a program of {shape.num_rows}"):
            upload.send(shape, limit=0, slots=(1,) * (shape.num_rows + 1))


@pytest.mark.parametrize("width", [1, 3, 7])
def test_the_torch_forms_against_the_rows_one_by_one(width):
    ends = set()
    for seed in range(12):
        case = Case(width, "cpu", seed=seed)
        check_inputs(case, case.inputs(fused=False)[1])
        before = case.written()
        decision, fed = case.decide(Variant.GREEDY, fused=False)
        ends |= check_decision(case, before, decision, pack(decision), fed)
    assert ends == set(Finish)
