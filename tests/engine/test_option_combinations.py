"""Options together: every pair of their values, and random draws of all of them, against plain decoding and exact
probabilities, at both pipeline depths.

Greedy and seeded requests must give, token for token, what each gives alone on an engine without drafts. Under
rejection sampling the first tokens must have exactly the distribution that the request's options describe, and greedy
requests of the same batches the plain text.
"""

import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from scipy import stats
from transformers import AutoModelForCausalLM

from benchmarks.covering_array import covering_array
from engine import LLM, DFlashDecodingConfig, SamplingParams
from engine.bad_words import bad_word_token_ids
from tests.engine.drafting import Recount, mixed_truth, propose_draws
from tests.reference.joint_tokens import Comparison, JointTokens
from tests.toy import make_drafter, make_target

STOPS = tuple(range(40, 60))
REQUEST: dict[str, Sequence[Any]] = {
    "temperature": (0.0, 0.7, 1.3),
    "top_k": (0, 1, 20),
    "top_p": (1.0, 0.8),
    "min_p": (0.0, 0.1),
    "repetition_penalty": (1.0, 1.3),
    "presence_penalty": (0.0, 0.8),
    "frequency_penalty": (0.0, 0.5),
    "logit_bias": (None, {5: 3.0, 66: 2.0, 70: -5.0, 257: 1.0}),
    "allowed_token_ids": (None, tuple(range(20, 140))),
    "bad_words": (None, ("a", "bc", "q z")),
    "min_tokens": (0, 7),
    "ignore_eos": (False, True),
    "stop_token_ids": ((), STOPS),
    "logprobs": (None, 0, 3),
    "prompt_logprobs": (None, 1),
}
ENGINE: dict[str, Sequence[Any]] = {
    "pipeline_depth": (0, 1),
    "decode_programs": ("eager", "repeated"),
    "draft_sampling": ("greedy", "coupled"),
    "proposals": ("the truth, often", "the drafter's"),
    "max_draft_len": (1, 3, 7),
    "max_num_batched_tokens": (48, 120),
    "num_blocks": (32, 200),
    "block_size": (4, 16),
    "enable_prefix_caching": (False, True),
    "schedule": ("fixed", "changing"),
    "gate": (False, True),
}
# Few tokens are possible after each other, so that the joint distribution of three has outcomes to count.
DRAWN: dict[str, Sequence[Any]] = {
    "support": ({"top_k": 3}, {"top_k": 5}, {"allowed_token_ids": tuple(range(64, 70))}),
    "temperature": (0.7, 1.0, 1.6),
    "top_p": (1.0, 0.8),
    "min_p": (0.0, 0.15),
    "repetition_penalty": (1.0, 1.3),
    "presence_penalty": (0.0, 0.8),
    "frequency_penalty": (0.0, 0.5),
    "logit_bias": (None, {64: 2.0, 66: 1.0, 70: -5.0}),
    "bad_words": (None, ("b", "ac", "z")),
    "min_tokens": (0, 2),
    "stop_token_ids": ((), (65, 66, 20, 30)),
    "logprobs": (None, 1),
}
VERIFIED: dict[str, Sequence[Any]] = {
    "pipeline_depth": (0, 1),
    "decode_programs": ("eager", "repeated"),
    "draft_sampling": ("greedy", "probabilistic"),
    "max_draft_len": (1, 3, 7),
    "enable_prefix_caching": (False, True),
}
NUM_TOKENS = 20
LENGTH = 3
ALPHA = 1e-4


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("combinations")
    target = make_target(root / "target", kind="qwen3")
    return target, make_drafter(root / "drafter", target)


@pytest.fixture(scope="module")
def plain(models: tuple[Path, Path]) -> Iterator[LLM]:
    with build(models, None) as llm:
        yield llm


@pytest.fixture(scope="module")
def reference(models: tuple[Path, Path]) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(models[0], dtype=torch.float32).eval()


def build(models: tuple[Path, Path], setting: dict[str, Any] | None, **options: Any) -> LLM:
    spec = None
    settings = dict(max_model_len=96, max_num_seqs=6, max_num_batched_tokens=120, block_size=16, num_blocks=60)
    if setting is not None:
        fields: dict[str, Any] = {"enable_penalty": True, "max_draft_len": setting["max_draft_len"]}
        if setting.get("gate"):
            fields |= {"acceptance_rate_window_size": 3, "acceptance_rate_threshold": 0.5}
        fields["use_rejection_sampling"] = "gate" not in setting and setting["draft_sampling"] != "coupled"
        spec = DFlashDecodingConfig(speculative_model=str(models[1]), **fields)
        settings |= {k: v for k, v in setting.items() if k not in ("max_draft_len", "proposals", "schedule", "gate")}
    settings |= options
    return LLM(str(models[0]), speculative_config=spec, dtype="float32", threads=1, debug_checks=True, **settings)


def prompts(count: int, seed: int, longest: int = 40) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(256) for _ in range(rng.randrange(3, longest))] for _ in range(count)]


def drawn_values(rng: random.Random, factors: dict[str, Sequence[Any]]) -> dict[str, Any]:
    return {name: rng.choice(list(values)) for name, values in factors.items()}


def requests(rows: list[dict[str, Any]]) -> list[SamplingParams]:
    return [SamplingParams(seed=i, max_tokens=NUM_TOKENS, **row) for i, row in enumerate(rows)]


def results(llm: LLM, texts: list[list[int]], params: list[SamplingParams]) -> list[tuple]:
    """All that a client sees of each request: tokens, why it ended, and every log-probability that it asked for."""
    found = []
    for output in llm.generate(texts, params):
        own = output.outputs[0]
        entries = [*(own.logprobs or ()), *[e for e in output.prompt_logprobs or () if e is not None]]
        scores = [value for entry in entries for value in (entry.logprob, *entry.top_logprobs)]
        found.append((list(own.token_ids), own.finish_reason, own.stop_reason, scores))
    return found


def change_schedules(llm: LLM, rng: random.Random) -> None:
    """A new schedule every three steps, K = 0 among them."""
    step, numbers = llm.core.step, iter(range(1, 100_000))

    def changing() -> Any:
        number = next(numbers)
        if number % 3 == 0:
            bounds = {size: rng.choice(llm.config.draft_len_choices) for size in (1, 3, 6)}
            llm.core.apply_schedule((1, number), bounds)
        return step()

    llm.core.step = changing


def check_exact(models: tuple[Path, Path], plain: LLM, setting: dict[str, Any], rows: list[dict], seed: int) -> int:
    """Runs the rows in one batch at this setting. Returns how many drafts were accepted, counted twice."""
    texts, params = prompts(len(rows), seed), requests(rows)
    alone = [results(plain, [text], [p])[0] for text, p in zip(texts, params, strict=True)]
    known = {i: texts[i] + alone[i][0] for i in range(len(rows))}
    with build(models, setting) as llm:
        if setting["proposals"] == "the truth, often":
            mixed_truth(llm, known, p_right=0.8, seed=seed)
        if setting["schedule"] == "changing":
            change_schedules(llm, random.Random(seed))
        recount = Recount(llm, known)
        together = results(llm, texts, params)
        for row, found, truth in zip(rows, together, alone, strict=True):
            assert found[:3] == truth[:3], (setting, row)
            assert found[3] == pytest.approx(truth[3], abs=1e-4), (setting, row)
        llm.core.check_integrity()
        counters = llm.core.counters()
    per_position = counters.num_accepted_tokens_per_pos
    assert counters.num_drafts == recount.num_drafts, setting
    assert counters.num_draft_tokens == recount.num_draft_tokens, setting
    assert [*per_position, *[0] * (setting["max_draft_len"] - len(per_position))] == recount.accepted, setting
    if setting["proposals"] == "the truth, often" and setting["schedule"] == "fixed":
        assert counters.num_accepted_tokens > 0, setting  # four right drafts of five, in the first step at the latest
    return counters.num_accepted_tokens


def compared(
    models: tuple[Path, Path],
    reference: torch.nn.Module,
    setting: dict[str, Any],
    rows: list[dict],
    num_draws: int,
    seed: int,
) -> tuple[list[Comparison], float]:
    """Each row's draws at this setting, in the same batches a greedy request of each; accepted drafts per request."""
    texts = prompts(len(rows), seed, longest=8)
    with build(models, setting, max_num_seqs=64, max_num_batched_tokens=1000, num_blocks=400) as llm:
        exact, greedy, params, likely, known = [], [], [], {}, {}
        for number, row in enumerate(rows):
            own = {k: v for k, v in row.items() if k != "support"} | row["support"]
            drawn = SamplingParams(max_tokens=LENGTH + 2, ignore_eos=True, **own)
            words, stops = bad_word_token_ids(llm.tokenizer, drawn.bad_words or ()), drawn.stop_token_ids
            rules = dict(length=LENGTH, bad_words=words, stop_ids=stops)
            exact.append(JointTokens(reference, texts[number], drawn, **rules))
            still = SamplingParams(max_tokens=LENGTH + 2, ignore_eos=True, **(own | {"temperature": 0.0}))
            greedy.append(JointTokens(reference, texts[number], still, **rules))
            best = max(exact[-1].paths, key=exact[-1].paths.__getitem__)
            ids = sorted({token for path in exact[-1].paths for token in path})[:8]
            for draw in range(num_draws + 1):
                name = number * (num_draws + 1) + draw
                settings = own | ({"temperature": 0.0} if draw == num_draws else {})
                params.append(SamplingParams(max_tokens=LENGTH + 2, ignore_eos=True, seed=name, **settings))
                likely[name], known[name] = ids, texts[number] + list(best)
        if setting["draft_sampling"] == "probabilistic":
            propose_draws(llm, likely, seed)
        else:
            mixed_truth(llm, known, p_right=0.8, seed=seed)
        order = random.Random(seed).sample(range(len(params)), len(params))
        outputs = llm.generate([texts[i // (num_draws + 1)] for i in order], [params[i] for i in order])
        accepted = llm.core.counters().num_accepted_tokens / len(params)
    tokens = dict(zip(order, [tuple(o.outputs[0].token_ids[:LENGTH]) for o in outputs], strict=True))
    first = [number * (num_draws + 1) for number in range(len(rows))]
    for number, at in enumerate(first):
        assert [tokens[at + num_draws]] == list(greedy[number].paths), (setting, rows[number])
    return [
        exact[number].compare([tokens[at + i] for i in range(num_draws)]) for number, at in enumerate(first)
    ], accepted


def assert_distributed(found: list[Comparison], accepted: float) -> None:
    """All comparisons as one, and none of them far off by itself. accepted: drafts per request."""
    assert accepted > 0.2, "drafts were meant to be accepted"
    assert sum(one.impossible for one in found) == 0
    freedom = sum(one.freedom for one in found)
    assert freedom > len(found), "outcomes were meant to be countable"
    assert stats.chi2.sf(sum(one.chi_square for one in found), freedom) > ALPHA
    assert min(one.p_value for one in found) > ALPHA / len(found)


@pytest.mark.parametrize("depth", [0, 1])
def test_every_pair_of_request_options(models: tuple[Path, Path], plain: LLM, depth: int) -> None:
    rows = covering_array(REQUEST)
    assert len(rows) < 30
    setting = {name: values[-1] for name, values in ENGINE.items()} | {"pipeline_depth": depth, "gate": False}
    setting |= {"proposals": "the truth, often", "decode_programs": ("eager", "repeated")[depth]}
    assert check_exact(models, plain, setting, rows, seed=depth) > 3 * len(rows)


@pytest.mark.parametrize(("depth", "draft_sampling"), [(0, "greedy"), (1, "probabilistic"), (1, "coupled")])
def test_every_pair_has_its_distribution(
    models: tuple[Path, Path], reference: torch.nn.Module, depth: int, draft_sampling: str
) -> None:
    """Under rejection sampling, and with coupled drafts by exact match."""
    setting = {name: values[-1] for name, values in VERIFIED.items()}
    setting |= {"pipeline_depth": depth, "draft_sampling": draft_sampling}
    setting |= {"decode_programs": ("eager", "repeated")[depth]}
    assert_distributed(*compared(models, reference, setting, covering_array(DRAWN), num_draws=60, seed=depth))


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("draft_sampling", ["coupled", "greedy", "probabilistic"])
def test_top_k_of_one_is_greedy(models: tuple[Path, Path], plain: LLM, depth: int, draft_sampling: str) -> None:
    """At temperature 1, by exact match and by rejection sampling of either kind of drafts."""
    texts = prompts(5, seed=3)
    still = [SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True, seed=i) for i in range(5)]
    drawn = [SamplingParams(temperature=1.0, top_k=1, max_tokens=NUM_TOKENS, ignore_eos=True, seed=i) for i in range(5)]
    truth = [found[0] for found in results(plain, texts, still)]
    setting = {"pipeline_depth": depth, "draft_sampling": draft_sampling, "max_draft_len": 7}
    with build(models, setting) as llm:
        if draft_sampling == "probabilistic":
            propose_draws(llm, {i: sorted(set(truth[i])) for i in range(5)}, seed=depth)
        else:
            mixed_truth(llm, {i: texts[i] + truth[i] for i in range(5)}, p_right=0.8, seed=depth)
        assert [found[0] for found in results(llm, texts, drawn)] == truth
        assert llm.core.counters().num_accepted_tokens > 5


@pytest.mark.slow
@pytest.mark.parametrize("setting", covering_array(ENGINE), ids=lambda setting: "-".join(map(str, setting.values())))
def test_every_pair_of_engine_options(models: tuple[Path, Path], plain: LLM, setting: dict[str, Any]) -> None:
    check_exact(models, plain, setting, covering_array(REQUEST), seed=11)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(4))
def test_random_draws(models: tuple[Path, Path], plain: LLM, part: int) -> None:
    """200 in all, each a deployment and six requests."""
    for number in range(50 * part, 50 * (part + 1)):
        rng = random.Random(number)
        rows = [drawn_values(rng, REQUEST) for _ in range(6)]
        check_exact(models, plain, drawn_values(rng, ENGINE), rows, seed=number)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(4))
def test_random_draws_under_rejection_sampling(
    models: tuple[Path, Path], reference: torch.nn.Module, part: int
) -> None:
    """200 in all, each a deployment and one set of options."""
    found, accepted = [], 0.0
    for number in range(50 * part, 50 * (part + 1)):
        rng = random.Random(number)
        setting, row = drawn_values(rng, VERIFIED), drawn_values(rng, DRAWN)
        one, rate = compared(models, reference, setting, [row], num_draws=150, seed=number)
        found, accepted = found + one, accepted + rate / 50
    assert_distributed(found, accepted)


def test_the_array_covers_every_pair() -> None:
    for factors in (REQUEST, ENGINE, DRAWN, VERIFIED):
        rows = covering_array(factors)
        pairs = {(a, repr(row[a]), b, repr(row[b])) for row in rows for a in row for b in row}
        wanted = {
            (a, repr(x), b, repr(y)) for a in factors for b in factors if a != b for x in factors[a] for y in factors[b]
        }
        assert wanted <= pairs
