"""A straightforward greedy DFlash loop: the oracle for the engine's tokens and for the accepted count of every step.

Target: a `transformers` model with `output_hidden_states`. Drafter: plain functions of its safetensors. No K/V cache:
each step runs the target over the whole text and the drafter over the whole context. Nothing of the engine is imported.
Algorithm: arXiv 2602.06036; every mask slot predicts the token at its own position, context states are those of the
verified tokens only.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding


@dataclass(kw_only=True)
class LoopResult:
    """tokens: generated ids, the stop id included. accepted: matching drafts of each verify step, before a stop cuts
    it. drafts: the drafts each verify step checked."""

    tokens: list[int]
    accepted: list[int] = field(default_factory=list)
    drafts: list[list[int]] = field(default_factory=list)

    @property
    def acceptance_length(self) -> float:
        """Tokens committed per verify step, the target's own included."""
        return 1.0 + sum(self.accepted) / max(len(self.accepted), 1)


class ReferenceDrafter:
    """The drafter's forward pass over explicit context states; z-lab's or speculators' files.

    target_ids: what the rows of its own head stand for, None without one. sees: per layer (causal, window or None).
    """

    def __init__(self, directory: str | Path, dtype: torch.dtype = torch.float32) -> None:
        raw = json.loads((Path(directory) / "config.json").read_text())
        stored = load_file(Path(directory) / "model.safetensors")
        self.weights = {name: w.to(dtype) for name, w in stored.items() if w.is_floating_point()}
        self.target_ids: Tensor | None = None
        if "lm_head.weight" in stored:
            self.target_ids = torch.arange(stored["lm_head.weight"].shape[0]) + stored.get("d2t", 0)
        dflash = raw.get("dflash_config", raw)
        self.mask_token_id: int = dflash["mask_token_id"]
        if "transformer_layer_config" in raw:
            self.target_layer_ids = [i - 1 for i in raw["aux_hidden_state_layer_ids"]]
            sliding_causal = not raw["sliding_window_non_causal"]
            raw = raw | raw["transformer_layer_config"]
        else:
            self.target_layer_ids = dflash["target_layer_ids"]
            sliding_causal = not dflash.get("use_swa")
        kinds = raw.get("layer_types") or ["full_attention"] * raw["num_hidden_layers"]
        window = dflash.get("swa_window_size") or raw.get("sliding_window")
        self.sees = [
            (raw.get("is_causal", slides and sliding_causal), window if slides else None)
            for slides in (kind == "sliding_attention" for kind in kinds)
        ]
        self.block_size: int = raw.get("block_size") or dflash["block_size"]
        self.num_layers: int = raw["num_hidden_layers"]
        self.heads: int = raw["num_attention_heads"]
        self.kv_heads: int = raw["num_key_value_heads"]
        self.head_dim: int = raw["head_dim"]
        self.eps: float = raw["rms_norm_eps"]
        rope = raw.get("rope_scaling") or {"rope_type": "default"}
        self.rotary = Qwen3RotaryEmbedding(
            Qwen3Config(
                head_dim=self.head_dim,
                max_position_embeddings=raw["max_position_embeddings"],
                rope_parameters={"rope_theta": raw["rope_theta"], **rope},
            )
        )

    def context(self, taps_CX: Tensor) -> Tensor:
        """[C, taps * H] -> [C, H], shared by all layers."""
        return self._norm(taps_CX @ self.weights["fc.weight"].T, "hidden_norm.weight")

    def block(self, embedded_WH: Tensor, context_CH: Tensor, start: int) -> Tensor:
        """Final hidden states of the block at positions start .. start+W-1, given the context at 0 .. start-1."""
        assert context_CH.shape[0] == start
        x = embedded_WH
        W = x.shape[0]
        for index in range(self.num_layers):
            prefix = f"layers.{index}."
            h = self._norm(x, prefix + "input_layernorm.weight")
            both = torch.cat((context_CH, h))
            q = self._heads(h, prefix + "self_attn.q", self.heads)
            k = self._heads(both, prefix + "self_attn.k", self.kv_heads)
            v = (both @ self.weights[prefix + "self_attn.v_proj.weight"].T).view(start + W, self.kv_heads, -1)
            q = self._rope(q, torch.arange(start, start + W))
            k = self._rope(k, torch.arange(start + W))
            k, v = (t.repeat_interleave(self.heads // self.kv_heads, dim=1) for t in (k, v))
            scores = torch.einsum("qhd,khd->hqk", q, k) / self.head_dim**0.5
            scores = scores.masked_fill(self._hidden(index, start, W), float("-inf"))
            mixed = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).reshape(W, -1)
            x = x + mixed @ self.weights[prefix + "self_attn.o_proj.weight"].T
            h = self._norm(x, prefix + "post_attention_layernorm.weight")
            gate, up = (h @ self.weights[f"{prefix}mlp.{name}_proj.weight"].T for name in ("gate", "up"))
            x = x + (F.silu(gate) * up) @ self.weights[prefix + "mlp.down_proj.weight"].T
        return self._norm(x, "norm.weight")

    def _hidden(self, layer: int, start: int, W: int) -> Tensor:
        """[W, start + W], True where the layer's query must not look."""
        causal, window = self.sees[layer]
        query, key = torch.arange(start, start + W)[:, None], torch.arange(start + W)
        hidden = (key > query) & causal
        return hidden if window is None else hidden | (key <= query - window)

    def embed(self, target: nn.Module, ids: list[int]) -> Tensor:
        """By its own embedding, or else the target's."""
        own = self.weights.get("embed_tokens.weight")
        return target.get_input_embeddings()(torch.tensor(ids)) if own is None else own[torch.tensor(ids)]

    def logits(self, target: nn.Module, hidden: Tensor) -> Tensor:
        """Over the target's vocabulary; -inf for ids that its own head has no row for."""
        if self.target_ids is None:
            return target.get_output_embeddings()(hidden)
        own = hidden @ self.weights["lm_head.weight"].T
        whole = own.new_full((own.shape[0], target.config.vocab_size), float("-inf"))
        return whole.index_copy(1, self.target_ids, own)

    def _heads(self, x: Tensor, name: str, count: int) -> Tensor:
        projected = (x @ self.weights[name + "_proj.weight"].T).view(x.shape[0], count, self.head_dim)
        return self._norm(projected, name + "_norm.weight")

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + self.eps).sqrt() * self.weights[name]

    def _rope(self, x: Tensor, positions: Tensor) -> Tensor:
        cos, sin = (t[0, :, None] for t in self.rotary(x, positions[None]))
        a, b = x.chunk(2, dim=-1)
        return x * cos + torch.cat((-b, a), dim=-1) * sin


def run_target(
    target: nn.Module, ids: list[int], target_layer_ids: list[int], num_logits: int = 0
) -> tuple[Tensor, Tensor]:
    """Logits [n, V] of every position, or of the last `num_logits`; the taps [n, taps * H] of the given layers."""
    out = target(torch.tensor([ids]), output_hidden_states=True, use_cache=False, logits_to_keep=num_logits)
    return out.logits[0], torch.cat([out.hidden_states[i + 1][0] for i in target_layer_ids], dim=-1)


@torch.inference_mode()
def dflash_generate(
    target: nn.Module,
    drafter: ReferenceDrafter,
    prompt_ids: list[int],
    *,
    max_new_tokens: int,
    draft_len: int,
    stop_ids: tuple[int, ...] = (),
    width: int | None = None,
) -> LoopResult:
    """Greedy decoding with at most `draft_len` drafts a step (fewer when fewer tokens may still be emitted).

    width: rows of the drafter's block, default those it was trained with.
    """
    width = width or drafter.block_size
    assert 0 <= draft_len < width <= drafter.block_size
    logits, taps = run_target(target, prompt_ids, drafter.target_layer_ids, num_logits=1)
    tokens = [*prompt_ids, int(logits[-1].argmax())]
    result = LoopResult(tokens=[])
    while True:
        generated = tokens[len(prompt_ids) :]
        stops = [i for i, token in enumerate(generated) if token in stop_ids]
        if stops or len(generated) >= max_new_tokens:
            result.tokens = generated[: stops[0] + 1] if stops else generated[:max_new_tokens]
            return result
        k = min(draft_len, max_new_tokens - len(generated) - 1)
        anchor = len(tokens) - 1
        block = [tokens[-1], *[drafter.mask_token_id] * (width - 1)]
        hidden = drafter.block(drafter.embed(target, block), drafter.context(taps), anchor)
        drafts = drafter.logits(target, hidden[1 : k + 1]).argmax(-1).tolist()

        logits, taps = run_target(target, tokens + drafts, drafter.target_layer_ids, num_logits=k + 1)
        posterior = logits.argmax(-1).tolist()
        accepted = 0
        while accepted < k and drafts[accepted] == posterior[accepted]:
            accepted += 1
        tokens += posterior[: accepted + 1]
        taps = taps[: anchor + accepted + 1]
        result.accepted.append(accepted)
        result.drafts.append(drafts)
