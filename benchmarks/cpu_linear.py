"""Time of all matrices of SmolLM2-135M in one pass, by rows: torch and the CPU kernel, float32 and bfloat16.

    python benchmarks/cpu_linear.py --threads 2 --rounds 15 --out cpu_linear.json

The variants are interleaved round by round, so that other load on the machine hits all alike; minimum and lower
quartile are reported.
"""

import argparse
import json
import platform
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
from command_line import command_line
from torch import Tensor
from torch.nn import functional as F

from engine.layers.cpu_gemm import PackedMatrix
from engine.layers.cpu_jit import obstacle

NUM_LAYERS, HIDDEN, INTERMEDIATE, QKV, VOCAB = 30, 576, 1536, 960, 49152
SHAPES = [(QKV, HIDDEN), (HIDDEN, HIDDEN), (2 * INTERMEDIATE, HIDDEN), (HIDDEN, INTERMEDIATE)]  # out, in; of a layer
MAX_TORCH_BF16_ROWS = 16  # linear in rows without bfloat16 instructions: more would only take time

Pass = Callable[[dict[int, Tensor]], None]


def torch_pass(weights: list[Tensor]) -> Pass:
    def run(x_of: dict[int, Tensor]) -> None:
        for weight in weights:
            F.linear(x_of[weight.shape[1]], weight)

    return run


def kernel_pass(weights: list[Tensor], threads: int) -> Pass:
    head = len(weights) - 1
    matrices = [
        PackedMatrix(w, None, out_dtype=torch.float32 if i == head else w.dtype, threads=threads)
        for i, w in enumerate(weights)
    ]

    def run(x_of: dict[int, Tensor]) -> None:
        for matrix in matrices:
            matrix.matmul(x_of[matrix.k])

    return run


def measure(passes: dict[str, tuple[torch.dtype, Pass]], rows: list[int], rounds: int) -> list[dict[str, object]]:
    inputs = {
        (n, dtype): {k: torch.randn(n, k).to(dtype) for k in (HIDDEN, INTERMEDIATE)}
        for n in rows
        for dtype in (torch.float32, torch.bfloat16)
    }
    times: dict[tuple[int, str], list[float]] = {}
    for round_index in range(rounds + 1):
        for n in rows:
            if n > MAX_TORCH_BF16_ROWS and round_index > max(2, rounds // 4):
                continue
            for name, (dtype, run) in passes.items():
                if name == "torch bfloat16" and n > MAX_TORCH_BF16_ROWS:
                    continue
                start = time.perf_counter()
                run(inputs[n, dtype])
                if round_index > 0:  # the first round warms up
                    times.setdefault((n, name), []).append((time.perf_counter() - start) * 1e3)
    flop_per_row = 2 * (NUM_LAYERS * sum(o * k for o, k in SHAPES) + VOCAB * HIDDEN)
    return [
        {
            "rows": n,
            "variant": name,
            "min_ms": round(min(values), 2),
            "quartile_ms": round(sorted(values)[len(values) // 4], 2),
            "gflops": round(n * flop_per_row / min(values) / 1e6, 1),
            "runs": len(values),
        }
        for (n, name), values in times.items()
    ]


def machine(threads: int) -> dict[str, object]:
    def installed(package: str) -> str | None:
        try:
            return version(package)
        except PackageNotFoundError:
            return None

    cpu_info = Path("/proc/cpuinfo")
    models = [line.split(":")[1].strip() for line in cpu_info.read_text().splitlines() if line.startswith("model name")]
    return {
        "cpu": models[0] if models else platform.processor(),
        "cores": len(models),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "threads": threads,
        "torch": torch.__version__,
        "llvmlite": installed("llvmlite"),
        "python": platform.python_version(),
        "kernel": obstacle() or "available",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 6, 8, 12, 16, 32, 64, 128, 256])
    parser.add_argument("--out", type=Path, default=None, help="JSON file to write")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)

    wide = [torch.randn(shape) for _ in range(NUM_LAYERS) for shape in SHAPES] + [torch.randn(VOCAB, HIDDEN)]
    narrow = [w.bfloat16() for w in wide]
    passes: dict[str, tuple[torch.dtype, Pass]] = {
        "torch float32": (torch.float32, torch_pass(wide)),
        "torch bfloat16": (torch.bfloat16, torch_pass(narrow)),
    }
    facts = machine(arguments.threads)
    if facts["kernel"] == "available":
        passes["kernel float32"] = (torch.float32, kernel_pass(wide, arguments.threads))
        passes["kernel bfloat16"] = (torch.bfloat16, kernel_pass(narrow, arguments.threads))
    results = measure(passes, arguments.rows, arguments.rounds)

    print(" ".join(f"{key}={value}" for key, value in facts.items()))
    print(f"{'rows':>5}" + "".join(f"{name:>26}" for name in passes) + "   min / lower quartile, ms")
    for n in arguments.rows:
        cells = []
        for name in passes:
            hit = [r for r in results if r["rows"] == n and r["variant"] == name]
            cells.append(f"{hit[0]['min_ms']:>13} / {hit[0]['quartile_ms']:>10}" if hit else f"{'-':>26}")
        print(f"{n:>5}" + "".join(cells))
    if arguments.out is not None:
        record = {"command": command_line(), "machine": facts, "results": results}
        arguments.out.write_text(json.dumps(record, indent=1) + "\n")
        print(f"wrote {arguments.out}")


if __name__ == "__main__":
    main()
