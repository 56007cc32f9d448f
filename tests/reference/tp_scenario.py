"""One scenario of target and drafter work, run on every rank of a spawned Gloo group."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp
from torch import Tensor

from engine.parallel.tp_group import TpGroup
from tests.reference.paged import PagedModels, Piece, engine_config

PROMPT = [1, 50, 61, 7]
TEXTS = [[9, 8, 7, 6, 5, 4, 90, 33, 2], [17, 4, 90, 33, 21]]


@dataclass(frozen=True, kw_only=True)
class Case:
    """mutation: done to the gathered hidden states: nothing, "drop" (rank 1's part lost), "permute" (swapped).

    taps_file: captured hidden states to make the context of, in place of the ranks' own.
    """

    target_dir: Path
    drafter_dir: Path
    mutation: str | None = None
    taps_file: Path | None = None
    options: dict[str, Any] = field(default_factory=dict)


def run_scenario(case: Case, tp: TpGroup) -> dict[str, Any]:
    """Everything a rank computes, whole (vocabulary joined); per-rank counts of the hidden-state gather."""
    config = engine_config(
        case.target_dir, case.drafter_dir, tensor_parallel_size=tp.size, num_blocks=40, **case.options
    )
    engine = PagedModels.load(config, tp, num_seqs=3)
    assert engine.drafter is not None
    if case.mutation is not None:
        mutate_gather(tp, case.mutation)
    out = engine.forward([[Piece(seq=s, start=0, ids=text) for s, text in enumerate(TEXTS)]], keep_context=False)
    assert out.taps_NTH is not None
    calls, sent = tp.hidden_gathers.calls, tp.hidden_gathers.bytes
    context = engine.drafter.context_features(out.taps_NTH if case.taps_file is None else torch.load(case.taps_file))
    calls, sent = tp.hidden_gathers.calls - calls, tp.hidden_gathers.bytes - sent
    engine.forward([[Piece(seq=s, start=0, ids=text) for s, text in enumerate(TEXTS)]])
    hidden = engine.draft_hidden({s: (len(text), 40 + s) for s, text in enumerate(TEXTS)})
    slots = torch.cat([engine.slots(s, torch.arange(len(text))) for s, text in enumerate(TEXTS)])
    assert engine.kv.drafter_stack is not None
    tokens, accepted = engine.generate(PROMPT, seq=2, max_new_tokens=24, draft_len=config.max_draft_len)
    return {
        "logits": engine.full_logits(out.hidden_NH),
        "taps": out.taps_NTH,
        "context": context,
        "context_kv": engine.kv.drafter_stack[:, slots].clone(),
        "draft_logits": engine.full_logits(hidden.flatten(0, 1)),
        "tokens": tokens,
        "accepted": accepted,
        "calls": calls,
        "bytes": sent,
    }


def mutate_gather(tp: TpGroup, mutation: str) -> None:
    honest = tp.hidden_state_gather

    def wrong(x: Tensor, dim: int = -1) -> Tensor:
        first, *rest = honest(x, dim).chunk(tp.size, dim)
        if mutation == "drop":
            return torch.cat([first, *[torch.zeros_like(part) for part in rest]], dim)
        assert mutation == "permute"
        return torch.cat([*rest, first], dim)

    tp.hidden_state_gather = wrong  # type: ignore[method-assign]


def _rank_main(rank: int, size: int, directory: str, cases: list[Case]) -> None:
    torch.set_num_threads(1)
    results = []
    with torch.inference_mode():
        tp = TpGroup.create(
            rank=rank, size=size, init_method=f"file://{directory}/rendezvous", device="cpu", timeout_s=60
        )
        for case in cases:
            honest = tp.hidden_state_gather
            results.append(run_scenario(case, tp))
            tp.hidden_state_gather = honest  # type: ignore[method-assign]
        total = tp.all_reduce(torch.full((3,), 0.5 + rank))
        assert torch.equal(total, torch.full((3,), sum(0.5 + r for r in range(size))))
        tp.close()
    torch.save(results, f"{directory}/rank{rank}.pt")


def spawn_ranks(cases: list[Case], *, size: int, directory: Path) -> list[list[dict[str, Any]]]:
    """results[rank][case]."""
    mp.spawn(_rank_main, args=(size, str(directory), cases), nprocs=size)
    return [torch.load(directory / f"rank{rank}.pt") for rank in range(size)]
