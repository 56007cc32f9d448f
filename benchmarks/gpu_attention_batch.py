"""Decode attention of batches as the engine meets it: between products that hold the card at its power limit.

    python benchmarks/gpu_attention_batch.py --seconds 45 --out gpu_attention_batch.json

Shapes of Qwen3-8B. A CUDA graph holds layers, each of the products before attention (their weights larger than L2), a
row kernel and the attention of that layer's own cache; pages lie scattered in pools of gigabytes and requests are of
unequal lengths. The time of an attention is the difference from the same graph without it, over the layers, in medians
of rounds in which all kernels take turns. `wrong` counts outputs that differ from the split-KV kernel's by more than
bfloat16 explains (`off`), or from the kernel's own with the requests in another order (`other_bits`).
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from gpu_timing import READ_BYTES_PER_S, compile_in_parallel, part_of, write
from torch import Tensor
from trace_table import GpuMonitor

import engine.kernels.merge_splits as merge_splits
from engine.attention.cuda_choice import BulkCut, DecodeCut, decode_cut
from engine.attention.cuda_paged import num_multiprocessors
from engine.kernels.available import copy_engine, dependent_launch
from engine.kernels.bulk_attention import bulk_attention
from engine.kernels.decode_attention import decode_attention
from engine.kernels.merge_splits import Workspace, row_tiles
from engine.kernels.row_ops import rms_norm

HEADS, KV_HEADS, HEAD_DIM, PAGE = 32, 8, 128, 16
HIDDEN, QKV, GATE_UP = 4096, 6144, 24576
LAYERS, WEIGHTS = 16, 4
POOL_PAGES = 24576  # of K, and of V, of a layer: 0.8 GB
SHORTEST, LONGEST = 400, 1000
ROUNDS, REPLAYS, WARM_S = 9, 2, 0.3


@dataclass(frozen=True, kw_only=True)
class Shape:
    """R requests of Q queries; falling: the longest first."""

    requests: int
    queries: int
    falling: bool = False

    @property
    def lengths(self) -> list[int]:
        generator = torch.Generator().manual_seed(self.requests)
        drawn = torch.randint(SHORTEST, LONGEST + 1, (self.requests,), generator=generator).tolist()
        return sorted(drawn, reverse=True) if self.falling else drawn

    @property
    def rows(self) -> int:
        return self.requests * self.queries


SHAPES = (
    Shape(requests=16, queries=16),
    Shape(requests=32, queries=8),
    Shape(requests=16, queries=8),
    Shape(requests=32, queries=16),
    Shape(requests=128, queries=16),
    Shape(requests=8, queries=16),
    Shape(requests=128, queries=8),
    Shape(requests=12, queries=16),
    Shape(requests=32, queries=1),
    Shape(requests=128, queries=1),
    Shape(requests=8, queries=8),
    Shape(requests=64, queries=16),
    Shape(requests=128, queries=16, falling=True),
)


@dataclass(frozen=True, kw_only=True)
class Variant:
    """merge_heads: of a program of the merge; None: as the engine chooses."""

    cut: DecodeCut | BulkCut
    merge_heads: int | None = None


def variants(shape: Shape) -> dict[str, Variant]:
    R, Q = shape.requests, shape.queries
    common = {
        "sequences": R,
        "queries": Q,
        "group": HEADS // KV_HEADS,
        "kv_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "num_sms": num_multiprocessors(torch.device("cuda")) if torch.cuda.is_available() else 132,
    }
    chosen = decode_cut(**common, max_kv_len=LONGEST)
    found: dict[str, DecodeCut | BulkCut] = {"split-KV": chosen}
    if R <= 8:
        found["bulk"] = BulkCut(num_splits=2)
    for splits in (1, 2):
        if splits != chosen.num_splits and R * splits <= 64:
            found[f"split-KV, {splits} splits"] = replace(chosen, num_splits=splits)
    if Q <= 8:
        found["split-KV, 1 split, 64 rows"] = replace(chosen, num_splits=1, rows=64)
        found["split-KV, 1 split, 128 positions"] = replace(chosen, num_splits=1, positions=128, num_stages=2)
    if not shape.falling:
        found["split-KV, 1 split, 4 stages"] = replace(chosen, num_splits=1, num_stages=4)
    splits_of_one = max(1, 256 // (R * KV_HEADS))
    for splits in sorted({1, 2, splits_of_one, max(1, splits_of_one // 2)}):
        if 12 <= R * splits <= 64 or splits == splits_of_one:
            found[f"1 group, {splits} splits"] = BulkCut(num_splits=splits, num_stages=3)
    found["1 group, 32 positions"] = BulkCut(num_splits=splits_of_one, positions=32, num_stages=6)
    splits_of_two = max(1, 128 // (R * KV_HEADS))
    found["2 groups"] = BulkCut(num_splits=splits_of_two, num_stages=4, groups=2)
    found["2 groups, 32 positions"] = BulkCut(num_splits=splits_of_two, num_stages=10, positions=32, groups=2)
    named = {name: Variant(cut=cut) for name, cut in found.items()}
    for name, cut in found.items():
        if cut.num_splits > 1 and name in ("split-KV", "bulk", f"1 group, {splits_of_one} splits"):
            for heads in (1, 4, 8, 16, 32):
                named[f"{name}, merge of {heads}"] = Variant(cut=cut, merge_heads=heads)
    return named


class Layers:
    """Caches and weights of LAYERS layers, and a batch of requests in each."""

    def __init__(self, shapes: Iterator[Shape], pages: int) -> None:
        self.pages = pages
        size = (2, pages, PAGE, KV_HEADS, HEAD_DIM)
        self.caches = [_random(*size) for _ in range(LAYERS if pages == POOL_PAGES else 1)]
        most = max(shape.rows for shape in shapes)
        self.q = _random(most, QKV)[:, : HEADS * HEAD_DIM]
        self.x = _random(most, HIDDEN)
        self.norm = torch.ones(HIDDEN, device="cuda", dtype=torch.bfloat16)

    def add_products(self) -> None:
        self.weights = [
            tuple(_random(n, k) * 0.02 for n, k in ((GATE_UP, HIDDEN), (HIDDEN, GATE_UP // 2), (QKV, HIDDEN)))
            for _ in range(WEIGHTS)
        ]

    def products(self, layer: int, rows: int) -> None:
        """A layer's without the one after attention; of many rows the last alone, which takes as long."""
        gate_up, down, qkv = self.weights[layer % WEIGHTS]
        x = self.x[:rows]
        if rows <= 512:
            x = (x @ gate_up.T)[:, : GATE_UP // 2] @ down.T
        y = x @ qkv.T
        rms_norm(y[:, :HIDDEN], self.norm, 1e-6, pdl=dependent_launch())

    def attention(self, shape: Shape, variant: Variant, *, order: list[int] | None = None) -> tuple[Tensor, Any]:
        """(output, call of a layer). order: of the requests in the batch."""
        R, Q, cut = shape.requests, shape.queries, variant.cut
        columns = -(-LONGEST // PAGE)
        generator = torch.Generator(device="cuda").manual_seed(1)
        table = torch.randperm(self.pages, device="cuda", generator=generator)[: R * columns].view(R, columns)
        length = torch.tensor(shape.lengths, device="cuda")
        q = self.q[: shape.rows].view(shape.rows, HEADS, HEAD_DIM)
        if order is not None:
            table, length = table[order].contiguous(), length[order].contiguous()
            q = q.view(R, Q, HEADS, HEAD_DIM)[order].view(shape.rows, HEADS, HEAD_DIM)
        out = torch.empty(shape.rows, HEADS * HEAD_DIM, device="cuda", dtype=torch.bfloat16)
        units = R * KV_HEADS * row_tiles(Q, HEADS // KV_HEADS, cut.rows)
        shared: dict[str, Any] = {
            "q_len": Q,
            "q_start_R": length - Q,
            "kv_len_R": length,
            "block_table_RB": table,
            "causal": True,
            "cut": cut,
            "workspace": Workspace.create(units, cut, HEAD_DIM, q.device) if cut.num_splits > 1 else None,
            "pdl": dependent_launch(),
        }
        attend: Callable[..., None] = bulk_attention if isinstance(cut, BulkCut) else decode_attention

        def call(layer: int) -> None:
            cache = self.caches[layer % len(self.caches)]
            attend(q, cache[0], cache[1], out, **shared)

        return out, call


def _random(*size: int) -> Tensor:
    return torch.empty(*size, device="cuda", dtype=torch.bfloat16).normal_()


def _use(variant: Variant) -> None:
    merge_splits.merge_heads = (
        MERGE_HEADS if variant.merge_heads is None else lambda **shape: variant.merge_heads  # type: ignore[assignment]
    )


MERGE_HEADS = merge_splits.merge_heads


def compile_part(part: str) -> None:
    mine = part_of(part)
    layers = Layers(iter(SHAPES), 256)
    seen: set[object] = set()
    for shape in SHAPES:
        for variant in variants(shape).values():
            splits = merge_splits.triton.next_power_of_2(variant.cut.num_splits)
            merge = variant.merge_heads or (splits > 1 and MERGE_HEADS(rows=shape.rows, heads=HEADS, num_splits=splits))
            kind = (replace(variant.cut, num_splits=1), splits, merge)
            if kind in seen:
                continue
            seen.add(kind)
            if mine(len(seen)):
                _use(Variant(cut=variant.cut, merge_heads=merge or None))
                layers.attention(Shape(requests=1, queries=shape.queries), variant)[1](0)
    torch.cuda.synchronize()


def graph_of(layers: Layers, rows: int, attend: Callable[[int], None] | None) -> torch.cuda.CUDAGraph:
    def run() -> None:
        for layer in range(LAYERS):
            layers.products(layer, rows)
            if attend is not None:
                attend(layer)

    layers.products(0, rows)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph


def elapsed_us(graph: torch.cuda.CUDAGraph) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(REPLAYS):
        graph.replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e3 / REPLAYS


def wrong_of(layers: Layers, shape: Shape, variant: Variant, expected: Tensor) -> dict[str, int]:
    """Outputs that are too far off, and outputs with other bits when the requests stand in another order."""
    out, call = layers.attention(shape, variant)
    out.fill_(float("nan"))
    call(0)
    off = (out.float() - expected.float()).abs() / (0.001 + 0.02 * expected.float().abs())
    order = torch.randperm(shape.requests, generator=torch.Generator().manual_seed(3)).tolist()
    other, call = layers.attention(shape, variant, order=order)
    call(0)
    back = torch.empty_like(out).view(shape.requests, -1)
    back[order] = other.view(shape.requests, -1)
    found = {"off": int((~(off <= 1)).sum()), "other_bits": int((back.view_as(out) != out).sum())}
    return {name: count for name, count in found.items() if count}


def measure(layers: Layers, shape: Shape, monitor: GpuMonitor) -> dict[str, object]:
    graphs = {"nothing": graph_of(layers, shape.rows, None)}
    wrong: dict[str, object] = {}
    found = variants(shape)
    expected, call = layers.attention(shape, next(iter(found.values())))
    call(0)
    kept = []  # what the graphs read
    for name, variant in found.items():
        _use(variant)
        try:
            wrong[name] = wrong_of(layers, shape, variant, expected)
            kept.append(layers.attention(shape, variant))
            graphs[name] = graph_of(layers, shape.rows, kept[-1][1])
        except Exception as error:
            wrong[name] = repr(error)[:300]
    warm = time.perf_counter()
    while time.perf_counter() < warm + WARM_S:
        elapsed_us(graphs["split-KV"])
    started = time.perf_counter()
    times: dict[str, list[float]] = {name: [] for name in graphs}
    names = list(graphs)
    for round_ in range(ROUNDS):
        shift = round_ * len(names) // ROUNDS
        for name in names[shift:] + names[:shift]:
            times[name].append(elapsed_us(graphs[name]))
    base = times.pop("nothing")
    more = {name: [(t - b) / LAYERS for t, b in zip(taken, base, strict=True)] for name, taken in times.items()}
    us = {name: round(statistics.median(t), 2) for name, t in more.items()}
    bytes_read = 4 * KV_HEADS * HEAD_DIM * sum(shape.lengths)
    return {
        **asdict(shape),
        "mean_length": round(statistics.mean(shape.lengths), 1),
        "floor_us": round(bytes_read / READ_BYTES_PER_S * 1e6, 2),
        "products_us": round(statistics.median(base) / LAYERS, 2),
        "gpu": monitor.since(started),
        "us": us,
        "spread_us": {name: round(max(t) - min(t), 2) for name, t in more.items()},
        "best": min(us, key=lambda name: us[name]),
        "wrong": {name: count for name, count in wrong.items() if count},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=45.0, help="no shape is begun later, compiling included")
    parser.add_argument("--out", type=Path, default=None, help="JSON file to write")
    parser.add_argument("--part", default=None, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    if arguments.part is not None:
        compile_part(arguments.part)
        return
    assert copy_engine(), "one of the kernels is written for SM90"
    begin = time.perf_counter()
    compile_in_parallel(__file__, [])
    compiled = round(time.perf_counter() - begin, 1)
    monitor = GpuMonitor()
    layers = Layers(iter(SHAPES), POOL_PAGES)
    layers.add_products()
    results: list[dict[str, object]] = []
    for shape in SHAPES:
        if time.perf_counter() - begin > arguments.seconds:
            break
        with torch.inference_mode():
            results.append(measure(layers, shape, monitor))
        print(results[-1], file=sys.stderr, flush=True)
        write(arguments.out, results, compile_s=compiled, left_out=len(SHAPES) - len(results))
    monitor.close()


if __name__ == "__main__":
    main()
