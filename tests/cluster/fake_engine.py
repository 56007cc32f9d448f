"""A scripted engine, a small real tokenizer and a server in a thread: what the API tests run against."""

import asyncio
import contextlib
import random
import socket
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import openai
import uvicorn

from cluster.admission import Admission, ReplicaState
from cluster.metrics import ServeMetrics
from cluster.openai.api import create_app
from cluster.openai.params import SamplingDefaults
from cluster.openai.service import OpenAIService, ServedModel
from engine.request import EngineRequest, TokenDelta
from engine.step import TokenLogprobs
from engine.tokenizer import Tokenizer
from tests.stats import engine_stats

MODEL = "toy/model"
MAX_MODEL_LEN = 400
MAX_DRAFT_LEN = 7
EOS = "<|im_end|>"


def build_tokenizer(directory: Path) -> Tokenizer:
    """A byte-level BPE tokenizer with a ChatML template, saved to `directory` and loaded as the engine loads one."""
    # Imported here: this module travels to replicas by value, and these extension modules do not.
    from tokenizers import Tokenizer as RustTokenizer
    from tokenizers import decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    rust = RustTokenizer(models.BPE())
    rust.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    rust.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        special_tokens=["<|endoftext|>", "<|im_start|>", EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    rust.train_from_iterator(["the quick brown fox jumps over the lazy dog and then the other one"] * 20, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=rust, eos_token=EOS, bos_token="<|endoftext|>")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>"]})
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m.content == 'refuse me' %}{{ raise_exception('no such message') }}{% endif %}"
        "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>' + '\n' }}{% endfor %}"
        "{% if tone is defined %}{{ tone }}{% endif %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )
    tokenizer.save_pretrained(str(directory))
    return Tokenizer.load(directory)


class FakeEngine:
    """Answers every request with `text` (or one text per choice), in steps of random size, `delay_s` apart.

    Records submitted requests and aborts. `fail_after`: the error raised after that many steps of each request.
    `ended`: once set, every open request fails with it.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.text: Callable[[EngineRequest], str] | str = "the quick brown fox"
        self.step_sizes: Callable[[EngineRequest], Iterator[int]] = lambda request: _random_sizes(request)
        self.delay_s = 0.0
        self.gate: threading.Event | None = None  # when given, no step happens before it is set
        self.fail_after: int | None = None
        self.failure: Exception | TokenDelta | None = None
        self.ended: Exception | None = None
        self.healthy = True
        self.requests: list[EngineRequest] = []
        self.aborted: list[str] = []
        self.num_open = 0

    async def submit(self, request: EngineRequest) -> AsyncGenerator[TokenDelta, None]:
        self.requests.append(request)
        self.num_open += 1
        try:
            async for delta in self._deltas(request):
                yield delta
        finally:
            self.num_open -= 1

    async def _deltas(self, request: EngineRequest) -> AsyncIterator[TokenDelta]:
        text = self.text if isinstance(self.text, str) else self.text(request)
        eos = self.tokenizer.encode(EOS, add_special_tokens=False)
        ids = self.tokenizer.encode(text, add_special_tokens=False) + eos
        limit = request.params.max_tokens
        assert limit is not None
        reason = "length" if limit < len(ids) else "stop"
        ids = ids[:limit]
        sizes = self.step_sizes(request)
        step = 0
        for part in self._prompt_logprobs(request):
            yield TokenDelta(request_id=request.request_id, prompt_logprobs=part)
        while ids:
            while self.gate is not None and not self.gate.is_set():
                await asyncio.sleep(0.002)
            await self._pause(request, step)
            if step == self.fail_after:
                if isinstance(self.failure, Exception):
                    raise self.failure
                if self.failure is not None:
                    yield self.failure
                return
            size = 1 if step == 0 else min(next(sizes), MAX_DRAFT_LEN + 1)
            block, ids = ids[:size], ids[size:]
            yield TokenDelta(
                request_id=request.request_id,
                token_ids=tuple(block),
                finish_reason=None if ids else reason,
                logprobs=tuple(_logprobs_of(token, request.params.logprobs) for token in block)
                if request.params.logprobs is not None
                else None,
                num_drafted=0 if step == 0 else MAX_DRAFT_LEN,
                num_accepted=0 if step == 0 else len(block) - 1,
                is_decode_step=step > 0,
                num_cached_tokens=3,
            )
            step += 1

    async def _pause(self, request: EngineRequest, step: int) -> None:
        """Prompts that begin with "wait" get no first token, those with "slow" one token in 0.1 s."""
        prompt = self.tokenizer.decode(request.prompt_token_ids)
        is_waiting = step == 0 and prompt.startswith("wait")
        deadline_s = time.monotonic() + (3600 if is_waiting else 0.1 if prompt.startswith("slow") else self.delay_s)
        while self.ended is None and (left_s := deadline_s - time.monotonic()) > 0:
            await asyncio.sleep(min(left_s, 0.02))
        if self.ended is not None:
            raise self.ended

    def _prompt_logprobs(self, request: EngineRequest) -> Iterator[tuple[TokenLogprobs, ...]]:
        """Those of the prompt's tokens from the second on, at most four at a time."""
        count, ids = request.params.prompt_logprobs, request.prompt_token_ids[1:]
        if count is not None:
            for start in range(0, len(ids), 4):
                yield tuple(_logprobs_of(token, count) for token in ids[start : start + 4])

    def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)

    async def stats(self) -> Any:
        await self.check_health()
        return engine_stats(
            num_running=2, num_waiting=1, free_blocks=4, cached_blocks=2, total_blocks=8, kv_usage=0.25, draft_len=7
        )

    async def counters(self) -> Any:
        return SimpleNamespace(
            num_drafts=10,
            num_draft_tokens=70,
            num_accepted_tokens=25,
            num_accepted_tokens_per_pos=(10, 8, 7, 0, 0, 0, 0),
            prompt_tokens=100,
            generation_tokens=35,
            preemptions=1,
            prefix_cache_queries=100,
            prefix_cache_hits=48,
            prefix_cache_evictions=5,
        )

    async def check_health(self) -> None:
        if not self.healthy:
            from workers.engine_client import EngineDeadError

            raise EngineDeadError("rank 0 exited with code 9")


def _logprobs_of(token: int, count: int) -> TokenLogprobs:
    others = [5 + index for index in range(count)]
    return TokenLogprobs(
        token_id=token,
        logprob=-0.25,
        rank=1,
        top_ids=tuple([token, *others][:count]),
        top_logprobs=tuple([-0.25, *[-1.0 - index for index in range(count)]][:count]),
    )


def _random_sizes(request: EngineRequest) -> Iterator[int]:
    generator = random.Random(len(request.prompt_token_ids))
    while True:
        yield generator.randint(1, 8)


class ApiServer:
    """The app under uvicorn in a thread, with the parts a test turns. engine: a scripted one unless given."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        max_num_seqs: int = 4,
        queue_limit: int = 60,
        engine: Any = None,
        fabrication: str | None = None,
    ) -> None:
        self.engine = FakeEngine(tokenizer) if engine is None else engine
        self.tokenizer = tokenizer
        self.admission = Admission(max_num_seqs=max_num_seqs, queue_limit=queue_limit)
        self.admission.state = ReplicaState.READY
        self.metrics = ServeMetrics(model_name=MODEL, replica="r1", admission=self.admission)
        self.service = OpenAIService(
            engine=self.engine,
            tokenizer=tokenizer,
            model=ServedModel(
                name=MODEL,
                root="toy",
                max_model_len=MAX_MODEL_LEN,
                vocab_size=tokenizer.vocab_size,
                max_draft_len=MAX_DRAFT_LEN,
                created=1_700_000_000,
                fabrication=fabrication,
            ),
            admission=self.admission,
            observer=self.metrics,
            defaults=SamplingDefaults(),
        )
        app = create_app(
            self.service,
            max_body_bytes=20_000,
            health_timeout_s=0.5,
            render_metrics=lambda: self.metrics.render(self.engine),
        )
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port: int = probe.getsockname()[1]
        config = uvicorn.Config(app, host="127.0.0.1", port=self.port, log_level="warning", lifespan="off")
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, daemon=True)
        self.http = httpx.Client(base_url=self.url, timeout=20)

    def start(self) -> None:
        self._thread.start()
        deadline = time.monotonic() + 20
        while not self._server.started:
            assert time.monotonic() < deadline, "the server did not start"
            time.sleep(0.01)

    def stop(self) -> None:
        self.http.close()
        self._server.should_exit = True
        self._thread.join(timeout=10)
        assert not self._thread.is_alive()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def client(self, *, strict: bool = True, **options: Any) -> openai.OpenAI:
        """strict: off for streamed completions and echoed log-probabilities only: there the SDK's types lack nulls that
        OpenAI sends (finish_reason, the first token's)."""
        return openai.OpenAI(
            base_url=self.url + "/v1",
            api_key="none",
            max_retries=0,
            timeout=20,
            _strict_response_validation=strict,
            **options,
        )

    def reset(self) -> None:
        """Back to defaults between tests, after the last test's requests are gone."""
        self.wait_idle()
        self.engine.__init__(self.tokenizer)  # type: ignore[misc]
        self.admission.state = ReplicaState.READY

    def wait_idle(self) -> None:
        deadline = time.monotonic() + 5
        while self.admission.num_admitted or self.engine.num_open:
            assert time.monotonic() < deadline, "places or engine requests leaked"
            time.sleep(0.005)


@contextlib.contextmanager
def running(server: ApiServer) -> Iterator[ApiServer]:
    """Start and stop a server."""
    server.start()
    try:
        yield server
    finally:
        server.stop()


def fixed_sizes(*sizes: int) -> Callable[[EngineRequest], Iterator[int]]:
    """Step sizes after the first token, the last one repeated."""

    def generate(_: EngineRequest) -> Iterator[int]:
        yield from sizes
        while True:
            yield sizes[-1]

    return generate


def texts_by_prompt(texts: Sequence[str]) -> Callable[[EngineRequest], str]:
    """Texts by the last digits of the engine request's id, which are the choice's index."""
    return lambda request: texts[int(request.request_id.rsplit("-", 1)[1])]
