"""Few-row matrix products of SmolLM2 and Qwen3-8B on a GPU: cuBLAS with the row kernels around it, and the fused cuts.

    python benchmarks/gpu_linear.py --seconds 120 --out gpu_linear.json

A candidate's time covers all that the fused kernel replaces: norm, product, SwiGLU or residual. Each call of a graph
reads another weight. `engine.kernels.gemm_choice` follows from the results.
"""

import argparse
import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from gpu_timing import READ_BYTES_PER_S, compile_in_parallel, graph_us, part_of, write
from torch import Tensor
from torch.nn import functional as F

from engine.kernels.available import dependent_launch
from engine.kernels.gemm_choice import GemmCut, gemm_cut
from engine.kernels.row_gemm import GemmWorkspace, row_gemm
from engine.kernels.row_ops import add_rms_norm, rms_norm, scale_rows, silu_mul

COLD_BYTES = 160 << 20
ROWS = (16, 64, 128, 256, 1)


@dataclass(frozen=True, kw_only=True)
class Product:
    """One matrix of a model and what the engine fuses around it."""

    name: str
    K: int
    N: int
    norm: bool = False
    swiglu: bool = False
    residual: bool = False
    float32: bool = False

    @property
    def weight_bytes(self) -> int:
        return 2 * self.K * self.N * (2 if self.swiglu else 1)


PRODUCTS = (
    Product(name="smollm2 o", K=576, N=576, residual=True),
    Product(name="smollm2 gate_up", K=576, N=1536, norm=True, swiglu=True),
    Product(name="smollm2 down", K=1536, N=576, residual=True),
    Product(name="smollm2 fc", K=2880, N=576),
    Product(name="smollm2 qkv", K=576, N=960, norm=True),
    Product(name="smollm2 head", K=576, N=49152, float32=True),
    Product(name="qwen3-8b gate_up", K=4096, N=12288, norm=True, swiglu=True),
    Product(name="qwen3-8b down", K=12288, N=4096, residual=True),
    Product(name="qwen3-8b qkv", K=4096, N=6144, norm=True),
    Product(name="qwen3-8b o", K=4096, N=4096, residual=True),
)


def cuts(product: Product) -> Iterator[GemmCut]:
    if product.K * product.N <= 1 << 22:
        for outputs, inputs, stages in ((16, 64, 4), (16, 64, 8), (16, 128, 4), (16, 256, 3), (32, 64, 4), (32, 64, 8)):
            yield GemmCut(outputs=outputs, inputs=inputs, num_stages=stages)
        yield GemmCut(outputs=64, inputs=64, num_stages=5)
        splits = (2, 3)
        narrow = GemmCut(outputs=16, inputs=128)
    else:
        for outputs, inputs, stages, warps in (
            (32, 128, 4, 4),
            (32, 256, 3, 4),
            (64, 128, 4, 4),
            (64, 64, 6, 4),
            (64, 128, 5, 8),
            (128, 64, 5, 4),
            (128, 128, 4, 8),
        ):
            yield GemmCut(outputs=outputs, inputs=inputs, num_stages=stages, num_warps=warps)
        splits = (2, 4)
        narrow = GemmCut(outputs=64, inputs=128)
    if not product.swiglu and product.N < 20000:
        for count in splits:
            yield replace(narrow, num_splits=count)


def tensors(product: Product, rows: int, *, copies: int) -> tuple[Tensor, list[Tensor], Tensor, Tensor, Tensor]:
    """(x, copies of the weight, norm weight, residual, out)."""

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, device="cuda", dtype=torch.bfloat16)

    weights = [random(product.N * (2 if product.swiglu else 1), product.K) * product.K**-0.5 for _ in range(copies)]
    out = torch.empty(rows, product.N, device="cuda", dtype=torch.float32 if product.float32 else torch.bfloat16)
    return random(rows, product.K), weights, random(max(product.K, product.N)), random(rows, product.N), out


def cublas(product: Product, x: Tensor, weight: Tensor, norm: Tensor, residual: Tensor) -> Callable[[], object]:
    """The way of more rows: the engine's row kernels around cuBLAS."""
    pdl = dependent_launch()

    def call() -> object:
        normed = rms_norm(x, norm[: product.K], 1e-5, pdl=pdl) if product.norm else x
        if product.float32:
            return torch.mm(normed, weight.t(), out_dtype=torch.float32)
        y = F.linear(normed, weight)
        if product.swiglu:
            return silu_mul(y, pdl=pdl)
        return add_rms_norm(residual, y, norm[: product.N], 1e-5, pdl=pdl)[0] if product.residual else y

    return call


def fused(
    product: Product,
    cut: GemmCut,
    workspace: GemmWorkspace,
    x: Tensor,
    weight: Tensor,
    norm: Tensor,
    residual: Tensor,
    out: Tensor,
) -> Callable[[], object]:
    # The rows of a norm come ready from the kernel before; with a residual, the next norm's rows are made.
    ready = scale_rows(x, norm[: product.K], 1e-5) if product.norm else x
    return lambda: row_gemm(
        ready,
        weight,
        out,
        cut=cut,
        workspace=workspace,
        swiglu=product.swiglu,
        residual_MN=residual if product.residual else None,
        next_norm=(norm[: product.N], 1e-5) if product.residual else None,
        pdl=dependent_launch(),
    )


def compile_part(part: str) -> None:
    mine = part_of(part)
    workspace = GemmWorkspace.create(torch.device("cuda"), part_elements=1 << 22, counters=1 << 14)
    work = [(p, rows, cut) for p in PRODUCTS for rows in (16, 64) for cut in cuts(p)]
    for number, (product, rows, cut) in enumerate(work):
        if mine(number):
            x, weights, norm, residual, out = tensors(product, rows, copies=1)
            with contextlib.suppress(Exception):  # `measure` tells of it
                fused(product, cut, workspace, x, weights[0], norm, residual, out)()
    torch.cuda.synchronize()


def measure(product: Product, rows: int, workspace: GemmWorkspace) -> dict[str, object]:
    copies = max(1, min(24, COLD_BYTES // product.weight_bytes))
    x, weights, norm, residual, out = tensors(product, rows, copies=copies)
    times = {"cublas": graph_us([cublas(product, x, weight, norm, residual) for weight in weights])}
    found: dict[str, GemmCut] = {}
    want = cublas(product, x, weights[-1], norm, residual)()
    assert isinstance(want, Tensor)
    wrong = []
    for cut in cuts(product):
        name = f"{cut.outputs}x{cut.inputs} s{cut.num_splits} w{cut.num_warps} p{cut.num_stages}"
        found[name] = cut
        try:
            times[name] = graph_us([fused(product, cut, workspace, x, w, norm, residual, out) for w in weights])
        except Exception as error:  # too much shared memory, or what the compiler does not take
            wrong.append(f"{name}: {type(error).__name__}")
            continue
        if not (out.float() - want.float()).norm() <= 1e-2 * want.float().norm():
            wrong.append(name)
    best = min(times, key=lambda name: times[name])
    chosen = gemm_cut(rows=rows, K=product.K, N=product.N, swiglu=product.swiglu)
    return {
        **asdict(product),
        "rows": rows,
        "floor_us": round(product.weight_bytes / READ_BYTES_PER_S * 1e6, 2),
        "us": {name: round(value, 2) for name, value in sorted(times.items(), key=lambda item: item[1])},
        "best": best,
        "best_cut": asdict(found[best]) if best in found else None,
        "chosen": None if chosen is None else asdict(chosen),
        "wrong": wrong,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--seconds", type=float, default=120.0, help="measuring stops after so many, compiling included"
    )
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
    workspace = GemmWorkspace.create(torch.device("cuda"), part_elements=1 << 22, counters=1 << 14)
    results, left_out = [], 0
    for rows in ROWS:
        for product in PRODUCTS:
            if time.perf_counter() - begin > arguments.seconds:
                left_out += 1
                continue
            results.append(measure(product, rows, workspace))
            row = results[-1]
            print(
                f"{product.name:>18} rows {rows:>2} floor {row['floor_us']:>7}  {list(row['us'].items())[:4]}  "  # type: ignore[attr-defined]
                f"cublas {row['us']['cublas']}  wrong {row['wrong']}",  # type: ignore[index]
                file=sys.stderr,
            )
    write(arguments.out, results, compile_s=round(compiled, 1), left_out=left_out)


if __name__ == "__main__":
    main()
