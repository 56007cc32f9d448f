"""Acceptance of drafters measured without the engine: `transformers` writes the texts and gives the taps, and the plain
drafter of tests/reference drafts from them.

    python benchmarks/train_acceptance.py --model DIR --drafter DIR --drafter DIR --prompts FILE --num-prompts 10

Verification with exact match never changes the text, so a prompt's text is written once (float32; greedy, or sampled)
and each drafter is walked over it: from an anchor, draft 15 tokens, count those that equal the text, go that many and
one on. `--check N` also runs the loop that verifies step by step on the first N prompts of each set and compares the
counts of all steps but the last, where that loop may look past the end.
"""

import argparse
import json
from pathlib import Path

import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.reference.dflash_loop import ReferenceDrafter, dflash_generate, run_target


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--drafter", action="append", required=True)
    parser.add_argument("--prompts", type=Path, required=True, help="JSON object, set name -> prompts")
    parser.add_argument("--sets", default="", help="comma-separated names; all by default")
    parser.add_argument("--num-prompts", type=int, default=20)
    parser.add_argument("--max-new", type=int, default=96)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--check", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    target = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32).eval()
    drafters = {path: ReferenceDrafter(path) for path in arguments.drafter}
    sets = json.loads(arguments.prompts.read_text())
    for name in arguments.sets.split(",") if arguments.sets else sets:
        prompts = [_chat(tokenizer, text) for text in sets[name][: arguments.num_prompts]]
        texts = write(target, prompts, arguments.max_new, arguments.temperature, tokenizer.eos_token_id)
        accepted: dict[str, list[list[int]]] = {path: [] for path in drafters}
        with torch.inference_mode():
            for prompt, text in zip(prompts, texts, strict=True):
                taps = run_target(target, text, next(iter(drafters.values())).target_layer_ids)[1]
                for path, drafter in drafters.items():
                    accepted[path].append(walk(target, drafter, text, len(prompt), taps, arguments.max_new))
        for path, counts in accepted.items():
            print(json.dumps({"set": name, "drafter": path} | summary(counts)), flush=True)
        for path, drafter in drafters.items():
            for prompt, counts in list(zip(prompts, accepted[path], strict=True))[: arguments.check]:
                loop = dflash_generate(
                    target,
                    drafter,
                    prompt,
                    max_new_tokens=arguments.max_new,
                    draft_len=15,
                    stop_ids=(tokenizer.eos_token_id,),
                )
                same = loop.accepted[: len(counts) - 1] == counts[:-1]
                print(json.dumps({"set": name, "drafter": path, "loop_equal": same, "steps": len(counts)}), flush=True)


def _chat(tokenizer: object, text: str) -> list[int]:
    messages = [{"role": "user", "content": text}]
    rendered = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)  # type: ignore[attr-defined]
    ids: list[int] = tokenizer(rendered, add_special_tokens=False).input_ids  # type: ignore[operator]
    return ids


@torch.inference_mode()
def write(target: nn.Module, prompts: list[list[int]], max_new: int, temperature: float, eos: int) -> list[list[int]]:
    """The target's continuation of every prompt, prompt included, end-of-sequence token included."""
    longest = max(len(ids) for ids in prompts)
    ids = torch.tensor([[eos] * (longest - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
    sampling = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {"do_sample": False}
    out = target.generate(ids, attention_mask=mask, max_new_tokens=max_new, pad_token_id=eos, **sampling)  # type: ignore[operator]
    texts = []
    for prompt, row in zip(prompts, out[:, longest:].tolist(), strict=True):
        end = row.index(eos) + 1 if eos in row else len(row)
        texts.append(prompt + row[:end])
    return texts


def walk(
    target: nn.Module, drafter: ReferenceDrafter, text: list[int], prompt_len: int, taps: torch.Tensor, max_new: int
) -> list[int]:
    """Accepted drafts of every step over a known text."""
    embed, head = target.get_input_embeddings(), target.get_output_embeddings()  # type: ignore[operator]
    context = drafter.context(taps)
    W, at, counts = drafter.block_size, prompt_len, []
    while at < len(text) - 1:
        block = torch.tensor([text[at], *[drafter.mask_token_id] * (W - 1)])
        drafts = head(drafter.block(embed(block), context[:at], at)[1:]).argmax(-1).tolist()
        # The last token that may still be emitted is always the target's own, so it is not drafted.
        most = min(W - 1, max_new - (at - prompt_len + 1) - 1, len(text) - 1 - at)
        right = 0
        while right < most and drafts[right] == text[at + 1 + right]:
            right += 1
        counts.append(right)
        at += right + 1
    return counts


def summary(counts: list[list[int]]) -> dict[str, object]:
    """Acceptance length (target's own token included) and P(at least j accepted) over all steps."""
    flat = [count for document in counts for count in document]
    return {
        "steps": len(flat),
        "acceptance_length": round(1.0 + sum(flat) / max(1, len(flat)), 3),
        "at_least": [round(sum(count >= j for count in flat) / max(1, len(flat)), 3) for j in range(1, 16)],
    }


if __name__ == "__main__":
    main()
