"""What a drafter of Qwen3-8B's shapes gains by weights of 8 bits on a GPU: its products by many cuts, its forward.

    python benchmarks/gpu_int8.py --out gpu_int8.json

A product's times are those of one call, everything fused around it, over copies of the weight that exceed the L2 cache:
in bfloat16 as the engine takes it, in 8 bits by every cut. The forward is `gpu_forward.py`'s: drafter and head of one
decode step, and the target's part with the drafter's context in it.
"""

import argparse
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from gpu_forward import Step
from gpu_products import PRODUCTS, Product, cublas, fused, tensors
from gpu_timing import graph_us, write
from torch import Tensor

from engine.kernels.gemm_choice import GemmCut, StreamCut
from engine.kernels.int8_choice import MAX_ROWS, int8_cut, int8_stream_cut
from engine.layers.cuda_cuts import cut_of, stream_of
from engine.layers.int8_weight import round_weight

COLD_BYTES = 400 << 20
MINE = [product for product in PRODUCTS if product.name.startswith("qwen3-8b")]
Cut = GemmCut | StreamCut


def rows_of(product: Product) -> int:
    """Of the matrix."""
    return product.N * (2 if product.swiglu else 1)


def name_of(cut: Cut) -> str:
    if isinstance(cut, StreamCut):
        staggered = " s" if cut.staggered else ""
        return f"stream {cut.rows} {cut.num_splits}x{cut.units} {cut.inputs}x{cut.num_stages}{staggered}"
    turned = " turned" if cut.turned else ""
    return f"rows {cut.outputs}x{cut.inputs} {cut.num_splits} {cut.num_stages} w{cut.num_warps}{turned}"


def cuts(product: Product, rows: int, *, few: bool) -> list[Cut]:
    """The choice first; above MAX_ROWS, where there is none, those that might be. few: no more than tell whether the
    choice is near the best."""
    K, N = product.K, rows_of(product)
    if rows > MAX_ROWS:
        by_rows, chosen = int8_cut(rows=MAX_ROWS, K=K, N=N, swiglu=product.swiglu), int8_stream_cut(rows=16, K=K, N=N)
        assert by_rows is not None
        assert chosen is not None
        stages = 5 if rows <= 32 else 4
        return [replace(chosen, rows=rows, num_stages=stages), replace(by_rows, inputs=128, num_stages=5, turned=True)]
    chosen, by_rows = int8_stream_cut(rows=rows, K=K, N=N), int8_cut(rows=rows, K=K, N=N, swiglu=product.swiglu)
    assert chosen is not None
    assert by_rows is not None
    tiles, steps = N // 64, K // 128
    found: list[Cut] = [chosen, replace(chosen, num_stages=5), by_rows]
    if not few:
        found.append(replace(by_rows, turned=True))
        found.append(replace(by_rows, num_stages=3))
        found.append(replace(chosen, inputs=256, num_stages=4))
        found.append(replace(chosen, num_stages=16))
    for programs in (132, 264, 396):
        for splits in (1, 2, 4, 8):
            if steps % splits or steps // splits < 4:
                continue
            units = -(-tiles * splits // programs)
            busy = tiles * splits / units
            if busy >= 0.7 * programs and (not few or programs == 396):
                stages = 16 if programs == 132 else 8 if programs == 264 else 5
                found.append(replace(chosen, num_splits=splits, units=units, num_stages=stages, staggered=units == 1))
    return list(dict.fromkeys(found))


def by_bfloat16(
    product: Product, rows: int, count: Tensor, x: Tensor, weight: Tensor, norm: Tensor, residual: Tensor, out: Tensor
) -> Callable[[], object]:
    """As the engine does: layers by the copy engine where it takes them, the other matrices not."""
    shape: dict[str, Any] = dict(rows=rows, K=product.K, N=product.N, swiglu=product.swiglu)
    in_layer = product.norm or product.residual
    stream = stream_of(weight.dtype, **shape) if in_layer else None
    cut = stream or cut_of(weight.dtype, **shape)
    if cut is None:
        return cublas(product, x, weight, norm, residual)
    return fused(product, cut, count, x, weight, norm, residual, out)


def compile_one(work: tuple[Product, int, Cut | None]) -> str:
    """In a worker: Triton's cache holds the kernel afterwards. What went wrong, or nothing."""
    product, rows, cut = work
    try:
        x, weights, norm, residual, out = tensors(product, rows, copies=1)
        count = torch.zeros(rows_of(product), dtype=torch.int32, device="cuda")
        if cut is None:
            by_bfloat16(product, rows, count, x, weights[0], norm, residual, out)()
        else:
            weight = round_weight(weights[0][:, : product.K])
            made = weight.streamed() if isinstance(cut, StreamCut) else weight
            fused(product, cut, count, x, made.rounded, norm, residual, out, scale=made.scale)()
        torch.cuda.synchronize()
    except Exception as error:  # too much shared memory, or what the compiler does not take
        return f"{type(error).__name__}: {str(error)[-200:]}"
    return ""


def measure(product: Product, rows: int, found: list[Cut], seconds: Callable[[], float]) -> dict[str, object]:
    copies = max(2, min(24, COLD_BYTES // (product.weight_bytes // 2)))
    x, weights, norm, residual, out = tensors(product, rows, copies=copies)
    count = torch.zeros(rows_of(product), dtype=torch.int32, device="cuda")
    calls = [by_bfloat16(product, rows, count, x, weight, norm, residual, out) for weight in weights]
    us = {"bfloat16": round(graph_us(calls, repeats=3), 2)}
    want = cublas(product, x, weights[-1], norm, residual)()
    assert isinstance(want, Tensor)
    plain = [round_weight(weight) for weight in weights]
    streamed = [weight.streamed() for weight in plain]
    calls, weights = [], []
    apart: dict[str, float] = {}
    failed: dict[str, str] = {}
    for cut in found:
        if seconds() < 0:
            break
        held = streamed if isinstance(cut, StreamCut) else plain
        calls = [fused(product, cut, count, x, w.rounded, norm, residual, out, scale=w.scale) for w in held]
        try:
            us[name_of(cut)] = round(graph_us(calls, repeats=3), 2)
        except Exception as error:
            failed[name_of(cut)] = f"{type(error).__name__}: {str(error)[-200:]}"
            continue
        apart[name_of(cut)] = round(float((out.float() - want.float()).norm() / want.float().norm()), 5)
    row = {"product": product.name, "rows": rows, "us": us, "chosen": name_of(found[0]), "apart": apart}
    row["read_gb_s"] = round(product.weight_bytes / 2e3 / us.get(name_of(found[0]), float("nan")))
    print({**row, "failed": failed}, file=sys.stderr, flush=True)
    return {**row, "failed": failed}


def forward(weights: str, rows: int) -> dict[str, object]:
    step = Step("qwen3-8b", num_layers=7, drafter_weights=weights)
    step.prepare(sequences=rows // 16, context=512, draft_len=15)
    found = {
        "drafter_weights": weights,
        "rows": rows,
        "drafter_and_head_us": round(graph_us([step.run_drafter]), 1),
        "target_of_7_layers_us": round(graph_us([step.run_target]), 1),
    }
    print(found, file=sys.stderr, flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--few", action="store_true", help="few cuts")
    parser.add_argument("--seconds", type=float, default=120.0, help="no further part begins after so many")
    parser.add_argument("--workers", type=int, default=14, help="processes that compile")
    parser.add_argument("--out", type=Path, default=None, help="JSON file to write")
    arguments = parser.parse_args()
    begin = time.perf_counter()
    torch.manual_seed(0)
    tried = {product: cuts(product, arguments.rows, few=arguments.few) for product in MINE}
    work = [(product, arguments.rows, cut) for product in MINE for cut in (None, *tried[product])]
    with ProcessPoolExecutor(arguments.workers, mp_context=get_context("spawn")) as pool:
        for (product, _, cut), wrong in zip(work, pool.map(compile_one, work), strict=True):
            if wrong:
                print(product.name, cut, wrong, file=sys.stderr, flush=True)
    print(f"{len(work)} kernels compiled in {time.perf_counter() - begin:.0f} s", file=sys.stderr, flush=True)

    def seconds() -> float:
        return arguments.seconds - (time.perf_counter() - begin)

    results: list[dict[str, object]] = []
    with torch.inference_mode():
        for weights in ("model", "int8"):
            results.append(forward(weights, arguments.rows))
            torch.cuda.empty_cache()
        for product in MINE:
            if seconds() > 0:
                results.append(measure(product, arguments.rows, tried[product], seconds))
                torch.cuda.empty_cache()
            write(arguments.out, results)


if __name__ == "__main__":
    main()
