"""Toy checkpoints: random targets written by `transformers`, random DFlash drafters in z-lab's format."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

from tests.reference.dflash_loop import ReferenceDrafter, run_target

CLASSES: dict[str, tuple[Any, Any]] = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
}


def make_target(directory: Path, kind: str, *, seed: int = 0, **overrides: Any) -> nn.Module:
    """Saves a random target (float32, weights large enough that layers matter) and returns it."""
    shape = {
        "vocab_size": 131,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 5,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "max_position_embeddings": 256,
        "initializer_range": 0.15,
        "tie_word_embeddings": False,
        "eos_token_id": 2,
        "bos_token_id": 1,
        **overrides,
    }
    config_class, model_class = CLASSES[kind]
    torch.manual_seed(seed)
    config = config_class(**shape)
    config._attn_implementation = "eager"
    model = model_class(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith(("norm.weight", "bias")):  # ones and zeros would hide a forgotten one
                weight.add_(torch.randn_like(weight) * 0.2)
    model.save_pretrained(directory)
    return model


def drafter_raw_config(target: Any, **overrides: Any) -> dict[str, Any]:
    """config.json of a drafter for a transformers target config; `dflash_config` entries are overridden by name."""
    dflash = {"mask_token_id": 3, "target_layer_ids": [0, 2, 3]}
    raw: dict[str, Any] = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "hidden_size": target.hidden_size,
        "intermediate_size": 56,
        "num_hidden_layers": 2,
        "num_attention_heads": target.num_attention_heads,
        "num_key_value_heads": target.num_key_value_heads,
        "head_dim": 6,
        "rms_norm_eps": 1e-6,
        "rope_theta": 5000.0,
        "max_position_embeddings": 256,
        "vocab_size": target.vocab_size,
        "block_size": 6,
        "num_target_layers": target.num_hidden_layers,
        "dflash_config": dflash,
    }
    for key, value in overrides.items():
        (dflash if key in dflash else raw)[key] = value
    return raw


def make_drafter(directory: Path, target: nn.Module, *, seed: int = 1, **overrides: Any) -> None:
    """Saves a random drafter for `target`. Its layers are damped so that it agrees with the target now and then."""
    raw = drafter_raw_config(target.config, **overrides)
    H, D, inter = raw["hidden_size"], raw["head_dim"], raw["intermediate_size"]
    q, g = raw["num_attention_heads"] * D, raw["num_key_value_heads"] * D
    taps = len(raw["dflash_config"]["target_layer_ids"])
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (H, taps * H), "hidden_norm.weight": (H,), "norm.weight": (H,)}
    for index in range(raw["num_hidden_layers"]):
        prefix = f"layers.{index}."
        shapes |= {
            prefix + "input_layernorm.weight": (H,),
            prefix + "post_attention_layernorm.weight": (H,),
            prefix + "self_attn.q_proj.weight": (q, H),
            prefix + "self_attn.k_proj.weight": (g, H),
            prefix + "self_attn.v_proj.weight": (g, H),
            prefix + "self_attn.o_proj.weight": (H, q),
            prefix + "self_attn.q_norm.weight": (D,),
            prefix + "self_attn.k_norm.weight": (D,),
            prefix + "mlp.gate_proj.weight": (inter, H),
            prefix + "mlp.up_proj.weight": (inter, H),
            prefix + "mlp.down_proj.weight": (H, inter),
        }
    generator = torch.Generator().manual_seed(seed)
    weights = {
        name: torch.randn(shape, generator=generator) * 0.15
        if len(shape) == 2
        else 1.0 + torch.randn(shape, generator=generator) * 0.2
        for name, shape in shapes.items()
    }
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(raw))
    save_file(weights, directory / "model.safetensors")


def fit_drafter(
    directory: Path, target: nn.Module, prompts: list[list[int]], *, text_len: int = 40, steps: int = 40
) -> None:
    """Overfits the drafter in `directory` to the target's greedy continuations, so that drafts get accepted."""
    drafter = ReferenceDrafter(directory)
    W, generator = drafter.block_size, torch.Generator().manual_seed(0)
    with torch.no_grad():
        texts = [
            target.generate(
                torch.tensor([p]), max_new_tokens=text_len, do_sample=False, eos_token_id=None, pad_token_id=0
            )
            for p in prompts
        ]
        taps = [run_target(target, text[0].tolist(), drafter.target_layer_ids)[1] for text in texts]
    target.requires_grad_(False)
    for weight in drafter.weights.values():
        weight.requires_grad_(True)
    optimiser = torch.optim.Adam(drafter.weights.values(), lr=2e-2)
    for _ in range(steps):
        loss = torch.zeros(())
        for text, tap in zip(texts, taps, strict=True):
            anchor = int(torch.randint(4, text.shape[1] - W, (), generator=generator))
            block = [int(text[0, anchor]), *[drafter.mask_token_id] * (W - 1)]
            hidden = drafter.block(drafter.embed(target, block), drafter.context(tap[:anchor]), anchor)
            labels, logits = text[0, anchor + 1 : anchor + W], drafter.logits(target, hidden[1:])
            kept = logits.gather(1, labels[:, None])[:, 0].isfinite()  # a cut vocabulary has no row for the others
            if bool(kept.any()):
                loss = loss + nn.functional.cross_entropy(logits[kept], labels[kept])
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    save_file(
        load_file(directory / "model.safetensors")
        | {name: w.detach().contiguous() for name, w in drafter.weights.items()},
        directory / "model.safetensors",
    )


def as_speculators(directory: Path, target: nn.Module, draft_ids: list[int], **overrides: Any) -> None:
    """Rewrites the drafter in `directory` in the speculators format, with an embedding and a head of its own whose rows
    stand for the ascending `draft_ids`."""
    raw = json.loads((directory / "config.json").read_text())
    backbone = {
        key: value
        for key, value in raw.items()
        if key not in ("architectures", "dflash_config", "block_size", "num_target_layers")
    }
    (directory / "config.json").write_text(
        json.dumps(
            {
                "architectures": ["DFlashSpeculator"],
                "speculators_model_type": "dflash",
                "speculators_config": {"algorithm": "dflash"},
                "transformer_layer_config": backbone,
                "draft_vocab_size": len(draft_ids),
                "block_size": raw["block_size"],
                "aux_hidden_state_layer_ids": [i + 1 for i in raw["dflash_config"]["target_layer_ids"]],
                "mask_token_id": raw["dflash_config"]["mask_token_id"],
                "sliding_window_non_causal": False,
                **overrides,
            }
        )
    )
    ids = torch.tensor(draft_ids)
    t2d = torch.zeros(raw["vocab_size"], dtype=torch.bool)
    t2d[ids] = True
    generator = torch.Generator().manual_seed(3)

    def near(weight: torch.Tensor) -> torch.Tensor:
        """Other values than the target's, so that taking the wrong one shows."""
        return (weight.detach() + torch.randn(weight.shape, generator=generator) * 0.02).contiguous()

    save_file(
        load_file(directory / "model.safetensors")
        | {
            "embed_tokens.weight": near(target.get_input_embeddings().weight),
            "lm_head.weight": near(target.get_output_embeddings().weight[ids]),
            "d2t": ids - torch.arange(len(ids)),
            "t2d": t2d,
        },
        directory / "model.safetensors",
    )
