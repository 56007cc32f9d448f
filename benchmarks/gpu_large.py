"""What large decode batches are made of, each part beside its alternatives: 8B shapes, 256 to 2,048 rows, on a GPU.

    python benchmarks/gpu_large.py --out gpu_large.json --seconds 85

head        the head and its largest logits, by cuBLAS and a kernel and by one kernel
swiglu      the product of gate and up with what joins them, by cuBLAS and a kernel and by one kernel
step        the whole target and drafter of a decode step (`gpu_forward.py`), as it is and with the alternatives
products    the layers' matrices and the drafter's, by cuBLAS and cuBLASLt: teraflops
attention   decode attention of 16 queries a request: flash-attn, and cuts of the split-KV kernel: positions x stages x
            splits
prompt      attention of a prompt's chunk by flash-attn, its K and V in pages or in one piece
rows        row kernels and others of their cuts: terabytes per second that they read and write

Each case is kept as it comes; one that fails leaves its error and the next begins. --parts says which and in what
order; time ends them all.
"""

import argparse
import contextlib
import itertools
import json
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
import triton
from gpu_attention import Shape, calls_of, cuts
from gpu_forward import Step
from gpu_timing import compile_in_parallel, graph_us, part_of, write
from torch import Tensor
from torch.nn import functional as F

from engine.attention import flash
from engine.kernels import row_ops, shard_argmax
from engine.kernels.available import dependent_launch
from engine.kernels.wide_choice import WideCut
from engine.kernels.wide_gemm import wide_argmax, wide_logits, wide_swiglu
from engine.layers import cuda_rows

H, MLP, VOCAB = 4096, 12288, 151936
PRODUCTS = {  # name -> (K, N), as the engine multiplies them
    "qkv": (H, 6144),
    "o": (H, H),
    "gate_up": (H, 2 * MLP),
    "down": (MLP, H),
    "fc": (5 * H, H),
    "context": (H, 10240),
}
COLD_BYTES = 160 << 20
Case = tuple[dict[str, Any], Callable[[], dict[str, Any]]]


def random(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


@contextmanager
def library(name: str) -> Iterator[None]:
    """torch's products by `name`: default, cublas or cublaslt."""
    torch.backends.cuda.preferred_blas_library(name)
    try:
        yield
    finally:
        torch.backends.cuda.preferred_blas_library("default")


def flops(us: float, rows: int, K: int, N: int) -> dict[str, float]:
    return {"us": round(us, 2), "tflops": round(2e-6 * rows * K * N / us, 1)}


WIDE_CUTS = (
    WideCut(outputs=128),
    WideCut(outputs=128, num_stages=4),
    WideCut(outputs=64, num_warps=4, num_stages=4, num_programs=264),
    WideCut(outputs=64, num_warps=8, num_stages=4, num_programs=264),
    WideCut(rows=256, outputs=64, num_warps=8),
    WideCut(rows=64, outputs=128, num_warps=4, num_programs=264),
)


def swiglu_cases(rows_of: list[int]) -> Iterator[Case]:
    def run(rows: int, cut: WideCut | None) -> dict[str, Any]:
        x = random(rows, H)
        weights = [random(2 * MLP, H) * H**-0.5 for _ in range(4)]

        def chain(weight: Tensor) -> Tensor:
            return row_ops.silu_mul(F.linear(x, weight), pdl=dependent_launch())

        if cut is None:
            return flops(graph_us([lambda w=w: chain(w) for w in weights], repeats=5), rows, H, 2 * MLP)  # type: ignore[misc]
        off = (wide_swiglu(x, weights[0], cut=cut).float() - chain(weights[0]).float()).abs().max()
        us = graph_us([lambda w=w: wide_swiglu(x, w, cut=cut) for w in weights], repeats=5)  # type: ignore[misc]
        return flops(us, rows, H, 2 * MLP) | {"largest_difference": float(off)}

    for rows in rows_of:
        for cut in (None, *WIDE_CUTS, None):
            yield (
                dict(rows=rows, cut=None if cut is None else asdict(cut)),
                lambda rows=rows, cut=cut: run(rows, cut),
            )


def head_cases(rows_of: list[int]) -> Iterator[Case]:
    def run(weight: Tensor, rows: int, cut: WideCut | None) -> dict[str, Any]:
        (V, K), x = weight.shape, random(rows, weight.shape[1])

        def chain() -> tuple[Tensor, Tensor]:
            logits = torch.mm(x, weight.t(), out_dtype=torch.float32)
            return shard_argmax.shard_argmax(logits, 0, pdl=dependent_launch())

        if cut is None:
            return flops(graph_us([chain], repeats=5), rows, K, V)
        same = float((wide_argmax(x, weight, 0, cut=cut)[1] == chain()[1]).float().mean())
        us = graph_us([lambda: wide_argmax(x, weight, 0, cut=cut)], repeats=5)
        logits_us = graph_us([lambda: wide_logits(x, weight, cut=cut)], repeats=5)
        return flops(us, rows, K, V) | {"same_ids": same, "with_logits_us": round(logits_us, 1)}

    for V, K in ((VOCAB, H), (49152, 576)):
        weight = random(V, K) * K**-0.5
        for rows in rows_of:
            for cut in (None, WideCut(outputs=256), None):
                yield (
                    dict(V=V, K=K, rows=rows, cut=None if cut is None else asdict(cut)),
                    lambda weight=weight, rows=rows, cut=cut: run(weight, rows, cut),
                )


def product_cases(rows_of: list[int]) -> Iterator[Case]:
    def run(rows: int, K: int, N: int, name: str) -> dict[str, Any]:
        x = random(rows, K)
        weights = [random(N, K) * K**-0.5 for _ in range(max(1, COLD_BYTES // (2 * N * K)))]
        with library(name):
            us = graph_us([lambda w=w: F.linear(x, w) for w in weights], repeats=5)  # type: ignore[misc]
        return flops(us, rows, K, N)

    for rows, (product, (K, N)), name in itertools.product(rows_of, PRODUCTS.items(), ("cublas", "cublaslt")):
        yield (
            dict(rows=rows, product=product, by=name),
            lambda rows=rows, K=K, N=N, name=name: run(rows, K, N, name),
        )


def attention_cases(sequences_of: list[int]) -> Iterator[Case]:
    def run(shape: Shape, name: str) -> dict[str, Any]:
        if name == "flash-attn":
            if flash.unavailable_reason() is not None:
                return {"us": None, "why": flash.unavailable_reason()}
            us = graph_us(calls_of(shape, None), repeats=5)
        else:
            cut = cuts(shape)["chosen"]
            if name != "chosen":
                positions, stages, splits = map(int, name.split(" x "))
                cut = replace(cut, positions=positions, num_stages=stages, num_splits=splits)
            us = graph_us(calls_of(shape, cut), repeats=5)
        return bandwidth(us, shape.kv_bytes)

    for context, sequences in itertools.product((512, 1024, 4096), sequences_of):
        shape = Shape(model="qwen3-8b", page=16, sequences=sequences, queries=16, context=context)
        for name in ("chosen", "flash-attn", "64 x 3 x 1", "64 x 2 x 1", "64 x 4 x 1", "32 x 3 x 1", "32 x 4 x 1"):
            yield (
                dict(sequences=sequences, context=context, by=name),
                lambda shape=shape, name=name: run(shape, name),
            )


def prompt_cases(rows_of: list[int]) -> Iterator[Case]:
    """A chunk of one prompt behind a context, K and V in pages of 16, in pages of 128 (which tensor copies take whole),
    or in one piece; and the copy that makes one piece of pages."""
    h, g, D = 32, 8, 128

    def run(rows: int, context: int, page: int | None) -> dict[str, Any]:
        whole = context + rows
        q, used = random(rows, h, D), torch.tensor([whole], dtype=torch.int32, device="cuda")
        lengths: dict[str, Any] = dict(cu_seqlens_q=torch.tensor([0, rows], dtype=torch.int32, device="cuda"))
        lengths |= dict(max_seqlen_q=rows, causal=True, num_splits=1)
        if page is None:
            k, v = random(whole, g, D), random(whole, g, D)
            lengths |= dict(cu_seqlens_k=torch.tensor([0, whole], dtype=torch.int32, device="cuda"), max_seqlen_k=whole)
        else:
            pages = -(-whole // page)
            k, v = random(pages + 1, page, g, D), random(pages + 1, page, g, D)
            table = (torch.randperm(pages, device="cuda") + 1)[None].to(torch.int32)
            lengths |= dict(seqused_k=used, page_table=table)
        attend = flash._function()
        us = graph_us([lambda: attend(q, k, v, **lengths)], repeats=3)
        return {"us": round(us, 1), "tflops": round(4e-6 * rows * h * D * (context + rows / 2) / us, 1)}

    def copies(rows: int, context: int) -> dict[str, Any]:
        pages = (context + rows) // 16
        cache, place = random(2, pages + 1, 16, g, D), torch.randperm(pages, device="cuda") + 1
        out = torch.empty(2, pages, 16, g, D, dtype=torch.bfloat16, device="cuda")
        us = graph_us([lambda: torch.index_select(cache, 1, place, out=out)], repeats=3)
        return bandwidth(us, 2 * out.nbytes)

    for rows, context in ((4096, 0), (8192, 24576), (8192, 8192)):
        for page in (16, 128, None):
            yield dict(rows=rows, context=context, page=page), lambda r=rows, c=context, p=page: run(r, c, p)
        yield dict(rows=rows, context=context, what="copy"), lambda r=rows, c=context: copies(r, c)


def bandwidth(us: float, num_bytes: int) -> dict[str, float]:
    return {"us": round(us, 2), "tb_s": round(1e-6 * num_bytes / us, 3)}


def row_cases(rows_of: list[int]) -> Iterator[Case]:
    pdl = dependent_launch()

    def cold(num_bytes: int) -> range:
        return range(max(1, min(16, COLD_BYTES // num_bytes)))

    def silu(rows: int, columns: int, warps: int) -> dict[str, Any]:
        num_bytes = 3 * 2 * rows * MLP
        calls = []
        for _ in cold(num_bytes):
            x, out = random(rows, 2 * MLP), random(rows, MLP)
            calls.append(
                lambda x=x, out=out: row_ops._silu_mul_kernel[(rows, triton.cdiv(MLP, columns))](
                    x, out, SIZE=MLP, BLOCK=columns, PDL=pdl, num_warps=warps, launch_pdl=pdl
                )
            )
        return bandwidth(graph_us(calls, repeats=5), num_bytes)

    def norm(rows: int, warps: int) -> dict[str, Any]:
        num_bytes = 4 * 2 * rows * H
        weight, calls = random(H), []
        for _ in cold(num_bytes):
            x, delta, total, out = (random(rows, H) for _ in range(4))
            calls.append(
                lambda x=x, delta=delta, total=total, out=out: row_ops._rms_norm_kernel[(rows,)](
                    x, delta, total, out, weight, H, H, H, 1e-6,
                    SIZE=H, PADDED=H, ADD=True, PDL=pdl, num_warps=warps, launch_pdl=pdl,
                )
            )  # fmt: skip
        return bandwidth(graph_us(calls, repeats=5), num_bytes)

    def rotation(rows: int, heads: int) -> dict[str, Any]:
        h, g, D = 32, 8, 128
        num_bytes = 2 * 2 * rows * (h + 2 * g) * D
        slots = torch.randperm(rows, device="cuda") + 16
        angles = tuple(random(rows, 2, D)[:, i : i + 1] for i in range(2))
        weight, calls = random(h + g, D), []
        for _ in cold(num_bytes):
            qkv, caches = random(rows, (h + 2 * g) * D), random(2, rows // 16 + 2, 16, g, D)
            calls.append(
                lambda qkv=qkv, caches=caches: row_ops.rotate_and_write(
                    qkv, angles, slots, (caches[0], caches[1]), num_heads=h, head_norm=(weight, 1e-6), pdl=pdl
                )
            )
        before, row_ops.MOST_HEADS = row_ops.MOST_HEADS, heads
        try:
            return bandwidth(graph_us(calls, repeats=5), num_bytes)
        finally:
            row_ops.MOST_HEADS = before

    for rows in rows_of:
        for columns, warps in ((1024, 4), (512, 2), (1024, 2), (2048, 4), (2048, 8), (4096, 8), (4096, 4)):
            yield (
                dict(rows=rows, what="silu_mul", columns=columns, warps=warps),
                lambda r=rows, c=columns, w=warps: silu(r, c, w),
            )
        for warps in (8, 4, 2, 16):
            yield dict(rows=rows, what="add_rms_norm", warps=warps), lambda r=rows, w=warps: norm(r, w)
        for heads in (16, 8, 32, 64):
            yield dict(rows=rows, what="rotate_and_write", heads=heads), lambda r=rows, h=heads: rotation(r, h)


@contextmanager
def without(names: set[str]) -> Iterator[None]:
    """The engine without what `engine.kernels.wide_gemm` takes of a step."""
    kept = {f"{name}_cut": getattr(cuda_rows, f"{name}_cut") for name in names}
    for attribute in kept:
        setattr(cuda_rows, attribute, lambda **_: None)
    try:
        yield
    finally:
        for attribute, choose in kept.items():
            setattr(cuda_rows, attribute, choose)


def step_cases(sequences_of: list[int]) -> Iterator[Case]:
    step = Step("qwen3-8b")

    def run(sequences: int, name: str, names: set[str]) -> dict[str, Any]:
        step.prepare(sequences=sequences, context=512, draft_len=15)
        with library(name), without(names):
            return {
                "target_us": round(graph_us([step.run_target], repeats=5), 1),
                "drafter_us": round(graph_us([step.run_drafter], repeats=5), 1),
            }

    for sequences, _ in itertools.product(sequences_of, range(2)):
        for name, names in (
            ("cublas", set()),
            ("cublas", {"swiglu"}),
            ("cublas", {"argmax"}),
            ("cublaslt", {"swiglu", "argmax"}),
        ):
            yield (
                dict(sequences=sequences, by=name, without=sorted(names)),
                lambda s=sequences, n=name, w=names: run(s, n, w),
            )


def compile_part(part: str, named: dict[str, Callable[[list[int]], Iterator[Case]]]) -> None:
    """Runs some of the cases once, untimed, so that their kernels lie in Triton's cache."""

    def once(calls: list[Callable[[], object]], **_: object) -> float:
        calls[0]()
        return 1.0

    globals()["graph_us"] = once
    mine = part_of(part)
    sizes = {"head": [256], "swiglu": [256], "attention": [128, 16], "rows": [256]}
    cases = itertools.chain.from_iterable(named[name](sizes[name]) for name in named if name in sizes)
    for number, (labels, case) in enumerate(cases):
        if mine(number) and labels.get("context", 512) == 512:
            with contextlib.suppress(Exception):
                case()
    torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = {
        "step": step_cases,
        "attention": attention_cases,
        "products": product_cases,
        "prompt": prompt_cases,
        "rows": row_cases,
        "head": head_cases,
        "swiglu": swiglu_cases,
    }
    parser.add_argument("--out", type=Path, default=None, help="JSON file to write")
    parser.add_argument("--parts", nargs="+", choices=tuple(parts), default=list(parts))
    parser.add_argument("--rows", type=int, nargs="+", default=[2048, 256, 512], help="16 times the requests")
    parser.add_argument("--seconds", type=float, default=85.0, help="no case is begun after so long")
    parser.add_argument("--part", default=None, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.part is not None:
        with torch.inference_mode():
            compile_part(args.part, {name: parts[name] for name in args.parts})
        return
    began, left_out = time.perf_counter(), 0
    results: list[dict[str, Any]] = []
    torch.manual_seed(0)
    compile_in_parallel(__file__, ["--parts", *args.parts])
    compiled = time.perf_counter() - began
    with torch.inference_mode():
        for part in args.parts:
            sizes = (
                args.rows
                if part in ("products", "rows", "head", "swiglu")
                else [rows // 16 for rows in args.rows if rows <= 2048]
            )
            for labels, case in parts[part](sizes):
                if time.perf_counter() - began > args.seconds:
                    left_out += 1
                    continue
                try:
                    found = case()
                except Exception:
                    found = {"error": traceback.format_exc()[-600:]}
                results.append(dict(part=part) | labels | found)
                print(json.dumps(results[-1]), flush=True)
                write(args.out or Path("/dev/null"), results, left_out=left_out)
            torch.cuda.empty_cache()
    write(
        args.out,
        results,
        left_out=left_out,
        compile_s=round(compiled, 1),
        seconds=round(time.perf_counter() - began, 1),
    )
    print(f"{left_out} cases left out", file=sys.stderr)


if __name__ == "__main__":
    main()
