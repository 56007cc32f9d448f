"""How long a decode step takes at each (batch bucket, draft length), measured on the device before it serves.

The steps are real ones, of requests made for it, planned by an `EngineCore` of its own over the same runner. By default
contexts are short, so the times are lower bounds; their proportions are what a controller needs.
"""

import itertools
import logging
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

from engine.config.engine import EngineConfig
from engine.core import EngineCore, Runner
from engine.request import EngineRequest
from engine.sampling_params import SamplingParams
from engine.speculative.counters import StepTime, batch_bucket
from engine.step import StepPlan

logger = logging.getLogger(__name__)

_WARM_STEPS = 1  # decode steps before those that count: memory is touched, code compiled
_STEPS = 3
_PASSES = 5  # over all pairs, each of them as long as under half of the budget is spent


def measure_step_times(
    config: EngineConfig,
    runner: Runner,
    *,
    broadcast: Callable[[StepPlan], None] | None = None,
    budget_s: float,
    context: int = 1,
    now: Callable[[], float] = time.perf_counter,
) -> tuple[StepTime, ...]:
    """Seconds of a decode-only step by (bucket, K), as far as `budget_s` goes, the telling pairs first.

    A pair's is the median over several passes, so that what else a host does for a moment, such as start the next
    replica, does not stick to the pair that was measured just then.
    context: tokens of each row's prompt. Pairs that do not fit into the cache or into one step are left out.
    The runner must be idle and is so afterwards; its cache holds nothing that a later request may reuse.
    """
    core = EngineCore(
        config=replace(
            config, gate_window=0, enable_prefix_caching=False, shadow_time_share=0.0, inter_token_target_ms=None
        ),
        runner=runner,
        broadcast=broadcast,
    )
    start = now()
    pairs = list(_telling_first(config))
    versions = itertools.count(1)
    seconds_of: dict[tuple[int, int], list[float]] = {}
    for number, (rows, draft_len) in enumerate(_PASSES * pairs):
        is_first_pass = number < len(pairs)
        if now() - start >= (budget_s if is_first_pass else budget_s / 2):
            if is_first_pass:
                logger.info("Step times: %d of %d pairs measured in %g s", number, len(pairs), budget_s)
            break
        seconds = _measure(core, config, rows, draft_len, version=next(versions), context=context)
        if seconds is not None:
            seconds_of.setdefault((rows, draft_len), []).append(seconds)
    return tuple(
        StepTime(batch_bucket=rows, draft_len=draft_len, seconds=statistics.median(found))
        for (rows, draft_len), found in seconds_of.items()
    )


def _telling_first(config: EngineConfig) -> Iterator[tuple[int, int]]:
    """All (bucket, K): for every bucket the smallest and the largest K, then those halving the gaps."""
    limit = config.max_num_seqs
    buckets = sorted({batch_bucket(rows, limit) for rows in range(1, limit + 1)})
    gaps = [(0, len(config.draft_len_choices) - 1)]
    order = [0, gaps[0][1]] if gaps[0][1] else [0]
    while gaps:
        low, high = gaps.pop(0)
        middle = (low + high) // 2
        if middle not in (low, high):
            order.append(middle)
            gaps += [(low, middle), (middle, high)]
    for index in order:
        for bucket in buckets:
            yield bucket, config.draft_len_choices[index]


def _measure(
    core: EngineCore, config: EngineConfig, rows: int, draft_len: int, *, version: int, context: int
) -> float | None:
    """One pair; None when so many requests do not fit into the cache or into one step."""
    core.apply_schedule((1, version), {rows: draft_len})
    num_reading = rows * context // max(config.max_num_batched_tokens - rows * (draft_len + 1), 1)  # steps with prompts
    num_steps = 1 + num_reading + config.pipeline_depth + _WARM_STEPS + _STEPS
    max_tokens = min(2 + (draft_len + 1) * (num_steps + 1), config.max_model_len - context)
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
    for number in range(rows):
        try:
            core.add_request(EngineRequest(request_id=str(number), prompt_token_ids=(0,) * context, params=params))
        except ValueError:  # longer than the cache
            return None
    warm: tuple[int, float] | None = None
    found = _decoded(core, rows, draft_len)  # in earlier passes
    warm_at = found[0] + _WARM_STEPS
    for _ in range(num_steps):
        if core.has_work() and found[0] < warm_at + _STEPS:
            core.step()
            found = _decoded(core, rows, draft_len)
            if warm is None and found[0] >= warm_at:
                warm = found
    for number in range(rows):
        core.abort(str(number))
    while core.has_work():
        core.step()
    if warm is None or found[0] == warm[0] or found[1] <= warm[1]:
        return None
    return (found[1] - warm[1]) / (found[0] - warm[0])


def _decoded(core: EngineCore, rows: int, draft_len: int) -> tuple[int, float]:
    """Decode-only steps of a pair so far, and their seconds."""
    for cell in core.counters().cells:
        if (cell.batch_bucket, cell.draft_len) == (rows, draft_len):
            return cell.decode_steps, cell.decode_time_s
    return 0, 0.0
