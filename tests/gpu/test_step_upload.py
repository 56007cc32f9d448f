"""Uploads that the first kernel of T takes from host memory, and results that D writes there: what lies where."""

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from msgspec import structs

from engine import SamplingParams
from engine.kernels.row_state import ENTRIES, NUMBER_AT, PLACE_AT, HostResults
from engine.request import EngineRequest
from engine.runner.batch import InputBuilder, decode_block
from engine.runner.fused_rows import FusedRows
from engine.runner.results import NUM_COUNTS, ResultRing
from engine.runner.slots import SlotState
from engine.runner.step_upload import ProgramShape, StepUpload, fits
from engine.sampling.verify import verify
from engine.step import BlockTableUpdate
from tests.engine.fake_runner import make_config
from tests.engine.test_decode_programs import build
from tests.gpu.places import places
from tests.gpu.test_decode_graphs import exact_float32, models  # noqa: F401  (fixtures)

pytest.importorskip("triton", reason="the package triton is not installed")

BLOCK_SIZE, WIDTH = 4, 3
SHAPES = tuple(ProgramShape(num_rows=rows, width=WIDTH, takes_pieces=rows > 1) for rows in (1, 2, 5))


class Steps:
    """Random decode steps of several shapes, by the kernels and by the torch forms on a state of their own."""

    def __init__(self, device: str, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.device = torch.device(device)
        config = make_config(max_num_seqs=5, block_size=BLOCK_SIZE)
        self.config = replace(config, max_draft_len=WIDTH, debug_checks=False)
        self.state, self.other = (SlotState(self.config, self.device, fixed_shapes=True) for _ in range(2))
        for name, value in self.random_state().items():
            for state in (self.state, self.other):
                getattr(state, name)[:5] = value
        self.builder = InputBuilder(self.config, self.state, self.device, fixed_shapes=True)
        self.fused = FusedRows(self.config, self.state, self.builder)
        self.upload = StepUpload(SHAPES, self.state, self.device, from_host=True)

    def integers(self, low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=self.generator).to(self.device)

    def random_state(self) -> dict[str, torch.Tensor]:
        columns = self.config.max_blocks_per_seq
        return {
            "committed_len": self.integers(3, (columns - 8) * BLOCK_SIZE, 5),
            "last_token": self.integers(0, 50, 5),
            "draft_tokens": self.integers(0, 50, 5, WIDTH),
            "draft_count": self.integers(0, WIDTH + 1, 5),
            "finished": self.integers(0, 5, 5) == 0,
            "max_len": torch.full((5,), columns * BLOCK_SIZE, device=self.device),
            "block_table": self.integers(1, 99, 5, columns),
        }

    def updates(self, slots: list[int]) -> list[BlockTableUpdate]:
        """New blocks around where the rows are: they count in this very step."""
        changed = []
        for slot in slots:
            first = int(self.state.committed_len[slot]) // BLOCK_SIZE
            blocks = tuple(self.integers(100, 200, int(self.integers(0, 5, 1))).tolist())
            if blocks:
                changed.append(BlockTableUpdate(slot=slot, first_index=first, block_ids=blocks))
        return changed

    def run(self, shape: ProgramShape, place: int) -> tuple[list[int], int, Any, Any, Any]:
        """One step's (slots, limit, and of the kernels: rows, inputs, upload)."""
        slots = torch.randperm(5, generator=self.generator)[: int(self.integers(1, shape.num_rows + 1, 1))].tolist()
        limit, updates = int(self.integers(0, WIDTH + 1, 1)), self.updates(slots)
        assert fits(updates, slots)
        self.other.write_table(updates)
        self.upload.send(shape, limit=limit, slots=slots, updates=updates, place=place)
        host = self.upload.host(shape)
        decode, inputs = self.fused.host_inputs(host, WIDTH)
        return slots, limit, decode, inputs, host


@pytest.mark.parametrize(("seed", "device"), places([0, 1, 2], [0]))
def test_steps_in_turn(seed: int, device: str) -> None:
    steps = Steps(device, seed)
    for number, shape in enumerate(itertools.islice(itertools.cycle((*SHAPES, *SHAPES[::-1])), 4 * ENTRIES)):
        slots, limit, decode, inputs, host = steps.run(shape, 70 + number)
        rows, filler = len(slots), steps.state.filler_slot
        padded = torch.tensor(slots + [filler] * (shape.num_rows - rows), device=device)
        assert torch.equal(decode.slots_R, padded)
        assert host.numbers_C[[NUMBER_AT, PLACE_AT]].tolist() == [number, 70 + number]
        assert int(host.number_1) == number + 1
        assert host.size_R is None or not host.size_R.any()
        assert torch.equal(steps.state.block_table, steps.other.block_table)
        want = decode_block(steps.other, padded, WIDTH, limit_1=torch.tensor([limit], device=device))
        own = steps.builder.target_inputs(want, ())
        for name in ("drafts_RK", "k_R", "committed_R", "finished_R"):
            assert torch.equal(getattr(decode, name), getattr(want, name)), name
        assert torch.equal(inputs.ids_N, own.ids_N) and torch.equal(inputs.positions_N, own.positions_N)
        assert torch.equal(inputs.context.slot_mapping_N, own.context.slot_mapping_N)
        (group,), (own_group,) = inputs.context.groups, own.context.groups
        assert group.block_table_RB.shape == own_group.block_table_RB.shape
        # As far as the rows, their drafts and the drafter's block may look.
        columns = (decode.committed_R + WIDTH + 1 + steps.config.block_width) // BLOCK_SIZE + 1
        seen = torch.arange(group.block_table_RB.shape[1], device=device) < columns[:, None]
        assert torch.equal(group.block_table_RB[seen], own_group.block_table_RB[seen])
        assert group.block_table_RB.min() >= 0


@pytest.mark.parametrize(("seed", "device"), places([3], [3]))
def test_programs_that_are_recorded_run_as_often_as_they_like(seed: int, device: str) -> None:
    steps = Steps(device, seed)
    for shape in SHAPES:
        steps.upload.send_filler(shape)
        for _ in range(ENTRIES + 2):
            decode, _ = steps.fused.host_inputs(steps.upload.host(shape), WIDTH)
            assert set(decode.slots_R.tolist()) == {steps.state.filler_slot} and not decode.k_R.any()
    steps.upload.resume()
    slots, _, decode, _, host = steps.run(SHAPES[2], 9)
    assert decode.slots_R[: len(slots)].tolist() == slots and host.numbers_C[[NUMBER_AT, PLACE_AT]].tolist() == [0, 9]


@pytest.mark.parametrize(("seed", "device"), places([0, 1], [0]))
def test_results_lie_where_the_upload_says(seed: int, device: str) -> None:
    steps = Steps(device, seed)
    ring = ResultRing(num_rows=5, num_columns=WIDTH + 1, device=steps.device)
    for shape in (SHAPES[2], SHAPES[1], SHAPES[2], SHAPES[2]):
        entry, width = ring.take(), NUM_COUNTS + WIDTH + 1
        number = steps.upload.number
        slots, _, decode, _, host = steps.run(shape, entry.place)
        place = entry.expect(len(slots), width, number)
        drawn_N = steps.integers(0, 50, shape.num_tokens)
        peak_N = torch.zeros(shape.num_tokens, device=device)
        results = HostResults(memory=ring.memory, numbers_C=host.numbers_C, num_rows=shape.num_rows)
        before, state = ring.memory.clone(), steps.state
        want = verify(
            target_RK1=drawn_N.view(-1, WIDTH + 1),
            draft_RK=decode.drafts_RK,
            k_R=decode.k_R,
            committed_R=decode.committed_R,
            max_len_R=state.max_len[decode.slots_R],
            min_len_R=state.min_len[decode.slots_R],
            stop_ids_RS=state.stop_ids[decode.slots_R],
            finished_R=decode.finished_R,
            valid_RK1=drawn_N.view(-1, WIDTH + 1) >= 0,
        )
        made = steps.fused.commit(decode.slots_R, decode.fused, drawn_N, peak_N, WIDTH, None, results=results)
        entry.clock.stop()
        entry.clock.wait()
        assert made.packed is None
        counts = torch.stack([want.num_emitted_R, want.num_accepted_R, decode.k_R, want.finish_R], dim=1)
        packed = torch.cat([counts, drawn_N.view(-1, WIDTH + 1)], dim=1).tolist()
        assert entry.read(place) == packed[: len(slots)]
        changed = (ring.memory != before).nonzero().flatten().tolist()
        assert all(entry.place <= at <= entry.place + shape.num_rows * width for at in changed)
        steps.other.committed_len.copy_(state.committed_len)
        with pytest.raises(AssertionError, match="upload"):
            entry.read(structs.replace(place, number=number + 1))


def test_what_an_upload_has_no_room_for() -> None:
    def update(slot: int, num: int) -> BlockTableUpdate:
        return BlockTableUpdate(slot=slot, first_index=0, block_ids=tuple(range(num)))

    assert fits([update(1, 4), update(2, 1)], (2, 3, 1)) and fits([], (1,))
    assert not fits([update(1, 5)], (1, 2))
    assert not fits([update(3, 1)], (1, 2)), "a slot without a row"
    assert not fits([update(1, 1), update(1, 1)], (1, 2))


@pytest.mark.gpu
@pytest.mark.parametrize("depth", [0, 1])
def test_engines_of_one_process_take_turns(models: Any, depth: int) -> None:  # noqa: F811
    """Greedy and drawn requests, few and many at once, in two engines whose steps alternate; aborts in flight."""
    generator = torch.Generator().manual_seed(6)
    prompts = [torch.randint(0, 256, (n,), generator=generator).tolist() for n in (5, 23, 40, 3, 17, 30, 9, 12)]
    params = [
        SamplingParams(temperature=0.8 * (i % 3 == 2), seed=i, max_tokens=30 - 3 * i, ignore_eos=True) for i in range(8)
    ]
    with build(models, "eager", block_size=16) as llm:
        want = [list(o.outputs[0].token_ids) for o in llm.generate(prompts, params)]
    options = {"device": "cuda", "block_size": 16, "pipeline_depth": depth}
    with build(models, "graphs", **options) as first, build(models, "graphs", **options) as second:
        found: list[dict[str, list[int]]] = [{}, {}]
        for turn in range(400):
            for llm, own in zip((first, second), found, strict=True):
                core, number = llm.core, turn // 3
                if turn % 3 == 0 and number < len(prompts):
                    for name in (str(number), f"aborted {number}"):
                        core.add_request(
                            EngineRequest(
                                request_id=name, prompt_token_ids=tuple(prompts[number]), params=params[number]
                            )
                        )
                        own[name] = []
                if turn % 3 == 2 and number < len(prompts):
                    core.abort(f"aborted {number}")
                if core.has_work():
                    for delta in core.step():
                        own[delta.request_id] += delta.token_ids
        for llm, own in zip((first, second), found, strict=True):
            assert not llm.core.has_work()
            llm.core.check_integrity()
            assert [own[str(i)] for i in range(len(prompts))] == want
            programs = llm._rank.runner._decode_programs
            host = programs.upload.host(next(iter(programs._pairs.values())).shape)
            assert int(host.number_1) == programs.upload.number, "each upload was taken once"


@pytest.mark.gpu
def test_an_engine_that_ends_with_steps_in_flight_spoils_nobody(models: Any) -> None:  # noqa: F811
    """Its host memory is another's only when the device has done with it."""
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    with build(models, "eager", block_size=16) as llm:
        want = llm.generate([[5, 6, 7]], params)[0].outputs[0].token_ids
    options = {"device": "cuda", "block_size": 16, "pipeline_depth": 1}
    for _ in range(3):
        with build(models, "graphs", **options) as llm:
            llm.core.add_request(EngineRequest(request_id="r", prompt_token_ids=(1, 2, 3), params=params))
            for _ in range(6):
                llm.core.step()
        with build(models, "graphs", **options) as other:
            assert other.generate([[5, 6, 7]], params)[0].outputs[0].token_ids == want
