"""Runs the scenarios of `dflash simulate` and keeps figures and plots.

In the root of the repository:

python benchmarks/simulate_all.py benchmarks/results
python benchmarks/simulate_all.py benchmarks/results --only s1 s5 s6 --jobs 16

Every process takes one policy of one scenario at a time. Needs numpy, msgspec, pydantic and PyYAML alone.
"""

import argparse
import json
import multiprocessing
import sys
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path

from command_line import command_line

from cluster.simulate.experiment import run_experiment
from cluster.simulate.plot import draw
from cluster.simulate.scenario import load_scenario
from cluster.simulate.verdicts import as_record, judge

_SCENARIOS = Path("configs/sim")


def simulate(name: str, folder: Path, pool: ProcessPoolExecutor) -> list[str]:
    """Runs one scenario. Returns a line for each of its bars that fails."""
    scenario = load_scenario(_SCENARIOS / f"{name}.yaml")
    experiment = run_experiment(scenario, pool=pool)
    verdicts = judge(scenario, experiment)
    record = as_record(scenario, experiment, verdicts, command=command_line())
    (folder / f"simulate_{name}.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    (folder / f"simulate_{name}.svg").write_text(draw(experiment, scenario.description), encoding="utf-8")
    for verdict in verdicts:
        print(f"{name}: {verdict.name} {verdict.value:.4f} {verdict.bar} {verdict.note}", flush=True)
    print(f"{name}: {experiment.wall_s:.0f} s, static schedule {experiment.static_schedule}", flush=True)
    return [f"{name}: {v.name} {v.value:.4f}, not {v.bar}" for v in verdicts if v.holds is False]


def main() -> int:
    """Exit status: 1 when a bar of a scenario does not hold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="for simulate_NAME.json and simulate_NAME.svg")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="scenarios, such as s2; default: all")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    options = parser.parse_args()
    known = sorted(path.stem for path in _SCENARIOS.glob("s*.yaml"))
    names = options.only or known
    unknown = sorted(set(names) - set(known))
    if unknown:
        parser.error(f"--only: there is no scenario {unknown[0]}")
    spawned = multiprocessing.get_context("spawn")  # threads submit, and a fork beside threads may hang
    with (
        ProcessPoolExecutor(max_workers=options.jobs, mp_context=spawned) as pool,
        ThreadPoolExecutor(max_workers=len(names)) as threads,
    ):
        runs = [threads.submit(simulate, name, options.folder, pool) for name in names]
        failed = [line for run in runs for line in run.result()]
    print("\n".join(failed) if failed else "all bars hold")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
