"""`OpenAIService`: what the routes do, without HTTP. Validated requests in, pending generations and bodies out."""

import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from cluster.admission import Admission
from cluster.openai.choice import Choice, FormatLogprobs, FormatPrompt
from cluster.openai.errors import invalid, model_not_found
from cluster.openai.fields import UnmodelledFields
from cluster.openai.generation import Engine, Generation, GenerationObserver
from cluster.openai.logprobs import Entry, LogprobTracker, chat_logprobs, completion_logprobs
from cluster.openai.params import SamplingDefaults, chat_budget, sampling_params, text_budget
from cluster.openai.prompt_logprobs import EchoedPrompt, prompt_logprobs_body
from cluster.openai.protocol import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    GenerationRequest,
    TokenizeRequest,
)
from cluster.openai.responses import ResponseForm
from cluster.openai.tokenization import (
    check_token_ids,
    encode_bad_words,
    encode_messages,
    encode_prompt,
    off_loop,
    special_token_ids,
)
from engine.detokenizer import Detokenizer
from engine.output_processor import RequestState
from engine.request import EngineRequest
from engine.tokenizer import Tokenizer


class ServedModel(msgspec.Struct, frozen=True, kw_only=True):
    """The one model of a server. name: its id in the API; root: where it came from; created: unix seconds.

    max_draft_len: the most drafts a step may verify, 0 without a drafter.
    fabrication: why the tokens mean nothing, "simulated" or "synthetic"; every response says so. None: they are real.
    """

    name: str
    root: str
    max_model_len: int
    vocab_size: int
    max_draft_len: int
    created: int
    fabrication: str | None = None

    def card(self) -> dict[str, Any]:
        """OpenAI's model object with vLLM's additions."""
        return {
            "id": self.name,
            "object": "model",
            "created": self.created,
            "owned_by": "dflash-serve",
            "root": self.root,
            "parent": None,
            "max_model_len": self.max_model_len,
        }


class PendingGeneration(msgspec.Struct, frozen=True, kw_only=True):
    """A request that passed every check but admission. `open` takes its places and makes the generation."""

    open: Callable[[], Generation]
    form: ResponseForm
    stream: bool


class OpenAIService:
    """The API over one engine.

    Args:
        defaults: sampling values for fields that a request leaves out.
    """

    def __init__(
        self,
        *,
        engine: Engine,
        tokenizer: Tokenizer,
        model: ServedModel,
        admission: Admission,
        observer: GenerationObserver,
        defaults: SamplingDefaults,
    ) -> None:
        self.engine = engine
        self.model = model
        self.admission = admission
        self._tokenizer = tokenizer
        self._observer = observer
        self._defaults = defaults
        self._fields = UnmodelledFields()
        self._special_ids = special_token_ids(tokenizer)

    async def chat(self, request: ChatCompletionRequest) -> PendingGeneration:
        """Check and tokenise a chat request. Raises ApiError."""
        arrived = time.monotonic()
        self._check(request, num_prompts=1)
        template_kwargs = dict(request.chat_template_kwargs or {})
        if request.reasoning_effort is not None:
            template_kwargs.setdefault("reasoning_effort", request.reasoning_effort)
        prompt = await encode_messages(
            self._tokenizer,
            request.messages,
            add_generation_prompt=request.add_generation_prompt,
            continue_final_message=request.continue_final_message,
            template_kwargs=template_kwargs,
            add_special_tokens=request.add_special_tokens,
        )
        budget = chat_budget(request, len(prompt), self.model.max_model_len)
        return self._pending(
            request,
            prompts=[prompt],
            budgets=[budget],
            echoes=(),
            num_logprobs=(request.top_logprobs or 0) if request.logprobs else None,
            bad_word_ids=await encode_bad_words(self._tokenizer, request.bad_words),
            arrived=arrived,
        )

    async def completion(self, request: CompletionRequest) -> PendingGeneration:
        """Check and tokenise a completion request; choice i * n + j is the j-th of prompt i. Raises ApiError."""
        arrived = time.monotonic()
        self._check(request, num_prompts=len(request.prompt))
        prompts: list[list[int]] = []
        texts: list[str] = []
        for prompt in request.prompt:
            if isinstance(prompt, str):
                add_special_tokens = request.add_special_tokens is not False
                token_ids = await encode_prompt(self._tokenizer, prompt, add_special_tokens=add_special_tokens)
            else:
                check_token_ids("prompt", prompt, self.model.vocab_size)
                token_ids = prompt
            if not token_ids:
                raise invalid("prompt", "an empty prompt has nothing to continue")
            prompts.append(token_ids)
            if request.echo:
                texts.append(prompt if isinstance(prompt, str) else self._decode(token_ids, skip_special_tokens=False))
        return self._pending(
            request,
            prompts=prompts,
            budgets=[text_budget(request, len(prompt), self.model.max_model_len) for prompt in prompts],
            echoes=tuple(text for text in texts for _ in range(request.num_choices)),
            num_logprobs=request.logprobs,
            bad_word_ids=await encode_bad_words(self._tokenizer, request.bad_words),
            arrived=arrived,
        )

    async def tokenize(self, request: TokenizeRequest) -> dict[str, Any]:
        """vLLM's TokenizeResponse. Raises ApiError."""
        self._check_model(request.model)
        self._fields.check(request.model_extra)
        if request.messages is not None:
            tokens = await encode_messages(
                self._tokenizer,
                request.messages,
                add_generation_prompt=request.add_generation_prompt,
                continue_final_message=request.continue_final_message,
                template_kwargs=request.chat_template_kwargs,
                add_special_tokens=request.add_special_tokens,
            )
        else:
            assert request.prompt is not None
            add_special_tokens = request.add_special_tokens is not False
            tokens = await encode_prompt(self._tokenizer, request.prompt, add_special_tokens=add_special_tokens)
        return {
            "count": len(tokens),
            "max_model_len": self.model.max_model_len,
            "tokens": tokens,
            "token_strs": [self._tokenizer.backend.id_to_token(token) for token in tokens]
            if request.return_token_strs
            else None,
        }

    async def detokenize(self, request: DetokenizeRequest) -> dict[str, Any]:
        """vLLM's DetokenizeResponse. Raises ApiError."""
        self._check_model(request.model)
        self._fields.check(request.model_extra)
        check_token_ids("tokens", request.tokens, self.model.vocab_size)
        text = await off_loop(len(request.tokens), lambda: self._decode(request.tokens, skip_special_tokens=False))
        return {"prompt": text}

    def _decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def _check(self, request: GenerationRequest, *, num_prompts: int) -> None:
        """What can be said before anything is tokenised or made once per choice."""
        self._check_model(request.model)
        self._fields.check(request.model_extra, num_choices=request.num_choices)
        for field in ("stop_token_ids", "logit_bias", "allowed_token_ids"):
            check_token_ids(field, getattr(request, field) or (), self.model.vocab_size)
        self.admission.check_available()
        self.admission.check_fits(num_prompts * request.num_choices, param=_size_param(num_prompts))

    def _check_model(self, name: str | None) -> None:
        if name is not None and name != self.model.name:
            raise model_not_found(name)

    def _pending(
        self,
        request: GenerationRequest,
        *,
        prompts: Sequence[Sequence[int]],
        budgets: Sequence[int],
        echoes: tuple[str, ...],
        num_logprobs: int | None,
        bad_word_ids: tuple[tuple[int, ...], ...],
        arrived: float,
    ) -> PendingGeneration:
        is_chat = isinstance(request, ChatCompletionRequest)
        prefix = "chatcmpl-" if is_chat else "cmpl-"
        unique = uuid.uuid4().hex
        form = ResponseForm(
            response_id=prefix + (request.request_id or unique),
            created=int(time.time()),
            model=request.model,
            chat=is_chat,
            include_usage=request.include_usage,
            continuous_usage=request.continuous_usage,
            return_token_ids=bool(request.return_token_ids),
            echoes=echoes,
            format_prompt=self._prompt_format(request.prompt_logprobs),
            system_fingerprint=self.model.fabrication,
        )
        # Every parameter is checked here, before a place is taken.
        choices = [
            self._choice(
                request,
                index=prompt_index * request.num_choices + sample,
                engine_id=f"{form.response_id}-{unique[:8]}-{prompt_index * request.num_choices + sample}",
                prompt=tuple(prompt),
                budget=budget,
                sample=sample,
                num_logprobs=num_logprobs,
                bad_word_ids=bad_word_ids,
                echo=echoes[prompt_index * request.num_choices] if echoes else None,
            )
            for prompt_index, (prompt, budget) in enumerate(zip(prompts, budgets, strict=True))
            for sample in range(request.num_choices)
        ]

        def open_generation() -> Generation:
            ticket = self.admission.admit(len(choices), param=_size_param(len(prompts)))
            return Generation(
                engine=self.engine, choices=choices, ticket=ticket, observer=self._observer, arrived=arrived
            )

        return PendingGeneration(open=open_generation, form=form, stream=bool(request.stream))

    def _choice(
        self,
        request: GenerationRequest,
        *,
        index: int,
        engine_id: str,
        prompt: tuple[int, ...],
        budget: int,
        sample: int,
        num_logprobs: int | None,
        bad_word_ids: tuple[tuple[int, ...], ...],
        echo: str | None,
    ) -> Choice:
        echo_only = budget == 0
        params = sampling_params(
            request,
            defaults=self._defaults,
            max_tokens=max(budget, 1),  # of an echo_only request nothing is kept
            num_logprobs=num_logprobs,
            num_prompt_logprobs=_num_prompt_logprobs(request, num_logprobs, echo=echo, sample=sample),
            choice=sample,
        )
        engine_request = EngineRequest(
            request_id=engine_id,
            prompt_token_ids=prompt,
            params=params,
            cache_salt=request.cache_salt,
            bad_word_ids=bad_word_ids,
        )
        tracker: LogprobTracker | None = None
        format_logprobs: FormatLogprobs | None = None
        format_echo: FormatPrompt | None = None
        if num_logprobs is not None:
            is_chat = isinstance(request, ChatCompletionRequest)
            skips = params.skip_special_tokens
            tracker = LogprobTracker(
                detokenizer=Detokenizer(self._tokenizer, prompt, skip_special_tokens=skips),
                token_bytes=self._tokenizer.token_bytes,
                skipped_ids=self._special_ids if skips else frozenset(),
                keep_control=not is_chat,
            )
            format_logprobs = self._logprob_format(is_chat, num_logprobs, len(echo or ""))
            if echo is not None:
                format_echo = self._echo_format(prompt, echo, num_logprobs)
        return Choice(
            index=index,
            request=engine_request,
            state=RequestState(engine_id, prompt, params, self._tokenizer, num_spec_tokens=self.model.max_draft_len),
            counts_prompt=sample == 0,
            echo_only=echo_only,
            tracker=tracker,
            format_logprobs=format_logprobs,
            format_echo=format_echo,
        )

    def _logprob_format(self, is_chat: bool, num_top: int, offset: int) -> FormatLogprobs:
        token_bytes = self._tokenizer.token_bytes

        def format_chat(entries: Sequence[Entry]) -> Any:
            return chat_logprobs(entries, num_top, token_bytes)

        def format_completion(entries: Sequence[Entry]) -> Any:
            return completion_logprobs(entries, num_top, token_bytes, offset=offset)

        return format_chat if is_chat else format_completion

    def _prompt_format(self, num_top: int | None) -> FormatPrompt | None:
        if num_top is None:
            return None
        token_bytes = self._tokenizer.token_bytes
        return lambda entries: prompt_logprobs_body(entries, num_top, token_bytes)

    def _echo_format(self, prompt: Sequence[int], text: str, num_top: int) -> FormatPrompt:
        return lambda entries: EchoedPrompt(self._tokenizer, prompt, text).logprobs(entries, num_top)


def _num_prompt_logprobs(
    request: GenerationRequest, num_logprobs: int | None, *, echo: str | None, sample: int
) -> int | None:
    """Alternatives that the engine reports for the prompt's tokens, enough for everything the response says of them."""
    wanted = [] if echo is None or num_logprobs is None else [num_logprobs]
    # A chat response has them once, whatever n is.
    if request.prompt_logprobs is not None and (sample == 0 or not isinstance(request, ChatCompletionRequest)):
        wanted.append(request.prompt_logprobs)
    return max(wanted, default=None)


def _size_param(num_prompts: int) -> str:
    """The field to blame for the number of choices."""
    return "n" if num_prompts == 1 else "prompt"
