"""Bodies of finished responses, and the stream of chunks of an unfinished one."""

from collections.abc import AsyncIterator, Sequence
from typing import Any

import msgspec

from cluster.openai.choice import Choice, ChoiceUpdate, FormatPrompt
from cluster.openai.errors import ApiError
from cluster.openai.generation import Generation, as_api_error
from cluster.openai.logprobs import merge_logprobs
from cluster.openai.sse import DONE, ChunkWriter, event


class ResponseForm(msgspec.Struct, frozen=True, kw_only=True):
    """How a response is to look.

    echoes: text put in front of each choice (completions with echo), by choice index; empty for none.
    format_prompt: the form of `prompt_logprobs`; None if the client did not ask for them.
    system_fingerprint: what the field of that name says, None to leave it out.
    """

    response_id: str
    created: int
    model: str
    chat: bool
    include_usage: bool
    continuous_usage: bool
    return_token_ids: bool
    echoes: tuple[str, ...] = ()
    format_prompt: FormatPrompt | None = None
    system_fingerprint: str | None = None

    def echo(self, index: int) -> str:
        """Text in front of choice `index`."""
        return self.echoes[index] if self.echoes else ""


def response_body(generation: Generation, form: ResponseForm) -> bytes:
    """The JSON of a response whose choices are finished."""
    body: dict[str, Any] = {
        "id": form.response_id,
        "object": "chat.completion" if form.chat else "text_completion",
        "created": form.created,
        "model": form.model,
        "choices": [_choice_body(choice, form) for choice in generation.choices],
        "usage": generation.usage(),
    }
    if form.system_fingerprint is not None:
        body["system_fingerprint"] = form.system_fingerprint
    metrics = _metrics(generation)
    if metrics is not None:
        body["metrics"] = metrics
    if form.return_token_ids and form.chat:
        body["prompt_token_ids"] = generation.choices[0].request.prompt_token_ids
    if form.format_prompt is not None and form.chat:
        body["prompt_logprobs"] = form.format_prompt(generation.choices[0].state.prompt_logprobs or ())
    return msgspec.json.encode(body)


def _choice_body(choice: Choice, form: ResponseForm) -> dict[str, Any]:
    body: dict[str, Any] = {"index": choice.index}
    if form.chat:
        body["message"] = {"role": "assistant", "content": choice.state.text, "refusal": None}
    else:
        body["text"] = form.echo(choice.index) + choice.state.text
    body["logprobs"] = merge_logprobs(choice.logprobs)
    body["finish_reason"] = choice.finish_reason
    body["stop_reason"] = choice.state.stop_reason
    if form.return_token_ids:
        body["token_ids"] = choice.state.token_ids
        if not form.chat:
            body["prompt_token_ids"] = choice.request.prompt_token_ids
    if form.format_prompt is not None and not form.chat:
        body["prompt_logprobs"] = form.format_prompt(choice.state.prompt_logprobs or ())
    return body


def _metrics(generation: Generation) -> dict[str, Any] | None:
    """vLLM's statistics of speculation; they describe one sequence, so only a response of one choice has them."""
    if len(generation.choices) != 1:
        return None
    stats = generation.choices[0].state.spec_stats()
    return None if stats is None else {"speculative_decoding": stats}


async def response_chunks(generation: Generation, form: ResponseForm) -> AsyncIterator[bytes]:
    """The stream of a started generation; one item per engine step and choice.

    A failure becomes an error event. Whatever happens, the last event is [DONE], and a choice that ends has a
    finish_reason.
    """
    writer = ChunkWriter(
        response_id=form.response_id,
        created=form.created,
        model=form.model,
        chat=form.chat,
        include_usage=form.include_usage,
        system_fingerprint=form.system_fingerprint,
    )
    seen: set[int] = set()
    try:
        async for update in generation.updates():
            usage = generation.usage() if form.continuous_usage else None
            parts: list[bytes] = []
            text = update.text
            prompt_ids: Sequence[int] | None = None
            if update.index not in seen:
                seen.add(update.index)
                text = form.echo(update.index) + text
                if form.return_token_ids:
                    prompt_ids = generation.choices[update.index].request.prompt_token_ids
                if form.chat:
                    parts.append(writer.role(update.index, prompt_token_ids=prompt_ids))
                    prompt_ids = None
            token_ids = update.token_ids if form.return_token_ids else None
            if text or token_ids or update.logprobs is not None or prompt_ids is not None:
                parts.append(
                    writer.content(
                        update.index,
                        text,
                        logprobs=update.logprobs,
                        token_ids=token_ids,
                        prompt_token_ids=prompt_ids,
                        usage=usage,
                    )
                )
            parts += _terminal(writer, update, usage)
            if parts:
                yield b"".join(parts)
        tail = writer.usage(generation.usage(), _metrics(generation)) if form.include_usage else b""
        yield tail + DONE
    except Exception as error:
        yield error_events(as_api_error(error, request_id=form.response_id))


def _terminal(writer: ChunkWriter, update: ChoiceUpdate, usage: Any) -> list[bytes]:
    if update.finish_reason is None:
        return []
    return [
        writer.terminal(update.index, finish_reason=update.finish_reason, stop_reason=update.stop_reason, usage=usage)
    ]


def error_events(error: ApiError) -> bytes:
    """How a started stream ends when it fails."""
    return event(error.encode()) + DONE
