"""A tiny Llama written as GGUF the way llama.cpp's converter does, with a byte-level BPE trained on the spot."""

import json
from pathlib import Path

import gguf
import numpy as np
import torch
from gguf.quants import quantize
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM

QType = gguf.GGMLQuantizationType
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
_CORPUS = [
    "the quick brown fox jumps over the lazy dog",
    "def f(x):\n    return x + 1\n",
    "caf\u00e9 na\u00efve \u4f60\u597d",
] * 3
_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def make_model(*, seed: int = 0, tie: bool = True) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=320,
        hidden_size=96,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=256,
        rms_norm_eps=1e-5,
        tie_word_embeddings=tie,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
    )
    return LlamaForCausalLM(config).eval()


def train_tokenizer(vocab_size: int = 320) -> tuple[list[str], list[str]]:
    """(tokens by id, merges) of a byte-level BPE, padded to vocab_size with unused tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIALS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    content = json.loads(tokenizer.to_str())["model"]
    tokens = sorted(content["vocab"], key=content["vocab"].get)
    tokens += [f"unused{index}" for index in range(vocab_size - len(tokens))]
    return tokens, [" ".join(pair) for pair in content["merges"]]


def write_gguf(
    path: Path,
    model: LlamaForCausalLM,
    *,
    types: dict[str, QType] | None = None,
    pre: str = "default",
    arch: str = "llama",
    extra_tensor: str | None = None,
    tokenizer_model: str = "gpt2",
    key_values: dict[str, object] | None = None,
) -> None:
    """types: GGUF name part ("attn_q", "token_embd", ...) -> type; default float32."""
    config = model.config
    writer = gguf.GGUFWriter(path, arch)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_vocab_size(config.vocab_size)
    tokens, merges = train_tokenizer(config.vocab_size)
    writer.add_tokenizer_model(tokenizer_model)
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_merges(merges)
    kinds = [3 if token in SPECIALS else 5 if token.startswith("unused") else 1 for token in tokens]
    writer.add_token_types(kinds)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHAT_TEMPLATE)
    for key, value in (key_values or {}).items():
        if isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_uint32(key, value)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        gguf_name, part = _gguf_name(name)
        values = tensor.numpy()
        if part in ("attn_q", "attn_k"):
            heads = config.num_attention_heads if part == "attn_q" else config.num_key_value_heads
            values = _interleave(values, heads)
        kind = (types or {}).get(part, QType.F32)
        writer.add_tensor(gguf_name, quantize(values, kind), raw_dtype=kind)
    if extra_tensor is not None:
        writer.add_tensor(extra_tensor, np.ones(8, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _gguf_name(name: str) -> tuple[str, str]:
    whole = {
        "model.embed_tokens.weight": "token_embd",
        "model.norm.weight": "output_norm",
        "lm_head.weight": "output",
    }
    if name in whole:
        return f"{whole[name]}.weight", whole[name]
    _, _, layer, rest = name.split(".", 3)
    module, suffix = rest.rsplit(".", 1)
    return f"blk.{layer}.{_NAMES[module]}.{suffix}", _NAMES[module]


def _interleave(values: np.ndarray, heads: int) -> np.ndarray:
    """Row i of a head's first half beside row i of its second half, written index by index."""
    head_dim = values.shape[0] // heads
    order = [
        head * head_dim + half * head_dim // 2 + i
        for head in range(heads)
        for i in range(head_dim // 2)
        for half in (0, 1)
    ]
    return np.ascontiguousarray(values[order])
