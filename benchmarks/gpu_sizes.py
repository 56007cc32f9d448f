"""Which numbers of rows a GPU multiplies well: the products of a decoder layer and the head, by rows.

    python benchmarks/gpu_sizes.py --out OUT.json [--first 72 --last 640 --step 8] [--seconds 60]

Qwen3-8B's shapes, as the engine runs them in a decode step of more rows than its few-row kernels take: cuBLAS, or the
wide kernels where they are chosen. Microseconds of each, from graphs over weights that exceed the L2 cache. What
`row_buckets` offers a batch follows from it: cuBLAS takes longer for some sizes than for larger ones.
"""

import argparse
import time
from collections.abc import Callable
from pathlib import Path

import torch
from gpu_timing import graph_us, write
from torch import Tensor
from torch.nn import functional as F

from engine.layers.cuda_rows import CudaRows, cuda_rows

COPIES = 3  # of each weight
SHAPES = {
    "qkv": (4096, 6144),
    "o": (4096, 4096),
    "gate_up": (4096, 24576),
    "down": (12288, 4096),
    "head": (4096, 151936),
}


def product(name: str, kernels: CudaRows, x: Tensor, weight: Tensor) -> Callable[[], object]:
    """One product as the engine chooses it, with what is fused into it or runs behind it."""
    if name == "gate_up":
        joined = kernels.wide_swiglu(x, weight)
        return (
            (lambda: kernels.wide_swiglu(x, weight))
            if joined is not None
            else lambda: kernels.silu_mul(F.linear(x, weight))
        )
    if name == "head":
        if kernels.takes_head(x.shape[0], weight):
            return lambda: kernels.head_argmax(x, weight, 0, weight.shape[0])
        return lambda: kernels.shard_argmax(torch.mm(x, weight.t(), out_dtype=torch.float32), 0)
    return lambda: F.linear(x, weight)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--first", type=int, default=72)
    parser.add_argument("--last", type=int, default=640)
    parser.add_argument("--step", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=60.0)
    args = parser.parse_args()
    began = time.perf_counter()
    rows_found: list[dict[str, float]] = []
    with torch.inference_mode():
        weights = {
            name: [torch.randn(N, K, device="cuda", dtype=torch.bfloat16) * K**-0.5 for _ in range(COPIES)]
            for name, (K, N) in SHAPES.items()
        }
        for rows in range(args.first, args.last + 1, args.step):
            if time.perf_counter() - began > args.seconds:
                break
            found: dict[str, float] = {"rows": rows}
            for name, (K, _) in SHAPES.items():
                x = torch.randn(rows, K, device="cuda", dtype=torch.bfloat16)
                kernels = cuda_rows(x)
                assert kernels is not None, "the kernels cannot run here"
                calls = [product(name, kernels, x, weight) for weight in weights[name]]
                found[name] = round(graph_us(calls, repeats=5), 2)
            found["layer"] = round(sum(found[name] for name in SHAPES if name != "head"), 2)
            rows_found.append(found)
            print(found, flush=True)
            write(args.out, rows_found)


if __name__ == "__main__":
    main()
