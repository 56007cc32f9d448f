"""Request fields that are not modelled: refused by name, accepted without effect, or unknown.

A known option that the engine does not apply is a 400 that names it, unless its value asks for nothing (null, or the
value that means "off"). Fields nobody knows are accepted, as OpenAI clients send new ones all the time, and logged once
per name.
"""

import logging
from collections.abc import Callable, Mapping
from typing import Any

from cluster.openai.errors import clip, unsupported

logger = logging.getLogger(__name__)

_MAX_LOGGED_FIELDS = 256


def _is_null(value: Any) -> bool:
    return value is None


def _one_of(*neutral: Any) -> Callable[[Any], bool]:
    """True for null and for the given values; a bool never passes for a number nor a number for a bool."""

    def is_neutral(value: Any) -> bool:
        return value is None or any(
            value == item and isinstance(value, bool) == isinstance(item, bool) for item in neutral
        )

    return is_neutral


_TOOLS = "this server does not support tool calls; leave it out"
_CONSTRAINED = "this server does not support constrained output; leave it out"

# field -> (values that ask for nothing, what the client is told). Chat and completions share the table.
_REFUSED: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "length_penalty": (_one_of(1), "this server does not support beam search; leave it out"),
    "use_beam_search": (_one_of(False), "this server does not support beam search; leave it out"),
    "best_of": (_is_null, "this server does not sample candidates to choose from; use n"),
    "logits_processors": (_one_of([]), "this server does not run logits processors; leave it out"),
    "logprob_token_ids": (_is_null, "this server reports the most likely tokens only; use top_logprobs"),
    "tools": (_is_null, _TOOLS),
    "tool_choice": (_one_of("none"), _TOOLS),
    "functions": (_is_null, _TOOLS),
    "function_call": (_one_of("none"), _TOOLS),
    "response_format": (_one_of({"type": "text"}), 'this server returns text only; use {"type": "text"}'),
    "structured_outputs": (_is_null, _CONSTRAINED),
    "guided_json": (_is_null, _CONSTRAINED),
    "guided_regex": (_is_null, _CONSTRAINED),
    "guided_choice": (_is_null, _CONSTRAINED),
    "guided_grammar": (_is_null, _CONSTRAINED),
    "json_schema": (_is_null, _CONSTRAINED),
    "regex": (_is_null, _CONSTRAINED),
    "ebnf": (_is_null, _CONSTRAINED),
    "suffix": (_one_of(""), "this server does not fill in the middle; leave it out"),
    "audio": (_is_null, "this server produces text only; leave it out"),
    "modalities": (_one_of(["text"]), 'this server produces text only; use ["text"]'),
    "web_search_options": (_is_null, "this server does not search the web; leave it out"),
    "chat_template": (_is_null, "the template is the server's (model.chat_template); use chat_template_kwargs"),
    "documents": (_one_of([]), "this server does not pass documents to the template; put them in a message"),
    "prompt_embeds": (_is_null, "this server takes text or token ids; use prompt"),
    "mm_processor_kwargs": (_is_null, "this server takes text only; leave it out"),
    "priority": (_one_of(0), "this server schedules in order of arrival; leave it out or send 0"),
    "truncate_prompt_tokens": (_is_null, "this server never cuts a prompt; shorten it"),
    "spaces_between_special_tokens": (_one_of(True), "this server keeps those spaces; leave it out or send true"),
    "return_tokens_as_token_ids": (_one_of(False), "this server does not support it; use return_token_ids"),
    "thinking_token_budget": (_is_null, "this server does not limit reasoning; use max_completion_tokens"),
    "lora_path": (_is_null, "this server serves no adapters; leave it out"),
    "kv_transfer_params": (_is_null, "this server does not transfer caches; leave it out"),
    "vllm_xargs": (_is_null, "this server takes no engine arguments in a request; leave it out"),
}

# Parts of OpenAI's API that concern its own platform or are hints: accepted, without effect here.
_WITHOUT_EFFECT = frozenset(
    {
        "metadata",
        "store",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "verbosity",
        "prediction",
        "moderation",
        "parallel_tool_calls",
        "user",
    }
)


class UnmodelledFields:
    """Checks the fields outside the request model; remembers which unknown names were logged."""

    def __init__(self) -> None:
        self._logged: set[str] = set()

    def check(self, extra: Mapping[str, Any] | None, *, num_choices: int = 1) -> None:
        """Raises ApiError (400, code "unsupported_parameter") at the first field that asks for something not applied.

        num_choices: the request's n; best_of equal to it asks for nothing.
        """
        for name, value in (extra or {}).items():
            refused = _REFUSED.get(name)
            if refused is not None:
                is_neutral, message = refused
                if not is_neutral(value) and not (name == "best_of" and value == num_choices):
                    raise unsupported(name, message)
            elif name not in _WITHOUT_EFFECT:
                self._log_unknown(name)

    def _log_unknown(self, name: str) -> None:
        name = clip(name, 64)
        if name not in self._logged and len(self._logged) < _MAX_LOGGED_FIELDS:
            self._logged.add(name)
            logger.warning("Requests carry the unknown field %r; it is ignored (logged once).", name)


def refused_fields() -> tuple[str, ...]:
    """Names of the known options that are refused unless neutral."""
    return tuple(_REFUSED)
