"""What penalties, bias, allowed ids and bad words mean, position by position, in plain Python."""

from collections import Counter
from collections.abc import Sequence

import torch

from engine import SamplingParams


def changed_logits(
    raw_V: torch.Tensor,
    *,
    prompt: Sequence[int],
    output: Sequence[int],
    params: SamplingParams,
    bad_words: Sequence[Sequence[int]] = (),
    stop_ids: Sequence[int] = (),
) -> torch.Tensor:
    """The logits that the token after `output` is drawn from, float32 [V]."""
    logits = [float(value) for value in raw_V.double()]
    for token_id, bias in (params.logit_bias or {}).items():
        logits[token_id] += bias
    counts = Counter(output)
    for token_id in {*prompt, *output}:
        value, factor = logits[token_id], params.repetition_penalty
        logits[token_id] = value / factor if value > 0 else value * factor
    for token_id, count in counts.items():
        logits[token_id] -= params.frequency_penalty * count + params.presence_penalty
    ruled_out: set[int] = set()
    if params.allowed_token_ids is not None:
        ruled_out |= set(range(len(logits))) - set(params.allowed_token_ids)
    for word in bad_words:
        before = list(word[:-1])
        if list(output[len(output) - len(before) :]) == before:
            ruled_out.add(word[-1])
    if len(output) < params.min_tokens:
        ruled_out |= set(stop_ids)
    for token_id in ruled_out:
        logits[token_id] = float("-inf")
    return torch.tensor(logits, dtype=torch.float64)


def assert_greedy(
    model: torch.nn.Module,
    prompt: Sequence[int],
    output: Sequence[int],
    params: SamplingParams,
    *,
    bad_words: Sequence[Sequence[int]] = (),
    stop_ids: Sequence[int] = (),
) -> int:
    """Every token of `output` is the most likely one under the rules. Returns how many of them the rules changed."""
    with torch.no_grad():
        raw_NV = model(torch.tensor([[*prompt, *output]])).logits[0].float()
    changed = 0
    for at, token_id in enumerate(output):
        raw_V = raw_NV[len(prompt) + at - 1]
        logits_V = changed_logits(
            raw_V, prompt=prompt, output=output[:at], params=params, bad_words=bad_words, stop_ids=stop_ids
        )
        assert logits_V[token_id] >= logits_V.max() - 1e-4, (at, token_id, int(logits_V.argmax()))
        changed += int(raw_V.argmax()) != token_id
    return changed
