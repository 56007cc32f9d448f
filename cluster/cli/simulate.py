"""`dflash simulate`: draft-length policies on a simulated cluster, side by side."""

import json
import shlex
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich import box
from rich.table import Table

from cluster.cli.console import FAILED, check_output_file, stderr, stdout, user_errors

if TYPE_CHECKING:
    from cluster.simulate.experiment import Experiment

_QUICK_SEEDS, _QUICK_S = 1, 120.0


def simulate(
    scenario_file: Annotated[
        Path, typer.Argument(metavar="SCENARIO", help="Scenario file, such as configs/sim/s2.yaml.")
    ],
    quick: Annotated[
        bool, typer.Option("--quick", help="One seed and the first two minutes: a look, no verdict.")
    ] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the figures to this file.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw speed and draft length over time, as SVG.")] = None,
) -> None:
    """Simulate a cluster under every draft-length policy. Status 1 when a bar of the scenario does not hold."""
    from cluster.simulate.experiment import run_experiment
    from cluster.simulate.plot import draw
    from cluster.simulate.scenario import load_scenario
    from cluster.simulate.verdicts import as_record, judge

    check_output_file("--json", json_file)
    check_output_file("--plot", plot)
    with user_errors(ValueError, OSError):
        scenario = load_scenario(scenario_file)
        if quick:
            duration_s = min(_QUICK_S, scenario.duration_s)
            scenario = scenario.model_copy(update={"seeds": scenario.seeds[:_QUICK_SEEDS], "duration_s": duration_s})
        progress = stderr()
        experiment = run_experiment(scenario, progress=lambda text: progress.print(f"simulating {text}", markup=False))
    verdicts = [] if quick else judge(scenario, experiment)
    out = stdout()
    out.print(scenario.description)
    out.print(_table(experiment))
    out.print("score: tokens/s and request, mean over seeds +- deviation; ms: from token to token", markup=False)
    out.print(f"static schedule of hindsight: {experiment.static_schedule}; {experiment.wall_s:.0f} s")
    for verdict in verdicts:
        word = {True: "holds", False: "FAILS", None: verdict.note}[verdict.holds]
        out.print(f"{verdict.name}: {verdict.value:.4f} {verdict.bar} {word}")
    if not experiment.measured:
        out.print("step times: an estimate at least in part, see the step tables")
    with user_errors(OSError, status=FAILED):
        if json_file is not None:
            command = shlex.join(["dflash", *sys.argv[1:]])
            record = as_record(scenario, experiment, verdicts, command=command)
            json_file.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        if plot is not None:
            plot.write_text(draw(experiment, scenario.description), encoding="utf-8")
    if any(verdict.holds is False for verdict in verdicts):
        raise typer.Exit(FAILED)


def _table(experiment: "Experiment") -> Table:
    from cluster.simulate.experiment import CLAIRVOYANT
    from cluster.simulate.verdicts import spread

    # narrow enough for 80 columns; the rest is in the JSON
    table = Table(box=box.SIMPLE, padding=(0, 1, 0, 0))
    table.add_column("policy", no_wrap=True)
    for name in ("score", "+-", "/ best", "tokens/s", "ms p50", "ms p99", "rows", "K", "moves"):
        table.add_column(name, justify="right", no_wrap=True)
    best = experiment.mean(CLAIRVOYANT)
    for policy in experiment.policies:
        outcomes = experiment.of(policy)
        scores = [outcome.score for outcome in outcomes]

        def mean(values: Sequence[float]) -> float:
            return statistics.fmean(values)

        table.add_row(
            policy,
            f"{mean(scores):.2f}",
            f"{spread(scores):.2f}",
            f"{mean(scores) / best:.3f}",
            f"{mean([o.tokens_per_s for o in outcomes]):.0f}",
            *(f"{mean([o.token_s[i] for o in outcomes]) * 1e3:.1f}" for i in (0, 1)),
            f"{mean([o.mean_rows for o in outcomes]):.1f}",
            f"{mean([o.mean_draft_len for o in outcomes]):.2f}",
            f"{mean([o.changes for o in outcomes]):.0f}",
        )
    return table
