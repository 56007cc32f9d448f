"""Law: the layers of a model as one call give what they give one by one, bit for bit, in output, taps and cache."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from engine.layers import cpu_jit
from engine.layers.cpu_jit import unavailable_reason
from engine.layers.cpu_program import TeamProgram
from engine.layers.cpu_rows import float_bits, row_kernels
from engine.layers.cpu_rows_job import NormWord
from engine.models.cpu_context import CpuContext
from engine.models.cpu_stack import MAX_ROWS, CpuStacks
from tests.reference.paged import PagedModels, Piece, engine_config
from tests.reference.toy import make_drafter, make_target

SHAPE = {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 16}
PROMPT, LATER = list(range(5, 26)), list(range(60, 71))

pytestmark = pytest.mark.skipif(unavailable_reason() is not None, reason=f"torch's kernels: {unavailable_reason()}")


@pytest.fixture(scope="module", params=["qwen2", "qwen3"])
def directories(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    target, drafter = (tmp_path_factory.mktemp(name) for name in ("target", "drafter"))
    make_drafter(drafter, make_target(target, request.param, **SHAPE), head_dim=16, block_size=8)
    return target, drafter


@pytest.fixture(autouse=True)
def kernels_for_any_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """On every processor; see `max_kernel_rows`."""
    monkeypatch.setenv("DFLASH_CPU_KERNELS", "llvm")


@pytest.fixture
def two_threads() -> object:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


class Calls:
    """Counts the runs that went through the stack; or keeps all of them from it."""

    def __init__(self, models: PagedModels, monkeypatch: pytest.MonkeyPatch, *, allowed: bool) -> None:
        self.count = 0
        find = CpuStacks.find

        def counted(stacks: CpuStacks, *arguments: object) -> object:
            found = find(stacks, *arguments) if allowed else None
            self.count += found is not None
            return found

        monkeypatch.setattr(CpuStacks, "find", counted)


def _run(models: PagedModels, monkeypatch: pytest.MonkeyPatch, *, allowed: bool) -> tuple[list[Tensor], int]:
    """Prefill, a single row, blocks of two sequences, drafts of both; everything they leave behind."""
    calls = Calls(models, monkeypatch, allowed=allowed)
    made: list[Tensor] = []
    for step in (
        [Piece(seq=0, start=0, ids=PROMPT), Piece(seq=1, start=0, ids=PROMPT[:6])],
        [Piece(seq=0, start=21, ids=LATER[:1])],
        [Piece(seq=1, start=6, ids=LATER[:5]), Piece(seq=0, start=22, ids=LATER[5:10])],
    ):
        out = models.forward([step])
        assert out.taps_NTH is not None
        made += [out.hidden_NH, out.taps_NTH]
    made += [models.draft_hidden({0: (27, 9)}), models.draft_hidden({1: (11, 8), 0: (27, 9)})]
    assert models.kv.drafter_stack is not None
    made += [tensor[1:] for pair in models.kv.target_kv for tensor in pair]  # block 0 takes dropped rows
    return [*made, models.kv.drafter_stack[:, models.config.block_size :]], calls.count


@pytest.mark.parametrize("weights", ["model", "int8"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@torch.inference_mode()
def test_one_call_equals_layer_by_layer(
    directories: tuple[Path, Path], dtype: str, weights: str, two_threads: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = engine_config(*directories, dtype=dtype, drafter_weights=weights, num_threads=2)
    results = []
    for allowed in (True, False):
        with monkeypatch.context() as patch:
            results.append(_run(PagedModels.load(config, num_seqs=2), patch, allowed=allowed))
    (fused, num_fused), (plain, num_plain) = results
    assert (num_fused, num_plain) == (5, 0)
    for got, want in zip(fused, plain, strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize(("dtype", "num_expected"), [("bfloat16", 4), ("float32", 5)])
@torch.inference_mode()
def test_with_bfloat16_instructions_many_rows_go_layer_by_layer(
    directories: tuple[Path, Path], dtype: str, num_expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All but the prefill of 27 rows take one call, and what they give is still that of the layers."""
    monkeypatch.setenv("DFLASH_CPU_KERNELS", "auto")
    monkeypatch.setattr(cpu_jit, "has_bfloat16_instructions", lambda: True)
    config = engine_config(*directories, dtype=dtype)
    results = []
    for allowed in (True, False):
        with monkeypatch.context() as patch:
            results.append(_run(PagedModels.load(config, num_seqs=2), patch, allowed=allowed))
    (mixed, num_mixed), (plain, num_plain) = results
    assert (num_mixed, num_plain) == (num_expected, 0)
    for got, want in zip(mixed, plain, strict=True):
        assert torch.equal(got, want)


@torch.inference_mode()
def test_with_bfloat16_instructions_context_of_many_rows_goes_part_by_part(
    directories: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DFLASH_CPU_KERNELS", "auto")
    monkeypatch.setattr(cpu_jit, "has_bfloat16_instructions", lambda: True)
    for weights in ("model", "int8"):
        config = engine_config(*directories, dtype="bfloat16", drafter_weights=weights)
        drafter = PagedModels.load(config, num_seqs=2).drafter
        assert drafter is not None
        assert CpuContext.takes(drafter, 16)
        assert not CpuContext.takes(drafter, 17)


@pytest.mark.parametrize("weights", ["model", "int8"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@torch.inference_mode()
def test_context_in_one_call_equals_its_parts(directories: tuple[Path, Path], dtype: str, weights: str) -> None:
    models = PagedModels.load(engine_config(*directories, dtype=dtype, drafter_weights=weights), num_seqs=2)
    drafter = models.drafter
    assert drafter is not None
    out = models.forward([[Piece(seq=0, start=0, ids=PROMPT)]])
    assert out.taps_NTH is not None
    assert models.kv.drafter_stack is not None
    want = models.kv.drafter_stack.clone()
    assert bool((want != 0).any())
    models.kv.drafter_stack.zero_()
    positions = torch.arange(len(PROMPT))
    drafter.feed_context(out.taps_NTH, positions, models.slots(0, positions), models.kv)
    assert drafter._context is not None
    assert torch.equal(models.kv.drafter_stack, want)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@torch.inference_mode()
def test_wanted_rows_are_those_of_the_whole_block(
    directories: tuple[Path, Path], dtype: str, two_threads: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    models = PagedModels.load(engine_config(*directories, dtype=dtype, num_threads=2), num_seqs=2)
    models.forward([[Piece(seq=0, start=0, ids=PROMPT), Piece(seq=1, start=0, ids=PROMPT[:9])]])
    drafter = models.drafter
    assert drafter is not None
    calls = Calls(models, monkeypatch, allowed=True)
    for sequences in ([0], [1, 0]):
        pieces = [Piece(seq=s, start=(21, 9)[s], ids=[50 + s, *[3] * 7]) for s in sequences]
        ids, positions, ctx = models.context([pieces], causal=False)
        block = drafter.enter(models.target.embedding, ids, positions)
        whole = drafter.forward(block, ctx, models.kv).view(len(sequences), 8, -1)
        for count in (1, 4, 7):
            part = drafter.draft_hidden(block, ctx, models.kv, block_width=8, num_drafts=count)
            assert torch.equal(part.view(len(sequences), count, -1), whole[:, 1 : count + 1])
    assert calls.count == 8


@torch.inference_mode()
def test_results_outlive_the_next_run_and_the_input_stays(directories: tuple[Path, Path]) -> None:
    models = PagedModels.load(engine_config(directories[0], dtype="bfloat16"), num_seqs=2)
    first = models.forward([[Piece(seq=0, start=0, ids=PROMPT)]])
    assert first.taps_NTH is not None
    kept = first.hidden_NH.clone(), first.taps_NTH.clone()
    models.forward([[Piece(seq=1, start=0, ids=LATER)]])
    assert torch.equal(first.hidden_NH, kept[0])
    assert torch.equal(first.taps_NTH, kept[1])
    ids, positions, ctx = models.context([[Piece(seq=0, start=21, ids=LATER)]])
    x, angles = models.target.embedding[ids], models.target.rotary.rows(positions)
    stack = models.target._stacks.find(x, ctx, models.kv.target_kv, (0, 2, 3))
    assert stack is not None
    before = x.clone()
    stack.run(x, angles, ctx)
    assert torch.equal(x, before)


@torch.inference_mode()
def test_what_it_cannot_run_goes_layer_by_layer(directories: tuple[Path, Path]) -> None:
    models = PagedModels.load(engine_config(directories[0], num_blocks=128, max_model_len=256), num_seqs=2)

    def is_found(groups: list[list[Piece]]) -> bool:
        ids, _, ctx = models.context(groups)
        return models.target._stacks.find(models.target.embedding[ids], ctx, models.kv.target_kv, ()) is not None

    one, other = Piece(seq=0, start=0, ids=PROMPT), Piece(seq=1, start=0, ids=PROMPT)
    assert is_found([[one, other]])
    assert not is_found([[one], [other]])  # two groups
    assert is_found([[Piece(seq=0, start=0, ids=[7] * MAX_ROWS)]])
    assert not is_found([[Piece(seq=0, start=0, ids=[7] * (MAX_ROWS + 1))]])


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_a_phase_begins_when_the_last_one_is_over(threads: int) -> None:
    """A chain of sums over one row set: whoever begins early adds to what is not there yet."""
    kernels, rows, size, phases = row_kernels(torch.float32), 7, 4096, 200
    assert kernels is not None
    totals = torch.zeros(phases + 1, rows, size)
    one, weight, out = torch.ones(rows, size), torch.ones(size), torch.empty(rows, size)
    program = TeamProgram(threads=threads)
    for i in range(phases):
        job = [0] * len(NormWord)
        job[NormWord.X], job[NormWord.SUM] = totals[i].data_ptr(), totals[i + 1].data_ptr()
        job[NormWord.DELTA], job[NormWord.WEIGHT] = one.data_ptr(), weight.data_ptr()
        job[NormWord.OUT], job[NormWord.EPS] = out.data_ptr(), float_bits(1e-6)
        job[NormWord.ROWS], job[NormWord.SIZE] = rows, size
        program.add(kernels.address("add_rms_norm"), job)
    program.close()
    fresh = program.words.copy()
    for _ in range(3):
        totals[1:] = 0
        program.words[:] = fresh
        program.run()
        assert torch.equal(totals[:, 0, 0], torch.arange(phases + 1.0))
        assert bool((totals == totals[:, :1, :1]).all())
