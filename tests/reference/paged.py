"""Drives engine models over a paged cache step by step, as a runner would, for comparison with independent models.

Imports neither transformers nor Ray, so that spawned ranks start quickly.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine.attention.context import AttentionContext, AttentionGroup
from engine.attention.kv_cache_tensors import KvCache
from engine.config.drafter import parse_drafter_config
from engine.config.engine import EngineConfig
from engine.config.model import parse_target_config
from engine.models.dflash import DFlashDrafter
from engine.models.target import TargetModel, TargetOutput
from engine.parallel.tp_group import TpGroup
from engine.weights.loader import load_drafter, load_target


def engine_config(target_dir: Path, drafter_dir: Path | None = None, **overrides: Any) -> EngineConfig:
    """An EngineConfig for the models under test: float32 on the CPU, 64 blocks of 4 unless overridden."""
    target = parse_target_config(target_dir)
    drafter = parse_drafter_config(drafter_dir, target) if drafter_dir is not None else None
    draft_len = drafter.block_size - 1 if drafter is not None else 0
    values: dict[str, Any] = {
        "model_dir": str(target_dir),
        "target": target,
        "drafter_dir": str(drafter_dir) if drafter_dir is not None else None,
        "drafter": drafter,
        "identity": "toy",
        "dtype": "float32",
        "device": "cpu",
        "num_threads": 1,
        "tensor_parallel_size": 1,
        "drafter_tensor_parallel": True,
        "hidden_state_gather": "fused",
        "max_model_len": 128,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
        "block_size": 4,
        "num_blocks": 64,
        "enable_prefix_caching": True,
        "pipeline_depth": 0,
        "max_draft_len": draft_len,
        "draft_len_choices": tuple(sorted({0, draft_len})),
        "draft_len_schedule": (),
        "gate_window": 0,
        "gate_threshold": 0.0,
        **overrides,
    }
    return EngineConfig(**values)


@dataclass(frozen=True, kw_only=True)
class Piece:
    """`ids` of one sequence at positions start .. start + len(ids) - 1."""

    seq: int
    start: int
    ids: list[int]


@dataclass(kw_only=True)
class PagedModels:
    """Target, drafter and cache of one rank; sequence s owns the block ids tables[s], in any order."""

    config: EngineConfig
    tp: TpGroup
    tables: Tensor
    target: TargetModel
    drafter: DFlashDrafter | None
    kv: KvCache = field(init=False)

    def __post_init__(self) -> None:
        self.kv = KvCache.create(self.config, self.tp)

    @classmethod
    def load(
        cls, config: EngineConfig, tp: TpGroup | None = None, *, num_seqs: int, shuffle: bool = True
    ) -> "PagedModels":
        """Block ids are shuffled over the sequences, or given out in order."""
        tp = tp or TpGroup.solo()
        per_seq = (config.num_blocks - 1) // num_seqs
        ids = torch.arange(1, config.num_blocks)
        if shuffle:
            ids = ids[torch.randperm(len(ids), generator=torch.Generator().manual_seed(5))]
        return cls(
            config=config,
            tp=tp,
            tables=ids[: per_seq * num_seqs].view(num_seqs, per_seq).to(config.device),
            target=load_target(config, tp),
            drafter=load_drafter(config, tp) if config.drafter is not None else None,
        )

    def slots(self, seq: int, positions: Tensor) -> Tensor:
        size = self.config.block_size
        return self.tables[seq, positions // size] * size + positions % size

    def context(
        self, groups: list[list[Piece]], *, causal: bool = True, slack: int = 0
    ) -> tuple[Tensor, Tensor, AttentionContext]:
        """(ids, positions, context) of a step. slack: how far max_kv_len lies above the longest sequence."""
        made, first_row, device = [], 0, self.config.device
        pieces = [piece for group in groups for piece in group]
        positions = [torch.arange(p.start, p.start + len(p.ids), device=device) for p in pieces]
        for group in groups:
            lens = [p.start + len(p.ids) for p in group]
            made.append(
                AttentionGroup(
                    first_row=first_row,
                    q_lens=tuple(len(p.ids) for p in group),
                    q_start_R=torch.tensor([p.start for p in group], device=device),
                    kv_len_R=torch.tensor(lens, device=device),
                    block_table_RB=self.tables[[p.seq for p in group]],
                    max_kv_len=max(lens) + slack,
                    causal=causal,
                )
            )
            first_row += made[-1].num_rows
        slot_mapping = torch.cat([self.slots(p.seq, pos) for p, pos in zip(pieces, positions, strict=True)])
        ids = torch.tensor([token for p in pieces for token in p.ids], device=device)
        return ids, torch.cat(positions), AttentionContext(slot_mapping_N=slot_mapping, groups=tuple(made))

    def forward(self, groups: list[list[Piece]], *, slack: int = 0, keep_context: bool = True) -> TargetOutput:
        """Runs the target; the drafter's context of the rows is written too if there is a drafter."""
        ids, positions, ctx = self.context(groups, slack=slack)
        taps = self.config.drafter.target_layer_ids if self.config.drafter is not None else (0, 2, 3)
        out = self.target.forward(ids, positions, ctx, self.kv, taps)
        if self.drafter is not None and keep_context:
            assert out.taps_NTH is not None
            features = self.drafter.context_features(out.taps_NTH)
            self.drafter.write_context(features, positions, ctx.slot_mapping_N, self.kv)
        return out

    def full_logits(self, hidden: Tensor) -> Tensor:
        """[M, V] float32, the ranks' parts joined and the padding cut."""
        return self.tp.all_gather(self.target.logits(hidden), dim=-1)[:, : self.config.target.vocab_size]

    def draft_hidden(self, anchors: dict[int, tuple[int, int]], *, slack: int = 0) -> Tensor:
        """[R, W, H] for {sequence: (position, token)} anchors."""
        assert self.drafter is not None and self.config.drafter is not None
        W, mask = self.config.drafter.block_size, self.config.drafter.mask_token_id
        pieces = [Piece(seq=s, start=p, ids=[token, *[mask] * (W - 1)]) for s, (p, token) in anchors.items()]
        ids, positions, ctx = self.context([pieces], causal=False, slack=slack)
        block = self.drafter.enter(self.target.embedding, ids, positions)
        hidden = self.drafter.forward(block, ctx, self.kv)
        return hidden.view(len(anchors), W, -1)

    def generate(
        self, prompt: list[int], *, seq: int, max_new_tokens: int, draft_len: int
    ) -> tuple[list[int], list[int]]:
        """Greedy speculative decoding of one sequence; (tokens, accepted drafts of each verify step)."""
        out = self.forward([[Piece(seq=seq, start=0, ids=prompt)]])
        tokens, accepted = [*prompt, int(self.full_logits(out.hidden_NH[-1:]).argmax())], []
        while (left := max_new_tokens - (len(tokens) - len(prompt))) > 0:
            anchor = len(tokens) - 1
            hidden = self.draft_hidden({seq: (anchor, tokens[-1])})[0]
            k = min(draft_len, left - 1)
            drafts = self.full_logits(hidden[1 : k + 1]).argmax(-1).tolist()
            out = self.forward([[Piece(seq=seq, start=anchor, ids=[tokens[-1], *drafts])]])
            verdict = self.full_logits(out.hidden_NH).argmax(-1).tolist()
            count = 0
            while count < k and drafts[count] == verdict[count]:
                count += 1
            tokens += verdict[: count + 1]
            accepted.append(count)
        return tokens[len(prompt) :], accepted
