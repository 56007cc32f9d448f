"""`dflash chat`: talk to a running server in the terminal."""

import asyncio
import sys
import time
from dataclasses import dataclass, field
from typing import Annotated, Any

import typer

from cluster.cli.console import BAD_USAGE, fail, stderr, user_errors
from cluster.cli.openai_stream import ApiError, SpecCounts, list_models, normalise_url, open_session, stream

_HELP = "Type a message. /reset forgets the conversation, /quit or Ctrl-D ends, Ctrl-C stops an answer."


@dataclass(frozen=True, kw_only=True)
class AnswerStats:
    """How one answer came. Times in seconds; `decode_s` runs from the first token to the last."""

    ttft_s: float
    decode_s: float
    completion_tokens: int
    spec: SpecCounts | None

    def line(self) -> str:
        """The status line shown under an answer."""
        parts = [f"{self.completion_tokens} tokens"]
        if self.completion_tokens > 1 and self.decode_s > 0:
            parts.append(f"{(self.completion_tokens - 1) / self.decode_s:.1f} tokens/s")
        parts.append(f"first token {self.ttft_s * 1e3:.0f} ms")
        if self.spec is not None and self.spec.acceptance_length is not None:
            parts.append(f"acceptance length {self.spec.acceptance_length:.2f}")
        return ", ".join(parts)


@dataclass(kw_only=True)
class Conversation:
    """Messages so far and the options every turn is sent with."""

    url: str
    model: str
    options: dict[str, Any]
    system: str | None = None
    messages: list[dict[str, str]] = field(default_factory=list)

    def reset(self) -> None:
        """Forget everything but the system prompt."""
        self.messages = [{"role": "system", "content": self.system}] if self.system else []

    async def ask(self, text: str) -> AnswerStats:
        """Send `text`, print the answer as it comes, and keep both. A failed turn is not kept.

        Raises:
            ApiError: the server cannot be reached, refuses the request or breaks the stream.
        """
        turn = [*self.messages, {"role": "user", "content": text}]
        body = {
            "model": self.model,
            "messages": turn,
            "stream": True,
            "stream_options": {"include_usage": True},
        } | self.options
        answer: list[str] = []
        first_s = last_s = None
        completion_tokens = 0
        spec = None
        start_s = time.perf_counter()
        async with open_session(connections=1) as session:
            async for event in stream(session, f"{self.url}/v1/chat/completions", body):
                if event.text:
                    first_s = first_s or event.at_s
                    last_s = event.at_s
                    answer.append(event.text)
                    sys.stdout.write(event.text)
                    sys.stdout.flush()
                completion_tokens = event.completion_tokens or completion_tokens
                spec = event.spec or spec
        sys.stdout.write("\n")
        self.messages = [*turn, {"role": "assistant", "content": "".join(answer)}]
        end_s = time.perf_counter()
        return AnswerStats(
            ttft_s=(first_s or end_s) - start_s,
            decode_s=(last_s - first_s) if first_s is not None and last_s is not None else 0.0,
            completion_tokens=completion_tokens,
            spec=spec,
        )


def chat(
    url: Annotated[str, typer.Option(help="Root of the server.")] = "http://127.0.0.1:8000",
    model: Annotated[str | None, typer.Option(help="Model name. Default: the first that the server lists.")] = None,
    system: Annotated[str | None, typer.Option(help="System prompt.")] = None,
    temperature: Annotated[float | None, typer.Option(min=0.0, max=2.0, help="Default: the server's.")] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest answer in tokens.")] = 512,
    seed: Annotated[int | None, typer.Option(help="Seed of sampled answers.")] = None,
    once: Annotated[str | None, typer.Option(help="Ask this one thing, print the answer and leave.")] = None,
) -> None:
    """Chat with a running server; shows tokens/s, first-token time and acceptance length after each answer."""
    with user_errors(ValueError):
        url = normalise_url(url)
    options: dict[str, Any] = {"max_tokens": max_tokens}
    options |= {key: value for key, value in (("temperature", temperature), ("seed", seed)) if value is not None}
    try:
        served = asyncio.run(_models(url))
    except ApiError as error:
        fail(f"{error}\nIs the server up? Start it with: dflash serve configs/smollm2-135m.yaml")
    if not served and model is None:
        fail(f"{url} serves no model")
    if model is not None and model not in served:
        fail(f"--model: {model!r} is not served; served: {', '.join(served)}", status=BAD_USAGE)
    conversation = Conversation(url=url, model=model or served[0], options=options, system=system)
    conversation.reset()
    if once is not None:
        if not once.strip():
            fail("--once: the text is empty", status=BAD_USAGE)
        with user_errors(ApiError, status=1):
            stats = asyncio.run(conversation.ask(once))
        stderr().print(stats.line(), style="dim")
        return
    _interactive(conversation)


def _interactive(conversation: Conversation) -> None:
    err = stderr()
    err.print(f"{conversation.model} at {conversation.url}. {_HELP}", style="dim", markup=False)
    while True:
        try:
            text = input("> ").strip()
        except (EOFError, KeyboardInterrupt):
            err.print()
            return
        if not text:
            continue
        if text in ("/quit", "/exit"):
            return
        if text == "/reset":
            conversation.reset()
            err.print("conversation forgotten", style="dim")
            continue
        if text.startswith("/"):
            err.print(f"unknown command {text.split()[0]}. {_HELP}", style="dim", markup=False)
            continue
        try:
            err.print(asyncio.run(conversation.ask(text)).line(), style="dim")
        except KeyboardInterrupt:
            err.print("\nstopped; this turn is forgotten", style="dim")
        except ApiError as error:
            err.print(f"error: {error}", style="bold red", markup=False)


async def _models(url: str) -> list[str]:
    async with open_session(connections=1) as session:
        return await list_models(session, url)
