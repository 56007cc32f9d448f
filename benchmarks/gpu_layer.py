"""How the products of decoder layers are best cut: alone, then with the other kernels of a layer around them.

    python benchmarks/gpu_layer.py --model qwen3-8b --seconds 200 --out gpu_layer.json

Kernels of a layer overlap (`engine.kernels.device_ops`), so the time of a product alone tells half: what is chosen is
the cut that makes several layers in one graph fastest, one product changed at a time. Then whole steps: target and
drafter of one request by cuBLAS, by the choice as it is, and by what was found here.
"""

import argparse
import contextlib
import json
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from gpu_cuts import (
    Key,
    Table,
    choosing,
    cuts,
    height,
    key,
    name_of,
    products,
    table_of,
)
from gpu_forward import BLOCK, PAGE, SHAPES, Step, kernel_table
from gpu_products import COUNTERS, Product, cublas, fused, tensors
from gpu_read import read_us, stream_bandwidth, tiles_us
from gpu_timing import graph_us, write
from torch import Tensor

from engine.kernels.gemm_choice import GemmCut

COLD_BYTES = 400 << 20
LAYERS = {"qwen3-8b": 8, "smollm2": 30}  # together larger than the L2 cache
AHEAD = (0, 32 << 10, 64 << 10, 128 << 10, 256 << 10)
LIKELY = 7  # cuts of a product that are tried among the layers, the fastest alone
IN_LAYER = ("gate_up", "down", "o", "qkv")


def counters() -> Tensor:
    return torch.zeros(COUNTERS, dtype=torch.int32, device="cuda")


def compile_one(work: tuple[Product, int, GemmCut]) -> None:
    """In a worker: Triton's cache holds the kernel afterwards. What cannot be compiled `alone` tells of."""
    product, rows, cut = work
    count = counters()
    x, weights, norm, residual, out = tensors(product, rows, copies=1)
    with contextlib.suppress(Exception):
        fused(product, cut, count, x, weights[0], norm, residual, out)()
        torch.cuda.synchronize()


def alone(product: Product, rows: int, count: Tensor) -> tuple[dict[str, object], list[GemmCut | None]]:
    """Every cut of one product against cuBLAS and against reading its bytes; the cuts, fastest first."""
    copies = max(2, min(40, COLD_BYTES // product.weight_bytes))
    x, weights, norm, residual, out = tensors(product, rows, copies=copies)
    times = {"cublas": graph_us([cublas(product, x, weight, norm, residual) for weight in weights], repeats=5)}
    found: dict[str, GemmCut | None] = {"cublas": None}
    want = cublas(product, x, weights[-1], norm, residual)()
    assert isinstance(want, Tensor)
    wrong = []
    for cut in cuts(product, rows):
        name = name_of(cut)
        try:
            times[name] = graph_us(
                [fused(product, cut, count, x, weight, norm, residual, out) for weight in weights], repeats=3
            )
        except Exception as error:  # too much shared memory, or what the compiler does not take
            wrong.append(f"{name}: {type(error).__name__}")
            continue
        found[name] = cut
        if not (out.float() - want.float()).norm() <= 1e-2 * want.float().norm():
            wrong.append(f"{name}: wrong")
            del times[name]
    order = sorted(times, key=lambda name: times[name])
    reading, by_tiles = read_us(weights), tiles_us(weights) if rows == 16 else {}
    print(
        f"{product.name:>18} rows {rows:>3} read {reading:7.2f}  cublas {times['cublas']:7.2f}  "
        + "  ".join(f"{name} {times[name]:.2f}" for name in order[:4])
        + f"  tiles {[round(us, 1) for us in by_tiles.values()]}"
        + (f"  wrong {wrong}" if wrong else ""),
        file=sys.stderr,
        flush=True,
    )
    cuts_in_order = [found[name] for name in order]
    fastest = next((cut for cut in cuts_in_order if cut is not None), None)
    record = {
        **asdict(product),
        "rows": rows,
        "read_us": round(reading, 2),
        "read_by_tiles_us": {name: round(us, 2) for name, us in by_tiles.items()},
        "us": {name: round(times[name], 2) for name in order},
        "best": order[0],
        "fastest_cut": None if fastest is None else asdict(fastest),
        "wrong": wrong,
    }
    return record, cuts_in_order


class Layers:
    """Some layers of a model on fixed inputs, as a step of one or more requests runs them."""

    def __init__(self, model: str) -> None:
        self.count = LAYERS[model]
        self.step = Step(model, num_layers=self.count)

    def us(self, rows: int, context: int, choice: Table | None) -> float:
        """Microseconds of one layer, everything in it."""
        sequences, draft_len = (1, rows - 1) if rows <= BLOCK else (rows // BLOCK, BLOCK - 1)
        step = self.step
        step.prepare(sequences=sequences, context=context, draft_len=draft_len)
        positions, ctx = step.context_of(draft_len + 1, True)
        with choosing(choice):
            run = lambda: step.target.forward(step.ids, positions, ctx, step.kv, ())  # noqa: E731
            return graph_us([run], repeats=3, least_us=3000.0) / self.count


def search(layers: Layers, model: str, rows: int, table: dict[Key, list[GemmCut | None]]) -> dict[str, object]:
    """Coordinate descent from the cuts that are fastest alone."""
    mine = [product for word in IN_LAYER for product in products(model) if product.name.endswith(f" {word}")]
    best: dict[Key, GemmCut] = {}
    for product in mine:
        candidates = [cut for cut in table[key(product)] if cut is not None]
        best[key(product)] = candidates[0]
    steps: list[dict[str, object]] = []
    before = layers.us(rows, 512, None)
    by_cublas = layers.us(rows, 512, Table(cuts={}))
    least = layers.us(rows, 512, Table(cuts=best))

    def attempt(product: Product, cut: GemmCut) -> None:
        nonlocal least, best
        us = layers.us(rows, 512, Table(cuts={**best, key(product): cut}))
        steps.append({"what": f"{product.name} {name_of(cut)}", "us": round(us, 2)})
        if us < least:
            least, best = us, {**best, key(product): cut}

    for turn in range(2):
        for product in mine:
            for cut in table[key(product)][:LIKELY] if turn == 0 else ():
                if cut is not None:
                    attempt(product, cut)
            for ahead in AHEAD:
                attempt(product, replace(best[key(product)], ahead=ahead))
    chosen = {product.name: name_of(best[key(product)]) for product in mine}
    print(
        f"{model} rows {rows}: us of a layer: {before:.2f} as chosen now, {by_cublas:.2f} by cuBLAS,", file=sys.stderr
    )
    print(f"    {least:.2f} with {chosen}", file=sys.stderr, flush=True)
    return {
        "rows": rows,
        "chosen_now_us": round(before, 2),
        "cublas_us": round(by_cublas, 2),
        "found_us": round(least, 2),
        "found": [{"K": K, "N": N, "swiglu": swiglu, **asdict(cut)} for (K, N, swiglu), cut in best.items()],
        "steps": steps,
    }


def whole(model: str, choices: dict[str, Table | None], contexts: list[int]) -> list[dict[str, object]]:
    """Target and drafter of one request, all layers, for each choice."""
    step = Step(model)
    results: list[dict[str, object]] = []
    for context in contexts:
        for draft_len in (BLOCK - 1, 0):
            step.prepare(sequences=1, context=context, draft_len=draft_len)
            for name, choice in choices.items():
                with choosing(choice):
                    target = graph_us([step.run_target], repeats=5)
                    drafter = graph_us([step.run_drafter], repeats=5) if draft_len else 0.0
                results.append(
                    {
                        "context": context,
                        "draft_len": draft_len,
                        "choice": name,
                        "target_us": round(target, 1),
                        "drafter_us": round(drafter, 1),
                        "step_us": round(target + drafter, 1),
                    }
                )
                print(f"{model} {results[-1]}", file=sys.stderr, flush=True)
                if context == contexts[0]:
                    with choosing(choice):
                        results[-1]["kernels"] = kernel_table(step)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=tuple(SHAPES), default="qwen3-8b")
    parser.add_argument("--rows", type=int, nargs="+", default=[16, 64, 32, 1, 4, 8])
    parser.add_argument("--layer-rows", type=int, nargs="+", default=[16, 32, 64])
    parser.add_argument("--context", type=int, nargs="+", default=[1024, 4096, 16384, 32000])
    parser.add_argument("--seconds", type=float, default=200.0, help="no further part begins after so many")
    parser.add_argument("--steps-of", type=Path, help="whole steps alone, with the cuts of this earlier result")
    parser.add_argument("--workers", type=int, default=14, help="processes that compile")
    parser.add_argument("--out", type=Path, default=None, help="JSON file to write")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    if arguments.steps_of is not None:
        earlier = json.loads(arguments.steps_of.read_text())
        with torch.inference_mode():
            steps = whole(arguments.model, {"found": table_of(earlier, 16)}, arguments.context)
        write(arguments.out, [], model=arguments.model, steps=steps)
        return
    begin = time.perf_counter()
    heights = sorted({height(rows) for rows in arguments.rows})
    work = [(p, rows, cut) for rows in heights for p in products(arguments.model) for cut in cuts(p, rows)]
    with ProcessPoolExecutor(arguments.workers, mp_context=get_context("spawn")) as pool:
        for _ in pool.map(compile_one, work):
            pass
    compiled = time.perf_counter() - begin
    print(f"{len(work)} kernels compiled in {compiled:.0f} s", file=sys.stderr, flush=True)
    bandwidth = stream_bandwidth()
    record: dict[str, Any] = {
        "model": arguments.model,
        "compile_s": round(compiled, 1),
        "read_tb_s": {name: round(value / 1e12, 3) for name, value in bandwidth.items()},
        "page": PAGE,
        "products": [],
        "layers": [],
        "steps": [],
    }
    print(record["read_tb_s"], file=sys.stderr, flush=True)
    count = counters()
    tables: dict[int, dict[Key, list[GemmCut | None]]] = {}

    def late() -> bool:
        return time.perf_counter() - begin > arguments.seconds

    def save() -> None:
        write(arguments.out, [], **record)

    with torch.inference_mode():
        layers = Layers(arguments.model)
        for rows in arguments.rows:
            for product in products(arguments.model):
                if late():
                    break
                row, order = alone(product, rows, count)
                tables.setdefault(rows, {})[key(product)] = order
                record["products"].append(row)
            complete = len(tables.get(rows, {})) == len(products(arguments.model))
            if rows in arguments.layer_rows and complete and not late():
                record["layers"].append(search(layers, arguments.model, rows, tables[rows]))
            save()
            if rows == 16 and record["layers"]:
                choices = {"cublas": Table(cuts={}), "chosen now": None, "found": table_of(record, 16)}
                record["steps"] = whole(arguments.model, choices, arguments.context)
                save()
                torch.cuda.empty_cache()
    record["seconds"] = round(time.perf_counter() - begin, 1)
    save()


if __name__ == "__main__":
    main()
