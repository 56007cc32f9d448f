"""Makes a small target from nothing, with a tokenizer of its own, to train a drafter for: Qwen3 layers, another shape,
another vocabulary and another chat form than SmolLM2's.

    python benchmarks/make_small_target.py DIR --steps 600 --device cuda

The tokenizer is a byte-level BPE, the model a Qwen3 with random weights, and both learn from the functions of Python's
standard library: the user names and describes a function, the assistant writes it. What it learns in a minute is of no
use but this: its texts are neither random nor one repeated token, so a drafter has something to learn.
"""

import argparse
import ast
import json
import random
import sysconfig
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

END, USER, ASSISTANT, MASK = SPECIAL = ["<|end|>", "<|user|>", "<|assistant|>", "<|mask|>"]
CHAT_TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
_MOST_CHARS = 900


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--vocab-size", type=int, default=3001)
    parser.add_argument("--hidden-size", type=int, default=192)
    parser.add_argument("--num-layers", type=int, default=8)
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    began = time.monotonic()
    torch.manual_seed(args.seed)
    texts = [f"{USER}{asked}{END}{ASSISTANT}{written}{END}" for asked, written in exchanges()]
    random.Random(args.seed).shuffle(texts)
    tokenizer = make_tokenizer(texts, args.vocab_size)
    tokenizer.save_pretrained(args.directory)
    ids = torch.tensor([i for text in texts for i in tokenizer(text, add_special_tokens=False)["input_ids"]])
    print(f"{len(texts)} texts, {len(ids)} tokens, {time.monotonic() - began:.0f} s", flush=True)
    model = make_model(args, len(tokenizer)).to(args.device)
    loss = fit(model, ids.to(args.device), args)
    model.to("cpu", torch.bfloat16).save_pretrained(args.directory)
    figures = {"loss": round(loss, 3), "mask_token_id": tokenizer.convert_tokens_to_ids(MASK)}
    figures |= {"parameters": sum(p.numel() for p in model.parameters()), "seconds": round(time.monotonic() - began)}
    print(json.dumps(figures))


def exchanges() -> Iterator[tuple[str, str]]:
    """(what is asked, the function's source without its docstring) for functions of the standard library."""
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).rglob("*.py")):
        if "site-packages" in path.parts or "test" in path.parts:
            continue
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                tree = ast.parse(path.read_text(encoding="utf-8"))
        except (SyntaxError, ValueError, RecursionError):  # files for other Python versions, other encodings
            continue
        for node in ast.walk(tree):
            if not isinstance(node, ast.FunctionDef) or len(node.body) < 2:
                continue
            doc = ast.get_docstring(node)
            if not doc or not doc.isascii():
                continue
            name, summary = node.name, " ".join(doc.split("\n\n")[0].split())
            node.body = node.body[1:]
            source = ast.unparse(node)
            if len(source) + len(summary) <= _MOST_CHARS:
                yield f"Write a Python function `{name}`. {summary}", source


def make_tokenizer(texts: list[str], vocab_size: int) -> PreTrainedTokenizerFast:
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=END)
    fast.chat_template = CHAT_TEMPLATE
    return fast


def make_model(args: argparse.Namespace, vocab_size: int) -> Qwen3ForCausalLM:
    """Head size 64 whatever the hidden size: the heads together are wider than the hidden state."""
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=vocab_size,
            hidden_size=args.hidden_size,
            intermediate_size=8 * args.hidden_size // 3,
            num_hidden_layers=args.num_layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=64,
            max_position_embeddings=2048,
            tie_word_embeddings=False,
            eos_token_id=SPECIAL.index(END),
            bos_token_id=None,
            pad_token_id=SPECIAL.index(END),
        )
    )


def fit(model: Qwen3ForCausalLM, ids_T: torch.Tensor, args: argparse.Namespace) -> float:
    """Plain next-token training on random windows; returns the last loss."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=args.learning_rate, total_steps=args.steps, pct_start=0.1
    )
    loss = torch.zeros(())
    window = torch.arange(args.length, device=ids_T.device)
    for step in range(args.steps):
        first_B1 = torch.randint(len(ids_T) - args.length, (args.batch, 1), device=ids_T.device)
        batch_BT = ids_T[first_B1 + window]
        with torch.autocast(args.device, torch.bfloat16, enabled=args.device != "cpu"):
            loss = model(input_ids=batch_BT, labels=batch_BT).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 50 == 0:
            print(f"step {step}: loss {loss.item():.3f}", flush=True)
    return loss.item()


if __name__ == "__main__":
    main()
