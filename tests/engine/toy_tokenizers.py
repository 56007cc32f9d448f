"""Tokenizers built on the spot: byte-level BPE (GPT, Llama 3, Qwen, SmolLM2 kind) and byte fallback (Llama 2 kind)."""

from functools import cache

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from engine.tokenizer import Tokenizer

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CORPUS = [
    "the quick brown fox jumps over the lazy dog and then the other dog stops there",
    "stop STOP stopping </s> END. User: hello\n\nAssistant: naive cafe \u00e9t\u00e9 \u00fcber",
    "\u4f60\u597d\u4e16\u754c \u3053\u3093\u306b\u3061\u306f \U0001f600 \U0001f468\u200d\U0001f469\u200d\U0001f467",
]
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def wrap(backend: tokenizers.Tokenizer, chat_template: str | None = CHAT_TEMPLATE) -> PreTrainedTokenizerFast:
    fast = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=SPECIAL[0])
    fast.chat_template = chat_template
    return fast


@cache
def byte_level() -> Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=340,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS * 3, trainer)
    return Tokenizer(wrap(backend))


@cache
def byte_fallback() -> Tokenizer:
    pieces = ["<unk>", *SPECIAL, *[f"<0x{byte:02X}>" for byte in range(256)]]
    pieces += sorted(set("".join(CORPUS[:2]).replace(" ", "\u2581")))
    backend = tokenizers.Tokenizer(
        models.BPE({piece: i for i, piece in enumerate(pieces)}, [], byte_fallback=True, unk_token="<unk>")
    )
    backend.add_special_tokens(SPECIAL)
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    backend.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return Tokenizer(wrap(backend))
