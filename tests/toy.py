"""Toy models that an engine loads: the random checkpoints of `tests.reference.toy` with a byte tokenizer."""

from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from tests.reference import toy

VOCAB_SIZE = 320
BOS_ID = 256
EOS_ID = 257
MASK_ID = 300


def make_tokenizer(directory: Path) -> None:
    """Byte-level tokenizer: id = byte for 0..255, then <bos> and <eos>."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<bos>", eos_token="<eos>")
    fast.chat_template = (
        "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    fast.save_pretrained(directory)


def make_target(directory: Path, *, kind: str = "llama", **overrides: Any) -> Path:
    """A random target of three layers whose greedy text varies."""
    shape = {
        "vocab_size": VOCAB_SIZE,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "initializer_range": 0.25,
        "tie_word_embeddings": kind == "llama",
        "bos_token_id": BOS_ID,
        "eos_token_id": EOS_ID,
        "pad_token_id": EOS_ID,
        **overrides,
    }
    toy.make_target(directory, kind, **shape)
    make_tokenizer(directory)
    return directory


def make_drafter(directory: Path, target: Path, **overrides: Any) -> Path:
    """A random drafter of block size 8 for the target in `target`."""
    settings = {
        "block_size": 8,
        "mask_token_id": MASK_ID,
        "target_layer_ids": [0, 1],
        "max_position_embeddings": 512,
        **overrides,
    }
    toy.make_drafter(directory, AutoModelForCausalLM.from_pretrained(target), **settings)
    return directory
