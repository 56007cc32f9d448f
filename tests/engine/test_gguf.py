"""A converted GGUF is the model and tokenizer that transformers reads from the same file."""

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

from engine.weights.gguf_file import convert_gguf
from engine.weights.progress import LogProgress
from tests.engine.tiny_gguf import QType, make_model, write_gguf

TEXTS = [
    "the quick brown fox",
    "  leading and trailing  ",
    "caf\u00e9 na\u00efve \u4f60\u597d \U0001f600 \u0627\u0644",
    "def f(x):\n\treturn x+1  # 12 345\n\n",
    "<|im_start|>user\nhi<|im_end|>\n",
    "it's we'll I'D 3.14 1,000",
    "",
    "\r\n\n \t",
]
MIXED = {
    "attn_q": QType.Q4_1,
    "attn_k": QType.Q4_1,
    "attn_v": QType.Q8_0,
    "attn_output": QType.Q4_0,
    "ffn_gate": QType.F16,
    "ffn_up": QType.BF16,
    "ffn_down": QType.Q5_1,
    "token_embd": QType.Q8_0,
}


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def convert(tmp_path: Path, **options: object) -> Path:
    out = tmp_path / "out"
    out.mkdir()
    model = options.pop("model", None) or make_model()
    write_gguf(tmp_path / "tiny.gguf", model, **options)
    convert_gguf(tmp_path / "tiny.gguf", out, LogProgress())
    return out


@pytest.mark.parametrize("tie", [True, False])
def test_unquantised_file_gives_back_the_original_model(tmp_path: Path, tie: bool) -> None:
    model = make_model(tie=tie)
    out = convert(tmp_path, model=model)
    loaded, report = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    for name, tensor in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name
    ids = torch.arange(20)[None]
    assert torch.equal(loaded(ids).logits, model(ids).logits)


def test_quantised_file_equals_the_transformers_loader(tmp_path: Path) -> None:
    out = convert(tmp_path, types=MIXED)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="tiny.gguf", dtype=torch.float32)
    ours = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    for name, tensor in theirs.state_dict().items():
        assert torch.equal(ours.state_dict()[name], tensor), name
    for key in ("hidden_size", "num_hidden_layers", "num_key_value_heads", "head_dim", "vocab_size", "eos_token_id"):
        assert getattr(ours.config, key) == getattr(theirs.config, key), key
    assert ours.config.rope_parameters == theirs.config.rope_parameters
    assert ours.config.rms_norm_eps == pytest.approx(theirs.config.rms_norm_eps, rel=1e-6)


def test_float_tensors_keep_their_type_and_quantised_ones_become_float32(tmp_path: Path) -> None:
    out = convert(tmp_path, types=MIXED)
    with safe_open(out / "model.safetensors", "pt") as weights:
        found = {name: weights.get_slice(name).get_dtype() for name in weights.keys()}  # noqa: SIM118
    assert found["model.layers.0.mlp.gate_proj.weight"] == "F16"
    assert found["model.layers.0.mlp.up_proj.weight"] == "BF16"
    assert {dtype for name, dtype in found.items() if "up_proj" not in name and "gate_proj" not in name} == {"F32"}
    assert json.loads((out / "config.json").read_text())["dtype"] == "float32"


@pytest.mark.parametrize("pre", ["default", "gpt-2", "llama-bpe", "qwen2"])
def test_tokenizer_equals_the_transformers_one(tmp_path: Path, pre: str) -> None:
    out = convert(tmp_path, pre=pre)
    theirs, ours = AutoTokenizer.from_pretrained(tmp_path, gguf_file="tiny.gguf"), AutoTokenizer.from_pretrained(out)
    for text in TEXTS:
        ids = theirs(text)["input_ids"]
        assert ours(text)["input_ids"] == ids, text
        assert ours.decode(ids) == theirs.decode(ids)
        assert ours.decode(ids, skip_special_tokens=True) == theirs.decode(ids, skip_special_tokens=True)
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "12"}]
    for prompt in (True, False):
        rendered = [
            t.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt) for t in (ours, theirs)
        ]
        assert rendered[0] == rendered[1]
    assert ours.special_tokens_map == theirs.special_tokens_map
    assert len(ours) == len(theirs)


def test_smollm_splits_digits_before_words(tmp_path: Path) -> None:
    """As llama.cpp and the original tokenizer; transformers' GGUF reader knows no such rule and differs there alone."""
    out = convert(tmp_path, pre="smollm")
    theirs, ours = AutoTokenizer.from_pretrained(tmp_path, gguf_file="tiny.gguf"), AutoTokenizer.from_pretrained(out)
    for text in TEXTS:
        if not re.search(r"\s\d", text):
            assert ours(text)["input_ids"] == theirs(text)["input_ids"], text
    pieces = ours.backend_tokenizer.pre_tokenizer.pre_tokenize_str("a   12")
    assert [piece for piece, _ in pieces] == ["a", "\u0120\u0120\u0120", "1", "2"]
    assert ours.decode(ours("a   12")["input_ids"]) == "a   12"


def test_added_bos_token(tmp_path: Path) -> None:
    tmp_path.joinpath("out").mkdir()
    from engine.weights.gguf_tokenizer import tokenizer_files
    from tests.engine.tiny_gguf import train_tokenizer

    tokens, merges = train_tokenizer()
    metadata = {
        "general.architecture": "llama",
        "llama.context_length": 64,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.token_type": [3, 3, 3] + [1] * 317,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.add_bos_token": True,
    }
    for name, content in tokenizer_files(metadata.get, vocab_size=320).items():
        (tmp_path / "out" / name).write_text(content)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    ids = tokenizer("the fox")["input_ids"]
    assert ids[0] == 1
    assert tokenizer.decode(ids, skip_special_tokens=True) == "the fox"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"arch": "gpt2"}, "GGUF architecture 'gpt2' is not supported; supported are llama, qwen2, qwen3"),
        ({"extra_tensor": "rope_freqs.weight"}, "the tensor 'rope_freqs.weight' has no counterpart"),
        ({"tokenizer_model": "llama"}, "tokenizer.ggml.model 'llama' is not supported"),
        ({"pre": "nonsense"}, "tokenizer.ggml.pre 'nonsense' is not supported"),
        ({"key_values": {"llama.attention.value_length": 8}}, "value heads of another size"),
        ({"key_values": {"llama.attention.key_length": 32}}, "rotary embedding over 16 of 32 head dimensions"),
        ({"key_values": {"llama.rope.scaling.type": "longrope"}}, "rope scaling 'longrope' is not supported"),
    ],
)
def test_unsupported_files_are_refused_by_name(tmp_path: Path, options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        convert(tmp_path, **options)


def test_a_file_that_is_no_gguf_is_refused(tmp_path: Path) -> None:
    (tmp_path / "bad.gguf").write_bytes(b"not a model, not at all")
    with pytest.raises(ValueError, match=r"bad\.gguf cannot be read as a GGUF file"):
        convert_gguf(tmp_path / "bad.gguf", tmp_path, LogProgress())


def test_a_truncated_gguf_is_refused(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf", make_model())
    data = (tmp_path / "tiny.gguf").read_bytes()
    (tmp_path / "cut.gguf").write_bytes(data[: len(data) - 5000])
    with pytest.raises(ValueError, match=r"cut\.gguf cannot be read as a GGUF file"):
        convert_gguf(tmp_path / "cut.gguf", tmp_path, LogProgress())
