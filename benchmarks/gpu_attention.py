"""Decode attention kernels on a GPU by shape: the split-KV kernels and their cuts, flash-attn, and the bytes they move.

    python benchmarks/gpu_attention.py --seconds 80 --out gpu_attention.json

Every call of a graph reads another cache, so that K and V come from memory and not from L2. `engine.attention
.cuda_choice` is filled from the results: `chosen` marks what it takes now, `best` the fastest. `bulk` is the kernel fed
by the tensor copy engine.
"""

import argparse
import itertools
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from gpu_timing import READ_BYTES_PER_S, compile_in_parallel, graph_us, part_of, write

from engine.attention import flash
from engine.attention.context import AttentionGroup
from engine.attention.cuda_choice import BulkCut, DecodeCut, bulk_cut, decode_cut
from engine.attention.cuda_paged import num_multiprocessors
from engine.kernels.available import copy_engine, dependent_launch
from engine.kernels.decode_attention import decode_attention
from engine.kernels.merge_splits import Workspace, row_tiles

MODELS = {"smollm2": (9, 3, 64), "qwen3-8b": (32, 8, 128)}  # heads, KV heads, head size
COLD_BYTES = 160 << 20
MOST_BYTES = 20 << 30


@dataclass(frozen=True, kw_only=True)
class Shape:
    """One decode call: R sequences, Q queries each, context tokens before them."""

    model: str
    page: int
    sequences: int
    queries: int
    context: int

    @property
    def kv_bytes(self) -> int:
        _, g, D = MODELS[self.model]
        return 2 * 2 * g * D * self.sequences * (self.context + self.queries)


def shapes() -> Iterator[Shape]:
    """The most telling ones first: time may end before they do."""
    for context, sequences, (model, page) in itertools.product(
        (1024, 256, 4096, 16384, 32000), (1, 8, 32, 128), itertools.product(MODELS, (16, 128))
    ):
        for queries in (16, 1) if context != 1024 else (16, 8, 4, 1):
            shape = Shape(model=model, page=page, sequences=sequences, queries=queries, context=context)
            if shape.kv_bytes <= MOST_BYTES:
                yield shape


def cuts(shape: Shape) -> dict[str, DecodeCut | BulkCut]:
    """The choice of `cuda_choice` and others around it."""
    h, g, D = MODELS[shape.model]
    pages = -(-(shape.context + shape.queries) // shape.page)
    length = pages * shape.page
    common = {
        "sequences": shape.sequences,
        "queries": shape.queries,
        "group": h // g,
        "kv_heads": g,
        "head_dim": D,
        "num_sms": num_multiprocessors(torch.device("cuda")),
    }
    chosen = decode_cut(**common, max_kv_len=length)
    bulk = bulk_cut(**common, block_size=shape.page) if copy_engine() else None
    found: dict[str, DecodeCut | BulkCut] = {"chosen": bulk or chosen}
    if bulk is not None:
        found["split-KV"] = chosen
        found["bulk 4 stages"] = replace(bulk, num_stages=4)
        found["bulk 32 positions"] = replace(bulk, positions=32, num_stages=2 * bulk.num_stages)
    for splits in (1, 2, 4, 8, 16, 64):
        if splits <= -(-length // 64) and shape.sequences * g * splits <= 2048:
            found[f"{splits} splits"] = replace(chosen, num_splits=splits)
    found["128 positions"] = replace(chosen, positions=128, num_splits=max(1, chosen.num_splits // 2))
    found["32 positions"] = replace(chosen, positions=32, num_stages=4)
    found["64 positions"] = replace(chosen, positions=64, num_stages=3)
    found["8 warps"] = replace(chosen, num_warps=8)
    return found


def calls_of(shape: Shape, cut: DecodeCut | BulkCut | None) -> list[Callable[[], object]]:
    """One call per cold cache; cut None: flash-attn."""
    h, g, D = MODELS[shape.model]
    R, Q = shape.sequences, shape.queries
    columns = -(-(shape.context + Q) // shape.page)
    copies = max(1, min(24, COLD_BYTES // shape.kv_bytes))
    q = torch.randn(R * Q, h, D, device="cuda").bfloat16()
    out = torch.empty(R * Q, h * D, device="cuda", dtype=torch.bfloat16)
    table = (torch.randperm(R * columns, device="cuda") + 1).view(R, columns)
    start = torch.full((R,), shape.context, device="cuda")
    group = AttentionGroup(
        first_row=0,
        q_lens=(Q,) * R,
        q_start_R=start,
        kv_len_R=start + Q,
        block_table_RB=table,
        max_kv_len=columns * shape.page,
        causal=True,
    )
    caches = [
        torch.randn(2, 1 + R * columns, shape.page, g, D, device="cuda", dtype=torch.bfloat16) for _ in range(copies)
    ]
    if cut is None:
        return [lambda kv=kv: flash.flash_attention(q, kv[0], kv[1], group) for kv in caches]  # type: ignore[misc]
    units = R * g * row_tiles(Q, h // g, cut.rows)
    split = cut.num_splits > 1
    shared: dict[str, Any] = {
        "q_len": Q,
        "q_start_R": group.q_start_R,
        "kv_len_R": group.kv_len_R,
        "block_table_RB": table,
        "causal": True,
        "cut": cut,
        "workspace": Workspace.create(units, cut, D, q.device) if split else None,
        "pdl": dependent_launch(),
    }
    attend: Callable[..., None] = decode_attention
    if isinstance(cut, BulkCut):
        from engine.kernels.bulk_attention import bulk_attention

        attend = bulk_attention

    def call(kv: torch.Tensor) -> Callable[[], object]:
        return lambda: attend(q, kv[0], kv[1], out, **shared)

    return [call(kv) for kv in caches]


def compile_part(part: str) -> None:
    mine = part_of(part)
    seen: set[tuple[object, ...]] = set()
    for shape in shapes():
        for cut in cuts(shape).values():
            splits = (cut.num_splits > 1, cut.num_splits.bit_length())
            kind = (shape.model, shape.page, replace(cut, num_splits=1), splits)
            if kind not in seen:
                seen.add(kind)
                if mine(len(seen)):
                    calls_of(replace(shape, sequences=1), cut)[0]()
    torch.cuda.synchronize()


def measure(shape: Shape) -> dict[str, object]:
    times = {name: graph_us(calls_of(shape, cut)) for name, cut in cuts(shape).items()}
    if flash.unavailable_reason() is None:
        times["flash-attn"] = graph_us(calls_of(shape, None))
    floor = shape.kv_bytes / READ_BYTES_PER_S * 1e6
    chosen = cuts(shape)["chosen"]
    return {
        **asdict(shape),
        "floor_us": round(floor, 2),
        "us": {name: round(value, 2) for name, value in times.items()},
        "best": min(times, key=lambda name: times[name]),
        "cut": asdict(chosen),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=80.0, help="measuring stops after so many, compiling included")
    parser.add_argument("--out", type=Path, default=None, help="JSON file to write")
    parser.add_argument("--part", default=None, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    if arguments.part is not None:
        compile_part(arguments.part)
        return
    begin = time.perf_counter()
    compile_in_parallel(__file__, [])
    compiled = time.perf_counter() - begin
    results, left_out = [], 0
    for shape in shapes():
        if time.perf_counter() - begin > arguments.seconds:
            left_out += 1
            continue
        results.append(measure(shape))
        row = results[-1]
        print(
            f"{shape.model:>9} page {shape.page:>3} R {shape.sequences:>3} Q {shape.queries:>2} ctx {shape.context:>5}"
            f"  floor {row['floor_us']:>8}  {row['us']}",
            file=sys.stderr,
        )
    write(arguments.out, results, compile_s=round(compiled, 1), left_out=left_out)


if __name__ == "__main__":
    main()
