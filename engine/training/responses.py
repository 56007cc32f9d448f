"""From prompts to a corpus: the target writes user turns, then responses to all of them."""

import json
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from engine.tokenizer import Tokenizer
from engine.training.corpus import Corpus
from engine.training.prompts import Cleaner, TurnWriter, chat_prompts
from engine.training.sampler import BatchSampler, SampleRequest
from engine.training.target import FrozenTarget

MIN_RESPONSE = 8  # shorter responses have no block worth training on


@dataclass(frozen=True, kw_only=True)
class ResponsePlan:
    """turns: user turns for the target to write, before filtering. greedy_share: of the responses; the temperatures of
    the others are uniform in `temperatures`. turn_seconds, response_seconds: limits, None for none. Lengths in tokens.
    """

    turns: int
    greedy_share: float = 0.7
    temperatures: tuple[float, float] = (0.6, 1.0)
    max_new: int = 400
    max_prompt: int = 320
    slots: int = 2048
    turn_seconds: float | None = None
    response_seconds: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        """Raises ValueError for shares or lengths out of range."""
        if not 0.0 <= self.greedy_share <= 1.0:
            raise ValueError(f"greedy_share must lie in 0 .. 1, got {self.greedy_share}.")
        if self.turns < 0 or self.slots < 1 or self.max_new < 1 or self.max_prompt < 1:
            raise ValueError("turns must be at least 0; slots, max_new and max_prompt at least 1.")


def write_turns(target: FrozenTarget, tokenizer: Tokenizer, plan: ResponsePlan, cleaner: Cleaner) -> list[str]:
    """User turns in the target's own words, those that the cleaner keeps."""
    writer = TurnWriter(tokenizer, seed=plan.seed)
    sampler = BatchSampler(
        target,
        slots=plan.slots,
        max_len=256,
        stop_ids=target.config.eos_token_ids,
        seed=plan.seed,
        min_p=0.02,
    )
    samples = sampler.run(writer.requests(plan.turns), seconds=plan.turn_seconds)
    return cleaner.kept(turn for sample in samples if (turn := writer.turn(sample)) is not None)


def write_responses(target: FrozenTarget, tokenizer: Tokenizer, prompts: Sequence[str], plan: ResponsePlan) -> Corpus:
    """One response to every prompt, in random order, as far as the time allows."""
    sampler = BatchSampler(
        target,
        slots=plan.slots,
        max_len=plan.max_prompt + plan.max_new,
        stop_ids=target.config.eos_token_ids,
        seed=plan.seed + 1,
    )
    requests = _requests(tokenizer, prompts, plan)
    documents = [
        (sample.tokens, len(sample.request.prompt), sample.request.temperature)
        for sample in sampler.run(requests, seconds=plan.response_seconds)
        if len(sample.tokens) - len(sample.request.prompt) >= MIN_RESPONSE
    ]
    if not documents:
        raise ValueError("no response of use was written; give more prompts or more time.")
    return Corpus.of(documents)


def _requests(tokenizer: Tokenizer, prompts: Sequence[str], plan: ResponsePlan) -> Iterator[SampleRequest]:
    rng = random.Random(plan.seed)
    order = list(range(len(prompts)))
    rng.shuffle(order)
    encoded = chat_prompts(tokenizer, prompts)
    for index in order:
        ids = encoded[index]
        heat = 0.0 if rng.random() < plan.greedy_share else rng.uniform(*plan.temperatures)
        if len(ids) <= plan.max_prompt:
            yield SampleRequest(prompt=ids, max_new=plan.max_new, temperature=heat, tag=index)


def evaluation_corpora(
    model_dir: Path, tokenizer: Tokenizer, sets: dict[str, list[str]], *, max_new: int, temperature: float, device: str
) -> dict[str, Corpus]:
    """The target's responses to evaluation prompts, written in float32."""
    prompts = {name: chat_prompts(tokenizer, texts) for name, texts in sets.items()}
    longest = max(len(ids) for texts in prompts.values() for ids in texts) + max_new
    target = FrozenTarget.load(model_dir, num_positions=longest + 1, dtype=torch.float32, device=device)
    slots = max(len(texts) for texts in prompts.values())
    sampler = BatchSampler(
        target, slots=slots, max_len=longest, stop_ids=target.config.eos_token_ids, seed=0, steps_per_look=32
    )
    corpora = {}
    for name, texts in prompts.items():
        requests = [
            SampleRequest(prompt=ids, max_new=max_new, temperature=temperature, tag=tag)
            for tag, ids in enumerate(texts)
        ]
        samples = sorted(sampler.run(requests), key=lambda sample: sample.request.tag)
        corpora[name] = Corpus.of([(s.tokens, len(s.request.prompt), temperature) for s in samples])
    return corpora


def save_texts(texts: Iterable[str], path: Path) -> None:
    path.write_text("".join(json.dumps(text) + "\n" for text in texts), encoding="utf-8")
