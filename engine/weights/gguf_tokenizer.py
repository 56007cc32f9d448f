"""The tokenizer inside a GGUF file, as `tokenizer.json` and `tokenizer_config.json`.

Covers byte-level BPE (`tokenizer.ggml.model = "gpt2"`), the kind Llama 3, Qwen and SmolLM use. The pre-tokeniser comes
from `tokenizer.ggml.pre`, because merges alone do not say where words end: SmolLM's splits digits one by one *before*
the GPT-2 pattern, so "  12" is [two spaces][1][2], while the plain GPT-2 pattern gives [space][space][1][2].
"""

import json
from collections.abc import Callable
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors

_CONTROL, _USER_DEFINED = 3, 4  # values of tokenizer.ggml.token_type

_LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_PATTERN = _LLAMA3_PATTERN.replace(r"\p{N}{1,3}", r"\p{N}")
_GPT2_KINDS = ("default", "gpt-2")
_DIGITS_KINDS = ("smollm", "starcoder", "refact")
_PATTERNS = {
    "llama-bpe": _LLAMA3_PATTERN,
    "llama3": _LLAMA3_PATTERN,
    "llama-v3": _LLAMA3_PATTERN,
    "qwen2": _QWEN2_PATTERN,
    "deepseek-r1-qwen": _QWEN2_PATTERN,
}


def tokenizer_files(get: Callable[[str], Any], *, vocab_size: int) -> dict[str, str]:
    """File name -> content, from GGUF metadata read through `get(key) -> value or None`.

    vocab_size: rows of the embedding; the vocabulary may be smaller, never larger.

    Raises:
        ValueError: a tokenizer kind this module does not build, or a vocabulary larger than the embedding.
    """
    kind = get("tokenizer.ggml.model")
    if kind != "gpt2":
        raise ValueError(
            f"tokenizer.ggml.model {kind!r} is not supported (only byte-level BPE, 'gpt2'): use the model's "
            "safetensors checkpoint, which brings its tokenizer.json"
        )
    tokens, merges = get("tokenizer.ggml.tokens"), get("tokenizer.ggml.merges")
    if tokens is None or merges is None:
        raise ValueError("the GGUF metadata lacks tokenizer.ggml.tokens or tokenizer.ggml.merges")
    if len(tokens) > vocab_size:
        raise ValueError(f"the tokenizer has {len(tokens)} tokens but the embedding only {vocab_size} rows")
    tokenizer = _byte_level_bpe(tokens, merges, get("tokenizer.ggml.token_type") or [], get("tokenizer.ggml.pre"))
    bos_id = get("tokenizer.ggml.bos_token_id")
    if get("tokenizer.ggml.add_bos_token") and bos_id is not None:
        bos = tokens[bos_id]
        tokenizer.post_processor = processors.Sequence(
            [
                processors.ByteLevel(trim_offsets=False),
                processors.TemplateProcessing(
                    single=f"{bos} $A", pair=f"{bos} $A {bos}:1 $B:1", special_tokens=[(bos, bos_id)]
                ),
            ]
        )
    return {
        "tokenizer.json": tokenizer.to_str(pretty=False),
        "tokenizer_config.json": json.dumps(_tokenizer_config(get, tokens), indent=2, ensure_ascii=False) + "\n",
    }


def _byte_level_bpe(tokens: list[str], merges: list[str], token_types: list[int], pre: str | None) -> Tokenizer:
    vocab = {token: index for index, token in enumerate(tokens)}
    if len(vocab) != len(tokens):
        raise ValueError("tokenizer.ggml.tokens names a token twice")
    pairs = []
    for merge in merges:
        left, _, right = merge.partition(" ")
        pairs.append((left, right))
    # Llama 3 keeps whole-word tokens that no chain of merges reaches.
    tokenizer = Tokenizer(
        models.BPE(vocab=vocab, merges=pairs, ignore_merges=pre in ("llama-bpe", "llama3", "llama-v3"))
    )
    tokenizer.pre_tokenizer = _pre_tokenizer(pre)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    special, plain = [], []
    for token, token_type in zip(tokens, token_types, strict=bool(token_types)):
        if token_type == _CONTROL:
            special.append(AddedToken(token, normalized=False, special=True))
        elif token_type == _USER_DEFINED:
            plain.append(AddedToken(token, normalized=False, special=False))
    tokenizer.add_special_tokens(special)
    tokenizer.add_tokens(plain)
    return tokenizer


def _pre_tokenizer(pre: str | None) -> pre_tokenizers.PreTokenizer:
    if pre is None or pre in _GPT2_KINDS:
        return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if pre in _DIGITS_KINDS:
        return pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
            ]
        )
    if pre in _PATTERNS:
        return pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(_PATTERNS[pre]), behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    known = sorted((*_GPT2_KINDS, *_DIGITS_KINDS, *_PATTERNS))
    raise ValueError(f"tokenizer.ggml.pre {pre!r} is not supported; supported are {', '.join(known)}")


def _tokenizer_config(get: Callable[[str], Any], tokens: list[str]) -> dict[str, Any]:
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": int(get(f"{get('general.architecture')}.context_length")),
    }
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        token_id = get(f"tokenizer.ggml.{key}_token_id")
        if token_id is not None:
            config[f"{name}_token"] = tokens[token_id]
    template = get("tokenizer.chat_template")
    if template is not None:
        config["chat_template"] = template
    return config
