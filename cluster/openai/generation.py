"""The choices of one response, run by the engine side by side: submit, merge, abort what is left.

A `Generation` owns its choices' engine requests and its admission ticket from construction to `close`, which is called
in a `finally`: when the client hangs up, the handler is cancelled and the engine is told.
"""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from typing import Protocol

from cluster.admission import RETRY_AFTER_S, Ticket
from cluster.openai.choice import Choice, ChoiceUpdate
from cluster.openai.errors import ApiError, from_value_error, internal_error, unavailable
from cluster.openai.usage import Usage, make_usage
from engine.request import EngineRequest, TokenDelta
from engine.sampling_params import SamplingParams
from workers.errors import EngineClosedError, EngineDeadError

logger = logging.getLogger(__name__)

# What an engine's refusal may blame, by the name its message starts with.
_REQUEST_FIELDS = ("prompt", "prompt_token_ids", *SamplingParams.__struct_fields__)


class Engine(Protocol):
    """What the API needs of `workers.engine_client.EngineClient`."""

    def submit(self, request: EngineRequest) -> AsyncGenerator[TokenDelta, None]:
        """Deltas of one request until its finish_reason; raises ValueError (a refusal) or EngineDeadError."""
        ...

    def abort(self, request_id: str) -> None:
        """Stop a request; unknown ids are no error."""
        ...

    async def check_health(self) -> None:
        """Returns after a round trip through the engine loop; raises EngineDeadError."""
        ...


class GenerationObserver(Protocol):
    """Told about the progress of generations (metrics)."""

    def on_first_token(self, seconds: float) -> None:
        """Time from the request's arrival to its first token."""
        ...

    def on_finish(
        self, *, reason: str, prompt_tokens: int, generated: int, seconds: float, decode_seconds: float
    ) -> None:
        """A choice ended; reason: its finish_reason, "abort" or "error"; decode_seconds: since its first token."""
        ...


class Generation:
    """Runs `choices` and yields their updates in the order in which the engine's steps arrive.

    Args:
        arrived: time.monotonic() at the request's arrival.
    """

    def __init__(
        self, *, engine: Engine, choices: Sequence[Choice], ticket: Ticket, observer: GenerationObserver, arrived: float
    ) -> None:
        self.choices = tuple(choices)
        self._engine = engine
        self._ticket = ticket
        self._observer = observer
        self._arrived = arrived
        self._first: ChoiceUpdate | None = None
        self._updates = self._single(self.choices[0]) if len(self.choices) == 1 else self._merged()
        self._in_engine: set[str] = set()
        self._is_closed = False

    async def start(self) -> None:
        """Wait for the first token, so that everything before it can be an HTTP error.

        Raises:
            ApiError: the engine refused or failed.
        """
        self._first = await anext(self._updates)
        self._observer.on_first_token(time.monotonic() - self._arrived)

    async def updates(self) -> AsyncIterator[ChoiceUpdate]:
        """Updates of all choices, one per engine step and choice; every choice ends with a finish_reason.

        Raises:
            ApiError: the engine failed, or ended a choice without a finish_reason.
        """
        assert self._first is not None, "start() comes first"
        yield self._first
        async for update in self._updates:
            yield update

    async def close(self) -> None:
        """Abort what still runs and give the places back. Safe to call more than once."""
        if self._is_closed:
            return
        self._is_closed = True
        for request_id in self._in_engine:
            self._engine.abort(request_id)
        self._ticket.release()
        for choice in self.choices:
            if choice.request.request_id in self._in_engine:
                self._report(choice, "abort")
        await self._updates.aclose()

    def usage(self) -> Usage:
        """Counts so far."""
        usages = [choice.state.usage() for choice in self.choices]
        prompts = [usage for usage, choice in zip(usages, self.choices, strict=True) if choice.counts_prompt]
        accepted = sum(usage.accepted_prediction_tokens for usage in usages)
        rejected = sum(usage.rejected_prediction_tokens for usage in usages)
        return make_usage(
            prompt_tokens=sum(usage.prompt_tokens for usage in prompts),
            cached_tokens=sum(usage.cached_tokens for usage in prompts),
            completion_tokens=sum(usage.completion_tokens for usage in usages),
            num_accepted=accepted,
            num_rejected=rejected,
        )

    async def _single(self, choice: Choice) -> AsyncGenerator[ChoiceUpdate, None]:
        """Updates of one choice, straight from the engine's deltas."""
        if not choice.needs_engine:
            yield choice.finish_empty()
            return
        request_id = choice.request.request_id
        self._in_engine.add(request_id)
        deltas = self._engine.submit(choice.request)
        try:
            while choice.finish_reason is None:
                delta = await self._next_delta(deltas, choice)
                if delta.finish_reason is not None:
                    self._in_engine.discard(request_id)
                if delta.finish_reason in ("error", "abort"):
                    logger.error("The engine ended request %s: %s", request_id, delta.error or delta.finish_reason)
                    self._report(choice, delta.finish_reason)
                    if delta.error is not None:  # written for the client (see TokenDelta)
                        raise internal_error(f"The engine could not finish the request: {delta.error}.")
                    raise internal_error()
                if delta.prompt_logprobs is not None:
                    choice.take_prompt_logprobs(delta)
                    continue
                if choice.first_token_at is None:
                    choice.first_token_at = time.monotonic()
                if choice.echo_only:
                    update, must_abort = choice.finish_empty(), delta.finish_reason is None
                else:
                    update, must_abort = choice.update(delta)
                if must_abort:
                    self._engine.abort(request_id)
                    self._in_engine.discard(request_id)
                if update.finish_reason is not None:
                    self._report(choice, update.finish_reason)
                yield update
        finally:
            await deltas.aclose()

    async def _next_delta(self, deltas: AsyncGenerator[TokenDelta, None], choice: Choice) -> TokenDelta:
        """The engine's next delta of a choice; what goes wrong in the engine becomes an ApiError here."""
        try:
            return await anext(deltas)
        except StopAsyncIteration:
            logger.error("The engine's stream of %s ended without a finish_reason.", choice.request.request_id)
            error = internal_error()
        except ValueError as refusal:
            error = from_value_error(choice.in_request_fields(refusal), _REQUEST_FIELDS)
        except EngineClosedError:
            error = unavailable(
                "The server is shutting down and ended this request; try again.", retry_after_s=RETRY_AFTER_S
            )
        except EngineDeadError:
            error = unavailable(
                "The engine stopped while it worked on this request and is being replaced; try again.",
                retry_after_s=RETRY_AFTER_S,
            )
        self._in_engine.discard(choice.request.request_id)
        self._report(choice, "error")
        raise error

    async def _merged(self) -> AsyncGenerator[ChoiceUpdate, None]:
        """Updates of several choices through one bounded queue; the first failure ends all."""
        queue: asyncio.Queue[ChoiceUpdate | BaseException] = asyncio.Queue(maxsize=2 * len(self.choices))

        async def pump(choice: Choice) -> None:
            try:
                async with aclosing(self._single(choice)) as updates:
                    async for update in updates:
                        await queue.put(update)
            except BaseException as error:
                task = asyncio.current_task()
                assert task is not None
                if task.cancelling():
                    raise
                await queue.put(error)  # a cancellation too, if it was not of this task: somebody waits for the choice

        tasks = [asyncio.create_task(pump(choice)) for choice in self.choices]
        try:
            num_running = len(tasks)
            while num_running:
                item = await queue.get()
                if isinstance(item, BaseException):
                    raise item
                num_running -= item.finish_reason is not None
                yield item
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _report(self, choice: Choice, reason: str) -> None:
        now = time.monotonic()
        self._observer.on_finish(
            reason=reason,
            prompt_tokens=len(choice.request.prompt_token_ids),
            generated=len(choice.state.token_ids),
            seconds=now - self._arrived,
            decode_seconds=0.0 if choice.first_token_at is None else now - choice.first_token_at,
        )


def as_api_error(error: Exception, *, request_id: str) -> ApiError:
    """The error a client gets for `error`; anything but an ApiError is logged with its traceback."""
    if isinstance(error, ApiError):
        return error
    logger.error("Request %s failed.", request_id, exc_info=error)
    return internal_error()
