"""Law: decode programs of fixed shapes (filler rows, buckets, packed uploads) emit what exact shapes emit.

On the CPU the programs are called instead of replayed; buffers, shapes and choices are those of captured graphs.
"""

import itertools
import random

import pytest
import torch

from engine import LLM, DFlashDecodingConfig, SamplingParams
from engine.kernels.row_state import NEW_BLOCKS
from engine.request import EngineRequest
from engine.row_buckets import row_buckets
from engine.runner.decode_programs import Variant
from engine.runner.prompt_programs import chunk_sizes
from engine.runner.recorder import Repeater
from engine.runner.slots import SlotTraits
from engine.runner.upload_ring import UploadRing
from tests.engine.drafting import mixed_truth
from tests.toy import make_drafter, make_target

# What the requests ask for, in order of arrival; one with log-probabilities, whose batches decide eagerly, and greedy
# ones at the end, so that each variant of D gets batches of its own.
KINDS = (1, 0, 4, 1, 3, 1, 2, 1, 0, 4, 4, 4, 4, 4)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    root = tmp_path_factory.mktemp("programs")
    target = make_target(root / "target", kind="qwen3")
    return target, make_drafter(root / "drafter", target)


def build(models, decode_programs: str, rejection: bool = False, **options) -> LLM:
    target, drafter = models
    settings = dict(
        dtype="float32",
        max_model_len=96,
        max_num_seqs=5,
        max_num_batched_tokens=64,
        block_size=8,
        num_blocks=80,
        draft_len_choices=[0, 2, 7],
        threads=1,
    )
    spec = DFlashDecodingConfig(
        max_draft_len=7,
        speculative_model=str(drafter),
        draft_len_schedule={2: 7, 4: 2, 5: 0},
        use_rejection_sampling=rejection,
    )
    return LLM(str(target), speculative_config=spec, decode_programs=decode_programs, **(settings | options))


def params_of(rng: random.Random, index: int) -> SamplingParams:
    kind = KINDS[index]
    common = dict(max_tokens=rng.randrange(1, 34), seed=index, ignore_eos=True)
    if kind == 0:
        return SamplingParams(temperature=0.7, **common)
    if kind == 1:
        return SamplingParams(temperature=0.9, top_p=0.8, top_k=rng.choice((0, 30)), min_p=0.02, **common)
    if kind == 2:
        return SamplingParams(temperature=0.0, logprobs=2, **common)
    if kind == 3:
        common["max_tokens"] = 30
        return SamplingParams(temperature=0.0, min_tokens=6, stop_token_ids=list(range(0, 120)), **common)
    return SamplingParams(temperature=0.0, **common)


def drive(llm: LLM, seed: int) -> dict[str, tuple]:
    """Requests that arrive and are aborted at random steps; what each emitted, an aborted one's start only."""
    rng = random.Random(seed)
    core, out, doomed, arrived = llm.core, {}, {}, 0
    steps = 0
    while arrived < 14 or core.has_work():
        if arrived < 14 and rng.random() < 0.4:
            name = f"r{arrived}"
            prompt = tuple(rng.randrange(256) for _ in range(rng.randrange(1, 40)))
            params = params_of(rng, arrived)
            core.add_request(EngineRequest(request_id=name, prompt_token_ids=prompt, params=params))
            out[name] = ([], [], None)
            if rng.random() < 0.25:
                doomed[name] = rng.randrange(1, 20)
            arrived += 1
        for name in [n for n, tokens in doomed.items() if len(out[n][0]) >= tokens]:
            core.abort(name)
            del doomed[name]
        for delta in core.step():
            tokens, logprobs, _ = out[delta.request_id]
            tokens += delta.token_ids
            logprobs += [round(entry.logprob, 4) for entry in delta.logprobs or ()]
            out[delta.request_id] = (tokens, logprobs, delta.finish_reason)
        steps += 1
    core.check_integrity()
    assert steps > 30
    return {name: value for name, value in out.items() if value[2] != "abort"}


@pytest.mark.parametrize(
    ("seed", "options"),
    [
        (1, {"pipeline_depth": 0, "debug_checks": True}),
        (2, {"pipeline_depth": 1}),
        (3, {"pipeline_depth": 1, "max_num_batched_tokens": 24, "num_blocks": 30}),
    ],
)
def test_random_schedules(models, seed, options):
    with build(models, "eager", **options) as llm:
        truth = drive(llm, seed)
    assert len(truth) >= 8 and any(len(tokens) > 20 for tokens, _, _ in truth.values())
    with build(models, "repeated", **options) as llm:
        pairs, used = llm._rank.runner._decode_programs._pairs, set()
        for key, pair in pairs.items():
            pair.run_target = note(used, key, pair.run_target)
            for variant, run in pair.run_draft.items():
                pair.run_draft[variant] = note(used, variant, run)
        prompts = llm._rank.runner._prompt_programs._programs
        for size, programs in prompts.items():
            programs.run_target = note(used, f"prompt of {size}", programs.run_target)
        # Aborts come at other steps, so only what finished by itself is compared.
        found = drive(llm, seed)
    common = truth.keys() & found.keys()
    assert len(common) >= 8
    assert {name: found[name] for name in common} == {name: truth[name] for name in common}
    assert any(f"prompt of {size}" in used for size in prompts), "prompts were meant to run in programs"
    assert len(used & {*Variant}) >= 2, "several variants of D were meant to be used"
    assert len({key[0] for key in used if isinstance(key, tuple)}) >= 3, "several buckets were meant to be used"
    assert len({key[1] for key in used if isinstance(key, tuple)}) >= 2, "several draft lengths were meant to be used"


def test_rejection_sampling(models):
    options = {"rejection": True, "draft_sampling": "probabilistic"}
    with build(models, "eager", **options) as eager, build(models, "repeated", **options) as repeated:
        assert drive(repeated, 6) == drive(eager, 6)


def note(used: set, key: object, run):
    def noted() -> None:
        used.add(key)
        run()

    return noted


@pytest.mark.parametrize("depth", [0, 1])
def test_accepted_drafts_of_every_length(models, depth):
    """With proposals that are often right, blocks of all lengths are committed and tables grow by several blocks."""
    generator = torch.Generator().manual_seed(3)
    texts = [torch.randint(0, 256, (n,), generator=generator).tolist() for n in (5, 23, 40)]
    params = [SamplingParams(temperature=0.0, max_tokens=40, seed=i, ignore_eos=True) for i in range(3)]
    with build(models, "eager") as llm:
        outputs = llm.generate(texts, params)
        truth = {i: [*t, *o.outputs[0].token_ids] for i, (t, o) in enumerate(zip(texts, outputs, strict=True))}
    with build(models, "repeated", pipeline_depth=depth) as llm:
        llm.core.apply_schedule((1, 1), {5: 7})
        mixed_truth(llm, truth, p_right=0.85, seed=1)
        found = llm.generate(texts, params)
        assert [[*t, *o.outputs[0].token_ids] for t, o in zip(texts, found, strict=True)] == list(truth.values())
        assert llm.core.counters().num_accepted_tokens > 40


def test_a_step_beyond_the_uploads_room_writes_its_tables_first(models):
    """When drafting resumes after K = 0, a row gets more new blocks at once than an upload has room for."""
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    with build(models, "eager") as llm:
        truth = llm.generate([[1, 2, 3]], params)[0].outputs[0].token_ids
    with build(models, "repeated", block_size=1, num_blocks=400, pipeline_depth=1) as llm:
        state, core, tokens, overflows = llm._rank.runner.state, llm.core, [], []
        write_table = state.write_table
        state.write_table = lambda updates: (overflows.append(updates), write_table(updates))
        core.apply_schedule((1, 1), {5: 0})
        core.add_request(EngineRequest(request_id="r", prompt_token_ids=(1, 2, 3), params=params))
        while core.has_work():
            tokens += [token for delta in core.step() for token in delta.token_ids]
            if len(tokens) == 6:
                overflows.clear()
                core.apply_schedule((1, 2), {5: 7})
        assert max(len(update.block_ids) for updates in overflows for update in updates) > NEW_BLOCKS
    assert tuple(tokens) == truth


def test_buckets_cover_every_batch_and_end_at_the_largest():
    for largest in (*range(1, 70), 100, 128, 200):
        buckets = row_buckets(largest)
        assert buckets[0] == 1 and buckets[-1] == largest and list(buckets) == sorted(set(buckets))
        assert all(b <= 2 * a for a, b in itertools.pairwise(buckets))
        assert all(3 * b <= 4 * a for a, b in itertools.pairwise(buckets) if a >= 8)


def test_chunk_sizes_end_at_the_longest():
    assert chunk_sizes(20) == (20,)
    assert chunk_sizes(100) == (32, 64, 96, 100)
    assert chunk_sizes(8192)[-2:] == (6144, 8192)
    assert chunk_sizes(20000)[-2:] == (8192, 20000)


def test_a_prompt_in_pieces_of_every_size_and_many_at_once(models):
    """Chunks in the middle leave K/V and context behind; more than a few prompts share a ragged forward."""
    generator = torch.Generator().manual_seed(4)
    long = [torch.randint(0, 256, (n,), generator=generator).tolist() for n in (80, 1, 61)]
    many = [torch.randint(0, 256, (3 + n,), generator=generator).tolist() for n in range(9)]
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    found = []
    for decode_programs in ("eager", "repeated"):
        for chunk in (17, 70):
            options = dict(max_num_seqs=9, max_num_batched_tokens=chunk, max_model_len=110, num_blocks=200)
            with build(models, decode_programs, **options) as llm:
                found.append([o.outputs[0].token_ids for texts in (long, many) for o in llm.generate(texts, params)])
                found[-1].append(llm.core.counters().num_accepted_tokens)
    assert found[0][:-1] == found[1][:-1]
    assert found[2:] == found[:2], "with equal chunks even the accepted drafts are equal"


def test_the_variant_holds_what_any_row_needs():
    T = SlotTraits
    assert Variant.of(0) is Variant.of(T.LOGPROBS) is Variant.GREEDY
    assert Variant.of(T.DRAWS) is Variant.of(T.MASKS_STOPS) is Variant.DRAW
    assert Variant.of(T.DRAWS | T.FILTERS) is Variant.of(T.DRAWS | T.FILTERS | T.MASKS_STOPS) is Variant.FILTER


def test_an_upload_leaves_the_entries_still_under_way_alone():
    ring = UploadRing(4, torch.device("cpu"))
    arrays = []
    for step in range(6):
        array = ring.next()
        array[:2] = step
        ring.send(2)
        assert ring.device.tolist() == [step, step, 0, 0]
        arrays.append(array)
    assert len({id(a) for a in arrays}) == 3 and arrays[0] is arrays[3]
    assert Repeater().borrow(ring.device) is ring.device
