"""The load generator of `dflash bench`: sends prompts closed loop or open loop and records what came back when.

Times are `time.perf_counter` seconds. In open loop a request's clock starts at its scheduled arrival, so a client that
falls behind cannot make the server look faster.
"""

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp

from cluster.cli.openai_stream import ApiError, SpecCounts, stream

# Common short words; a synthetic prompt is a seeded draw of them, one to two tokens each in any tokenizer.
_WORDS = (
    "the of and to in is you that it he was for on are as with his they at be this have from or one had by word but "
    "not what all were we when your can said there use an each which she do how their if will up other about out many "
    "then them these so some her would make like him into time has look two more write go see number no way could "
    "people my than first water been call who oil its now find long down day did get come made may part"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestRecord:
    """One request. `event_times_s` are the arrivals of events with text; `error` is its kind, None if it succeeded."""

    index: int
    start_s: float
    end_s: float
    event_times_s: tuple[float, ...] = ()
    prompt_tokens: int = 0
    completion_tokens: int = 0
    finish_reason: str | None = None
    spec: SpecCounts | None = None
    error: str | None = None
    error_message: str | None = None


@dataclass(frozen=True, kw_only=True)
class LoadPlan:
    """What to send. Exactly one of concurrency (closed loop) and rate (open loop, requests/s, Poisson) is set."""

    url: str
    path: str
    bodies: Sequence[dict[str, Any]]
    concurrency: int | None
    rate: float | None
    seed: int

    def arrivals_s(self) -> list[float]:
        """Open loop: seconds after the start at which each request is due; the first is due at once."""
        assert self.rate is not None
        gaps = random.Random(self.seed)
        due_s, times = 0.0, []
        for _ in self.bodies:
            times.append(due_s)
            due_s += gaps.expovariate(self.rate)
        return times


def synthetic_prompts(num: int, *, num_words: int, seed: int) -> list[str]:
    """`num` different prompts of `num_words` words, the same for the same seed."""
    draw, words = random.Random(seed), _WORDS.split()
    return [" ".join(draw.choice(words) for _ in range(num_words)) for _ in range(num)]


def prompts_from_json(data: object, *, subset: str | None) -> list[str]:
    """Prompts of a JSON file: a list, or an object of named lists; items are texts or objects with a `prompt`.

    Raises:
        ValueError: another shape, an empty list, or a `subset` that is not in the file.
    """
    if isinstance(data, dict):
        if subset is not None and subset not in data:
            raise ValueError(f"--subset: the prompt file has no {subset!r}; it has {', '.join(map(str, data))}")
        data = data[subset] if subset is not None else [item for group in data.values() for item in group]
    elif subset is not None:
        raise ValueError("--subset: the prompt file is a plain list without named sets; leave the option out")
    if not isinstance(data, list) or not data:
        raise ValueError("the prompt file must hold a non-empty list of prompts, or an object of such lists")
    prompts: list[str] = []
    for index, item in enumerate(data):
        prompt = item.get("prompt") if isinstance(item, dict) else item
        if not isinstance(prompt, str) or not prompt:
            raise ValueError(
                f"prompt {index} of the prompt file is neither a text nor an object with a text under prompt"
            )
        prompts.append(prompt)
    return prompts


async def run_load(
    session: aiohttp.ClientSession, plan: LoadPlan, on_done: Callable[[RequestRecord], None]
) -> list[RequestRecord]:
    """Send every body of the plan and return one record each, in the order of the bodies."""
    address = plan.url + plan.path

    async def one(index: int, start_s: float) -> RequestRecord:
        record = await _send(session, address, plan.bodies[index], index, start_s)
        on_done(record)
        return record

    if plan.rate is not None:
        begin_s = time.perf_counter()

        async def due(index: int, offset_s: float) -> RequestRecord:
            await asyncio.sleep(begin_s + offset_s - time.perf_counter())
            return await one(index, begin_s + offset_s)

        return list(await asyncio.gather(*(due(i, offset_s) for i, offset_s in enumerate(plan.arrivals_s()))))

    assert plan.concurrency is not None
    records: list[RequestRecord] = []
    waiting = iter(range(len(plan.bodies)))

    async def client() -> None:
        for index in waiting:  # shared by all clients: each takes the next body when its last request has ended
            records.append(await one(index, time.perf_counter()))

    await asyncio.gather(*(client() for _ in range(plan.concurrency)))
    return sorted(records, key=lambda record: record.index)


async def _send(
    session: aiohttp.ClientSession, address: str, body: dict[str, Any], index: int, start_s: float
) -> RequestRecord:
    times: list[float] = []
    prompt_tokens = completion_tokens = 0
    finish_reason: str | None = None
    spec: SpecCounts | None = None
    error: ApiError | None = None
    try:
        async for event in stream(session, address, body):
            if event.text:
                times.append(event.at_s)
            prompt_tokens = event.prompt_tokens or prompt_tokens
            completion_tokens = event.completion_tokens or completion_tokens
            finish_reason = event.finish_reason or finish_reason
            spec = event.spec or spec
    except ApiError as failure:
        error = failure
    return RequestRecord(
        index=index,
        start_s=start_s,
        end_s=time.perf_counter(),
        event_times_s=tuple(times),
        prompt_tokens=prompt_tokens,
        completion_tokens=completion_tokens,
        finish_reason=finish_reason,
        spec=spec,
        error=error.kind if error else None,
        error_message=str(error) if error else None,
    )
