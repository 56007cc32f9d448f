"""Runs the scenarios of `dflash simulate` one after the other, and keeps figures and plots.

In the root of the repository:

python benchmarks/simulate_all.py benchmarks/results
python benchmarks/simulate_all.py benchmarks/results --only s1 s5 s6
"""

import argparse
import subprocess
import sys
from pathlib import Path

_SCENARIOS = Path("configs/sim")


def main() -> int:
    """Exit status: 1 when a bar of a scenario does not hold."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path, help="for simulate_NAME.json and simulate_NAME.svg")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="scenarios, such as s2; default: all")
    options = parser.parse_args()
    scenarios = sorted(_SCENARIOS.glob("s*.yaml"))
    names = options.only or [path.stem for path in scenarios]
    unknown = sorted(set(names) - {path.stem for path in scenarios})
    if unknown:
        parser.error(f"--only: there is no scenario {unknown[0]}")
    failed = []
    for name in names:
        kept = options.folder / f"simulate_{name}"
        command = ["simulate", str(_SCENARIOS / f"{name}.yaml"), "--json", f"{kept}.json", "--plot", f"{kept}.svg"]
        print(f"== {name}", flush=True)
        status = subprocess.run([sys.executable, "-m", "cluster.cli.main", *command], check=False).returncode
        if status:
            failed.append(name)
    print(f"failed: {', '.join(failed)}" if failed else "all bars hold")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
