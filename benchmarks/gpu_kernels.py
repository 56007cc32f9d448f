"""Everything about the CUDA kernels in one call: tests, then the sweeps; each part's output goes to a folder.

    python benchmarks/gpu_kernels.py OUT_DIR --parts tests forward layer attention

A part that fails or runs out of its time is reported and the next one runs. The last lines say what each did.
"""

import argparse
import os
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

HERE = Path(__file__).resolve().parent


def commands(out: Path) -> dict[str, list[tuple[str, list[str], dict[str, str], float]]]:
    """Of each part: (name, command, environment, most seconds)."""
    python = sys.executable
    workers = ["-n", "12"] if find_spec("xdist") else []
    tests = [
        python,
        "-m",
        "pytest",
        "-q",
        "-m",
        "gpu",
        "-p",
        "no:cacheprovider",
        *workers,
        str(HERE.parent / "tests" / "gpu"),
    ]
    variants = {
        "fused": {},
        "no dependent launch": {"DFLASH_CUDA_DEPENDENT_LAUNCH": "0"},
        "torch": {"DFLASH_CUDA_KERNELS": "torch"},
    }

    def forward(model: str, name: str, *more: str) -> tuple[str, list[str], dict[str, str], float]:
        label = f"forward {model} {name}"
        file = out / f"{label.replace(' ', '_')}.json"
        return (
            label,
            [python, str(HERE / "gpu_forward.py"), "--model", model, "--out", str(file), *more],
            variants[name],
            120,
        )

    return {
        "tests": [("tests", tests, {}, 240)],
        "forward": [
            *[forward("smollm2", name) for name in variants],
            *[forward("qwen3-8b", name, "--sequences", "1") for name in variants],
        ],
        "layer": [
            (
                f"layer {model}",
                [python, str(HERE / "gpu_layer.py"), "--model", model, "--out", str(out / f"gpu_layer_{model}.json")],
                {},
                240,
            )
            for model in ("smollm2", "qwen3-8b")
        ],
        "attention": [
            ("attention", [python, str(HERE / "gpu_attention.py"), "--out", str(out / "gpu_attention.json")], {}, 160),
        ],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path, help="folder for the results")
    parser.add_argument("--parts", nargs="+", default=["tests", "forward", "layer", "attention"])
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    parts = commands(arguments.out)
    unknown = [part for part in arguments.parts if part not in parts]
    if unknown:
        parser.error(f"--parts: {unknown[0]!r} is none of {', '.join(parts)}")
    summary = []
    for label, command, environment, most_seconds in (step for part in arguments.parts for step in parts[part]):
        log = arguments.out / f"{label.replace(' ', '_')}.log"
        begin = time.perf_counter()
        path = os.pathsep.join(filter(None, [str(HERE.parent), os.environ.get("PYTHONPATH")]))
        env = {**os.environ, "PYTHONPATH": path, **environment}
        with log.open("w") as file:
            try:
                end = subprocess.run(
                    command, stdout=file, stderr=subprocess.STDOUT, env=env, timeout=most_seconds, check=False
                )
                status = "done" if end.returncode == 0 else f"exit status {end.returncode}"
            except subprocess.TimeoutExpired:
                status = f"stopped after {most_seconds:.0f} s"
        tail = log.read_text(errors="replace").strip().splitlines()[-1:]
        summary.append(f"{label}: {status}, {time.perf_counter() - begin:.0f} s: {tail[0][:300] if tail else ''}")
        print(summary[-1], flush=True)
    (arguments.out / "summary.txt").write_text("\n".join(summary) + "\n")


if __name__ == "__main__":
    main()
