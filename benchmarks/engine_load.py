"""The load that two engines are compared under, and the figures taken from it: one code for both sides.

An engine is stepped in a loop; a request that arrives while a step runs is added behind it. Everything follows from
when each request's tokens came out, step by step:

speed       a few prompts of each set one by one, then so many at once; --repeats rounds after a short one
context     milliseconds of a step of one request behind prompts of so many tokens
first       time to the first token behind prompts of exactly so many tokens
poisson     requests per second when all arrive at once, then arrivals at --share of that, and at --rates
accept      tokens per step of each prompt, at least --steps steps: first and last steps do not count (the prompt's, and
            one that may be cut)
"""

import argparse
import json
import random
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

PARTS = ("speed", "context", "first", "poisson", "accept")
HEADER = (
    "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
    "<|im_start|>user\n"
)
FOOTER = "<|im_end|>\n<|im_start|>assistant\n"
# More texts of the same kind, for the steps that acceptance is counted over.
WISHES = ("", " Explain your answer.", " Give an example.", " Be brief.", " Be thorough.")
Bank = dict[str, list[list[int]]]  # a set's name -> its prompts as token ids


class Engine(Protocol):
    def add(self, name: str, prompt: list[int], max_tokens: int, ignore_eos: bool) -> None: ...

    def step(self) -> Iterable[tuple[str, int, bool]]:
        """(request, new tokens, whether it ended) of each request that the step gave something."""
        ...


@dataclass(frozen=True, kw_only=True)
class Job:
    prompt: list[int]
    max_tokens: int
    ignore_eos: bool
    arrival_s: float = 0.0


@dataclass(kw_only=True)
class Trace:
    """start_s: when the request arrived, or was sent where only so many run at once. outputs: (seconds, tokens)."""

    start_s: float
    outputs: list[tuple[float, int]] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return sum(count for _, count in self.outputs)


def drive(engine: Engine, jobs: Sequence[Job], *, at_once: int | None = None) -> tuple[list[Trace], float]:
    """Runs the jobs, in order of arrival, to their ends; their traces and the seconds it took."""
    waiting = deque(sorted(range(len(jobs)), key=lambda i: jobs[i].arrival_s))
    traces: dict[str, Trace] = {}
    running: set[str] = set()
    started = time.perf_counter()
    while waiting or running:
        now = time.perf_counter() - started
        while waiting and jobs[waiting[0]].arrival_s <= now and (at_once is None or len(running) < at_once):
            index = waiting.popleft()
            job, name = jobs[index], f"{started}-{index}"
            traces[name] = Trace(start_s=job.arrival_s if at_once is None else now)
            running.add(name)
            engine.add(name, job.prompt, job.max_tokens, job.ignore_eos)
        if not running:
            time.sleep(max(0.0, min(5e-4, jobs[waiting[0]].arrival_s - now)))
            continue
        for name, count, ended in engine.step():
            if count:
                traces[name].outputs.append((time.perf_counter() - started, count))
            if ended:
                running.discard(name)
    return list(traces.values()), time.perf_counter() - started


# ------------------------------------------------------------------------------------------------------------- figures


def percentile(values: Sequence[float], share: float) -> float:
    """Nearest rank; of several thousand values no interpolation is needed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def figures(traces: Sequence[Trace], seconds: float) -> dict[str, Any]:
    """Times in ms. gap: between outputs of a request; token: such a gap shared by the tokens it brought."""
    tokens = sum(trace.num_tokens for trace in traces)
    first = [1e3 * (trace.outputs[0][0] - trace.start_s) for trace in traces]
    gaps: list[float] = []
    per_token: list[float] = []
    users: list[float] = []
    for trace in traces:
        for (before, _), (after, count) in zip(trace.outputs, trace.outputs[1:], strict=False):
            gaps.append(1e3 * (after - before))
            per_token += [1e3 * (after - before) / max(count, 1)] * count
        spent = trace.outputs[-1][0] - trace.outputs[0][0]
        if spent > 0:
            users.append((trace.num_tokens - trace.outputs[0][1]) / spent)
    row: dict[str, Any] = dict(
        requests=len(traces),
        tokens=tokens,
        seconds=round(seconds, 4),
        tokens_per_s=round(tokens / seconds, 1),
        tokens_per_s_per_user=round(statistics.median(users), 1) if users else None,
        first_token_ms=round(statistics.median(first), 3),
        first_token_mean_ms=round(statistics.mean(first), 3),
        first_token_p99_ms=round(percentile(first, 0.99), 3),
    )
    if gaps:
        row |= dict(gap_p50_ms=round(percentile(gaps, 0.5), 3), gap_p99_ms=round(percentile(gaps, 0.99), 3))
        row |= dict(
            token_p50_ms=round(percentile(per_token, 0.5), 3), token_p99_ms=round(percentile(per_token, 0.99), 3)
        )
        row |= dict(step_ms=round(statistics.mean(gaps), 4))
    steps, emitted = step_counts(traces)
    return row | dict(acceptance_length=round(emitted / steps, 3) if steps else None)


def step_counts(traces: Sequence[Trace]) -> tuple[int, int]:
    """(steps, tokens they emitted), first and last step of each request left out."""
    inner = [count for trace in traces for _, count in trace.outputs[1:-1]]
    return len(inner), sum(inner)


def bootstrap(pairs: Sequence[Sequence[int]], *, rounds: int = 4000, seed: int = 0) -> dict[str, float]:
    """Tokens per step over all (steps, tokens), with the 95 % interval of resampled prompts: the steps of one text are
    not independent, its prompt is what was drawn."""
    rng = random.Random(seed)
    means = []
    for _ in range(rounds):
        drawn = rng.choices(pairs, k=len(pairs))
        means.append(sum(tokens for _, tokens in drawn) / max(1, sum(steps for steps, _ in drawn)))
    means.sort()
    steps = sum(pair[0] for pair in pairs)
    return {
        "steps": steps,
        "mean": round(sum(pair[1] for pair in pairs) / max(1, steps), 4),
        "low": round(means[int(0.025 * rounds)], 4),
        "high": round(means[int(0.975 * rounds)], 4),
    }


# --------------------------------------------------------------------------------------------------------------- parts


def add_load_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--part-limit-s", type=float, default=60.0, help="nothing new of a part is begun after so long")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=256, help="of an answer; q8: twice that below 32 requests")
    parser.add_argument("--singles", type=int, default=3, help="prompts of each set that are run one by one")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 4, 8, 16, 32, 128])
    parser.add_argument("--contexts", type=int, nargs="+", default=[1024, 4000])
    parser.add_argument("--first-prompts", type=int, nargs="+", default=[256, 4096])
    parser.add_argument("--share", type=float, default=0.7)
    parser.add_argument("--rates", type=float, nargs="*", default=[], help="more arrivals per second to measure at")
    parser.add_argument("--poisson-s", type=float, default=10.0)
    parser.add_argument("--steps", type=int, default=10000)
    parser.add_argument("--max-model-len", type=int, default=4608)


LOAD_ARGUMENTS = (
    "parts", "part_limit_s", "repeats", "tokens", "singles", "concurrency", "contexts", "first_prompts", "share",
    "poisson_s", "steps", "max_model_len",
)  # fmt: skip


def load_command(args: argparse.Namespace) -> list[str]:
    """The load's arguments as another process takes them, --rates left out."""
    words: list[str] = []
    for name in LOAD_ARGUMENTS:
        value = getattr(args, name)
        words += ["--" + name.replace("_", "-"), *map(str, value if isinstance(value, list) else [value])]
    return words


def smol_bank(prompts: Path, tokenizer: Any, wish: str = "") -> Bank:
    """Sets of user messages as the model's chat template renders them."""
    sets = json.loads(prompts.read_text())
    sets = sets.get("eval", sets)
    return {
        name: [list(tokenizer(HEADER + text + wish + FOOTER, add_special_tokens=False)["input_ids"]) for text in texts]
        for name, texts in sets.items()
    }


def random_prompt(length: int, seed: int, *, low: int = 1000, high: int = 49000) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(low, high) for _ in range(length)]


def random_bank(count: int = 128, length: int = 256) -> Bank:
    return {"random": [random_prompt(length, seed, high=150000) for seed in range(count)]}


@dataclass(frozen=True, kw_only=True)
class Load:
    """Runs parts on an engine. more_banks: texts for `accept`, none where acceptance is decreed."""

    args: argparse.Namespace
    workload: str
    bank: Bank
    more_banks: Sequence[Bank] = ()

    def run(self, engine: Engine, draft_len: int, say: Callable[[dict[str, Any]], None]) -> None:
        """Every row goes to `say` as soon as it is there."""
        for part in self.args.parts:
            if part == "accept" and draft_len == 0:
                continue
            began = time.perf_counter()
            rows: Iterator[dict[str, Any]] = getattr(self, part)(engine)
            for row in rows:
                say(dict(part=part, draft_len=draft_len) | row)
                if time.perf_counter() - began > self.args.part_limit_s:
                    say(dict(part=part, draft_len=draft_len, cut_after_s=round(time.perf_counter() - began, 1)))
                    break

    def job(self, prompt: list[int], max_tokens: int, **more: Any) -> Job:
        return Job(prompt=prompt, max_tokens=max_tokens, ignore_eos=self.workload == "q8", **more)

    def mixed(self, count: int) -> list[list[int]]:
        """Prompts of all sets in turn, over again if need be."""
        turns = [prompt for prompts in zip(*self.bank.values(), strict=False) for prompt in prompts]
        return (turns * -(-count // len(turns)))[:count]

    def speed(self, engine: Engine) -> Iterator[dict[str, Any]]:
        for repeat in range(self.args.repeats + 1):
            for concurrency in self.args.concurrency:
                full = self.args.tokens * (2 if self.workload == "q8" and concurrency < 32 else 1)
                tokens = full if repeat else min(full, 48)
                if concurrency == 1:
                    singles = {name: prompts[: self.args.singles] for name, prompts in self.bank.items()}
                    batches = [(name, [prompt]) for name, prompts in singles.items() for prompt in prompts]
                else:
                    batches = [("all", self.mixed(concurrency))]
                found: dict[str, tuple[list[Trace], float]] = {}
                for name, prompts in batches:
                    traces, seconds = drive(engine, [self.job(prompt, tokens) for prompt in prompts])
                    before = found.get(name, ([], 0.0))
                    found[name] = (before[0] + traces, before[1] + seconds)
                for name, (traces, seconds) in found.items() if repeat else ():
                    yield dict(set=name, concurrency=concurrency, repeat=repeat) | figures(traces, seconds)

    def context(self, engine: Engine) -> Iterator[dict[str, Any]]:
        for repeat in range(3 + 1):
            for length in self.args.contexts:
                job = Job(prompt=random_prompt(length, repeat), max_tokens=min(96, self.args.tokens), ignore_eos=True)
                traces, seconds = drive(engine, [job])
                if repeat:
                    yield dict(context=length, repeat=repeat) | figures(traces, seconds)

    def first(self, engine: Engine) -> Iterator[dict[str, Any]]:
        for repeat in range(11 + 1):
            for length in self.args.first_prompts:
                job = Job(prompt=random_prompt(length, 100 + repeat), max_tokens=4, ignore_eos=True)
                traces, seconds = drive(engine, [job])
                if repeat:
                    yield dict(prompt=length, repeat=repeat) | figures(traces, seconds)

    def poisson(self, engine: Engine) -> Iterator[dict[str, Any]]:
        most = max(self.args.concurrency)
        traces, seconds = drive(engine, [self.job(p, self.args.tokens) for p in self.mixed(3 * most)], at_once=most)
        saturated = len(traces) / seconds
        yield dict(requests_per_s=round(saturated, 2), saturated=True) | figures(traces, seconds)
        own = self.args.share * saturated
        for rate, name in ((own, "own"), *[(rate, "given") for rate in self.args.rates]):
            yield self.arrivals(engine, rate, name)

    def arrivals(self, engine: Engine, rate: float, name: str) -> dict[str, Any]:
        """Requests that come at random, `rate` of them a second."""
        rng = random.Random(1)
        times, now = [], 0.0
        while (now := now + rng.expovariate(rate)) < self.args.poisson_s:
            times.append(now)
        prompts = self.mixed(len(times))
        jobs = [self.job(p, self.args.tokens, arrival_s=at) for p, at in zip(prompts, times, strict=True)]
        traces, seconds = drive(engine, jobs)
        return dict(requests_per_s=round(rate, 2), rate=name) | figures(traces, seconds)

    def accept(self, engine: Engine) -> Iterator[dict[str, Any]]:
        """One row per text of a set: its prompts' (steps, tokens)."""
        total = 0
        for wish, bank in enumerate(self.more_banks):
            for name, prompts in bank.items():
                jobs = [self.job(prompt, 2 * self.args.tokens) for prompt in prompts]
                traces, _ = drive(engine, jobs, at_once=min(32, max(self.args.concurrency)))
                pairs = [step_counts([trace]) for trace in traces]
                total += sum(steps for steps, _ in pairs)
                yield dict(set=name, wish=wish, pairs=pairs)
            if total >= self.args.steps:
                return
