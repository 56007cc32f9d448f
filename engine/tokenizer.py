"""A model's tokenizer and chat template. Knows nothing of requests or of HTTP."""

import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers
from jinja2 import TemplateError

from engine.chat_template import check_chat_template

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")

# Arguments of transformers' `apply_chat_template` that a request's chat_template_kwargs may not set.
_TEMPLATE_ARGUMENTS = frozenset(
    [
        "conversation",
        "messages",
        "tools",
        "documents",
        "chat_template",
        "add_generation_prompt",
        "continue_final_message",
        "tokenize",
        "padding",
        "truncation",
        "max_length",
        "return_tensors",
        "return_dict",
        "return_assistant_tokens_mask",
        "tokenizer_kwargs",
    ]
)


class Tokenizer:
    """Encodes, decodes and renders chats, on top of a transformers tokenizer backed by the `tokenizers` library."""

    def __init__(self, hf_tokenizer: Any, *, chat_template: str | None = None) -> None:
        """Wrap a loaded transformers tokenizer.

        Args:
            hf_tokenizer: a fast transformers tokenizer.
            chat_template: None for the tokenizer's own; else a Jinja template or the path of a file that holds one.

        Raises:
            ValueError: a slow tokenizer, a chat template file that does not exist, or one that is no Jinja.
        """
        backend = getattr(hf_tokenizer, "backend_tokenizer", None)
        if not isinstance(backend, tokenizers.Tokenizer):
            raise ValueError(
                f"tokenizer {type(hf_tokenizer).__name__} is not backed by the tokenizers library, which streaming "
                "needs; convert it to a tokenizer.json (AutoTokenizer.from_pretrained(...).save_pretrained(...))."
            )
        self.hf_tokenizer = hf_tokenizer
        self.backend = backend
        self.chat_template = _read_template(chat_template) or getattr(hf_tokenizer, "chat_template", None)

    @classmethod
    def load(cls, model_dir: str | Path, *, chat_template: str | None = None) -> "Tokenizer":
        """Load the tokenizer of a local model directory; never touches the network.

        Raises:
            ValueError: no usable tokenizer in the directory, or as in the constructor.
        """
        # AutoTokenizer imports torch, which a replica process otherwise never needs (seconds of its start); it is asked
        # only where there is no tokenizer.json.
        from transformers import PreTrainedTokenizerFast

        loader: Any = PreTrainedTokenizerFast
        if not (Path(model_dir) / "tokenizer.json").is_file():
            from transformers import AutoTokenizer as loader
        try:
            hf_tokenizer = loader.from_pretrained(str(model_dir), local_files_only=True)
        except (OSError, ValueError, KeyError, ImportError) as error:
            raise ValueError(f"model: cannot load a tokenizer from {model_dir}: {error}") from error
        return cls(hf_tokenizer, chat_template=chat_template)

    @property
    def vocab_size(self) -> int:
        """Number of ids, added tokens included; the model's embedding may be larger."""
        return self.backend.get_vocab_size(with_added_tokens=True)

    @property
    def eos_token_id(self) -> int | None:
        token_id = self.hf_tokenizer.eos_token_id
        return None if token_id is None else int(token_id)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text. Other threads run meanwhile: the library's `encode` holds the interpreter lock for the
        whole text (seconds for megabytes), its batch functions do not."""
        return self.backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        return self.backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes the token adds to a text, special tokens literally; concatenated they are the text's UTF-8."""
        added = self._added_tokens.get(token_id)
        if added is not None:
            return added.encode()
        token = self.backend.id_to_token(token_id)
        if token is None:
            return b""
        if self._is_byte_level:
            return bytes(_BYTE_OF_CHAR[char] for char in token)
        byte = _BYTE_TOKEN.fullmatch(token)
        if byte is not None:
            return bytes([int(byte[1], 16)])
        return token.replace("\u2581", " ").encode()

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt text of a conversation; encode it with add_special_tokens=False.

        The role developer becomes system, lists of text parts become one string, a null content the empty string.

        Raises:
            ValueError: no chat template, a message it cannot take, or an error the template itself raises.
        """
        if self.chat_template is None:
            raise ValueError(
                "chat_template: the model's tokenizer has none; set model.chat_template to a Jinja template or to the "
                "path of one, or use /v1/completions."
            )
        taken = sorted(_TEMPLATE_ARGUMENTS & (template_kwargs or {}).keys())
        if taken:
            raise ValueError(f"chat_template_kwargs: {taken[0]!r} is not the template's; remove it.")
        if continue_final_message and add_generation_prompt:
            raise ValueError("continue_final_message and add_generation_prompt cannot both be true; set one to false.")
        try:
            rendered = self.hf_tokenizer.apply_chat_template(
                [_plain_message(message, index) for index, message in enumerate(messages)],
                chat_template=self.chat_template,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tools=None if tools is None else [dict(tool) for tool in tools],
                tokenize=False,
                **dict(template_kwargs or {}),
            )
        except (TemplateError, TypeError) as error:
            raise ValueError(f"messages: the chat template refused them: {error}") from error
        return str(rendered)

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> list[int]:
        """Prompt ids of a conversation; options and errors as in `render_chat`."""
        return self.encode(self.render_chat(messages, **options), add_special_tokens=False)

    @cached_property
    def _added_tokens(self) -> dict[int, str]:
        return {token_id: token.content for token_id, token in self.backend.get_added_tokens_decoder().items()}

    @cached_property
    def _is_byte_level(self) -> bool:
        """Tokens spell bytes in the byte-level alphabet."""
        return "ByteLevel" in repr(self.backend.decoder)


def _byte_level_alphabet() -> dict[str, int]:
    """Character -> byte of byte-level BPE: printable Latin-1 stands for itself, the rest follows from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in set(printable)]
    return alphabet | {chr(256 + index): byte for index, byte in enumerate(others)}


_BYTE_OF_CHAR = _byte_level_alphabet()


def _read_template(template: str | None) -> str | None:
    """A template given as text, or read from the file it names."""
    if template is None:
        return None
    if "{" not in template and "\n" not in template:
        path = Path(template)
        if not path.is_file():
            raise ValueError(f"chat_template: {template!r} is neither a Jinja template nor an existing file.")
        try:
            template = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"chat_template: cannot read {path}: {error}") from error
    check_chat_template(template)
    return template


def _plain_message(message: Mapping[str, Any], index: int) -> dict[str, Any]:
    """The message with what every template understands: a known role and a string as content."""
    plain = dict(message)
    if not isinstance(plain.get("role"), str):
        raise ValueError(f"messages[{index}].role must be a string, got {plain.get('role')!r}.")
    if plain["role"] == "developer":
        plain["role"] = "system"
    content = plain.get("content")
    if content is None:
        plain["content"] = ""
    elif isinstance(content, (list, tuple)):
        plain["content"] = "".join(_part_text(part, index, number) for number, part in enumerate(content))
    elif not isinstance(content, str):
        raise ValueError(f"messages[{index}].content must be a string or a list of text parts, got {content!r}.")
    return plain


def _part_text(part: object, index: int, number: int) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    raise ValueError(
        f"messages[{index}].content[{number}] must be a text part, got {kind!r}; this model reads text only."
    )
