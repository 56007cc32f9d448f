"""Short training runs that differ in one thing, on a bare GPU machine: writes the corpus, then runs all variants.

    python benchmarks/train_ablation.py OUT.json --model SOURCE --work-dir DIR --mask-token-id ID [--seconds 300]
    ... --prompts eval_prompts.json --drafter DIR

A variants file has `shared` recipe fields, and groups of variants: name -> the fields that differ, which may also be
`init`, `num_layers`, and `steps` as a multiple of --steps. Every group is a process of its own: they compile while
this one writes the corpus, and share the device afterwards, so `seconds` of a run says nothing about its speed. Scores
are acceptance lengths of the development documents, which no run trains on, at the drafter's block size and --widths.

With --drafter one more process cuts the head to the target's most frequent ids, counted in the training documents, and
scores that drafter with each cut on the sets of --prompts. OUT.json is rewritten after every result; a run that would
not end within --seconds is not begun. The counts go beside it, as OUT-token-counts.npy.

With --speed ROWS LENGTH ANCHORS one more process, which compiles beside the others, times steps of that batch once all
others have ended: block tokens a second of the device alone, the target's forward included. `--groups` without a name
runs no group, so that the speed can be measured by itself.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from command_line import command_line

from engine.training import pipeline
from engine.training.acceptance import AcceptanceSet
from engine.training.corpus import Corpus, PackedRows, pack
from engine.training.optimizer import ParameterArena
from engine.training.program import BlockProgram
from engine.training.ranks import Ranks
from engine.training.recipe import TrainRecipe
from engine.training.responses import ResponsePlan
from engine.training.trainer import Trainer
from engine.training.vocabulary import most_frequent, token_counts
from engine.weights.source import fetch

_HEAD = "heads"  # the group that cuts heads
_SPEED = "speed"  # the group that times steps
_ALONE = "alone"  # a file: nothing but it runs any more
_TIMED_STEPS = 25
_CORPUS = "corpus-0.npz"
_SCORE_ROWS = 2  # rows of a scoring pass: its masks are dense


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--model", required=True)
    parser.add_argument("--work-dir", type=Path, required=True)
    parser.add_argument("--variants", type=Path, default=Path(__file__).with_name("train_variants.json"))
    parser.add_argument(
        "--groups", nargs="*", help="of the variants file; all by default. Five at once cost 75 s a run"
    )
    parser.add_argument("--mask-token-id", type=int, required=True)
    parser.add_argument("--num-layers", type=int, default=5)
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--steps", type=int, default=250)
    parser.add_argument("--widths", type=int, nargs="*", default=[8])
    parser.add_argument("--prompts", type=Path, help="evaluation prompts by set; no training prompt overlaps with them")
    parser.add_argument("--drafter", type=Path, help="score this drafter with cut heads")
    parser.add_argument("--head-sizes", type=int, nargs="*", default=[8192, 16384, 24576, 32768])
    parser.add_argument(
        "--speed", type=int, nargs=3, metavar=("ROWS", "LENGTH", "ANCHORS"), help="time steps of this batch"
    )
    parser.add_argument("--turns", type=int, default=36000, help="user turns that the target writes")
    parser.add_argument("--turn-seconds", type=float, default=10.0)
    parser.add_argument("--response-seconds", type=float, default=26.0)
    parser.add_argument("--max-new", type=int, default=400)
    parser.add_argument("--slots", type=int, default=2048)
    parser.add_argument("--seconds", type=float, default=300.0, help="of everything")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--group", help=argparse.SUPPRESS)  # this program's own child
    parser.add_argument("--stop-at", type=float, help=argparse.SUPPRESS)
    return parser.parse_args()


def job_of(args: argparse.Namespace, **fields: Any) -> pipeline.TrainJob:
    return pipeline.TrainJob(
        **{
            "model_dir": fetch(args.model),
            "work_dir": args.work_dir,
            "init": "random",
            "held_out_file": args.prompts,
            "num_layers": args.num_layers,
            "block_size": args.block_size,
            "mask_token_id": args.mask_token_id,
        }
        | fields
    )


# ------------------------------------------------------------------------------------------------ one group, a process


class Group:
    """The variants of one group. One program for each number of layers; variants do not differ in more of its shape."""

    def __init__(self, args: argparse.Namespace, shared: dict[str, Any], variants: dict[str, dict[str, Any]]) -> None:
        self.args, self.shared, self.variants = args, shared, variants
        self.ranks = Ranks.from_environment(args.device)
        self.programs: dict[int, tuple[BlockProgram, ParameterArena]] = {}

    def recipe(self, fields: dict[str, Any]) -> TrainRecipe:
        base: dict[str, Any] = {"score_every": 10**9, "save_seconds": 1e9} | self.shared
        if self.args.device == "cpu":
            base |= {"backend": "dense", "compile_model": False}
        steps = max(1, round(self.args.steps * fields.get("steps", 1)))
        own = {name: value for name, value in fields.items() if name not in ("init", "num_layers", "steps")}
        return TrainRecipe(**base | own | {"steps": steps})

    def trainer(self, name: str, rows: PackedRows) -> Trainer:
        """A fresh trainer at the variant's start."""
        fields = self.variants[name]
        recipe, layers = self.recipe(fields), fields.get("num_layers", self.args.num_layers)
        # The taps are those of the usual number of layers, so that a variant of other layers differs in these alone.
        taps = tuple(job_of(self.args).raw_config()["dflash_config"]["target_layer_ids"])
        job = job_of(self.args, num_layers=layers, init=fields.get("init", "random"), target_layer_ids=taps)
        if layers not in self.programs:
            self.programs[layers] = pipeline.build(job, recipe, self.ranks, recipe.row_len)
        program, arena = self.programs[layers]
        pipeline.initialise(program.drafter, program.target, job.init, recipe.seed)
        arena.gradients.zero_()
        return Trainer(
            program,
            arena,
            rows,
            recipe,
            self.ranks,
            directory=self.args.work_dir / "ablation" / name,
            raw_config=job.raw_config(),
            held_out={},
        )

    def compile_all(self) -> None:
        """A step of every variant on made-up documents, while there is no corpus yet."""
        shared = self.recipe({})
        rng = np.random.default_rng(0)
        vocab = int(job_of(self.args).raw_config()["vocab_size"])
        length = min(300, shared.row_len)
        documents = [
            (rng.integers(0, vocab, length).tolist(), length // 8, 0.0)
            for _ in range(2 * shared.rows_per_step * (shared.row_len // length))
        ]
        rows = pack(Corpus.of(documents), row_len=shared.row_len, seed=0).to(self.ranks.device)
        for name, fields in self.variants.items():
            trainer = self.trainer(name, rows)
            trainer.train_step()
            if fields.get("short_block_share"):
                trainer.step = round(1 / fields["short_block_share"]) - 1
                trainer.train_step()

    def results(self) -> Iterator[dict[str, Any]]:
        self.compile_all()
        train, dev = pipeline.split_corpus(wait_for_corpus(self.args), self.recipe({}).row_len)
        rows = pack(train, row_len=self.recipe({}).row_len, seed=0).to(self.ranks.device)
        held_out = scoring_set(dev, self.recipe({}), self.ranks.device)
        longest = 0.0
        for name, fields in self.variants.items():
            began = time.monotonic()
            if time.time() + longest > self.args.stop_at:
                print(f"no time left for '{name}'", flush=True)
                continue
            trainer = self.trainer(name, rows)
            trainer.fit()
            scorer = BlockProgram(trainer.program.target, trainer.program.drafter, backend="dense", compile_model=False)
            with torch.no_grad():
                scores = {
                    width: round(held_out.score(scorer, width).acceptance_length, 4)
                    for width in (self.args.block_size, *self.args.widths)
                }
            longest = max(longest, time.monotonic() - began)
            yield {
                "variant": name,
                "fields": fields,
                "steps": trainer.step,
                "scores": {"dev": scores[self.args.block_size]},
                "scores_at_width": {str(width): scores[width] for width in self.args.widths},
                "seconds": round(time.monotonic() - began, 1),
            }


def cut_heads(args: argparse.Namespace, shared: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The drafter's acceptance with its head cut to the most frequent ids of the training documents."""
    recipe = TrainRecipe(**shared | {"steps": 1, "backend": "dense", "compile_model": False})
    ranks = Ranks.from_environment(args.device)
    job = job_of(args, init=str(args.drafter))
    program, _ = pipeline.build(job, recipe, ranks, recipe.row_len)
    recipe = replace(recipe, rows_per_step=_SCORE_ROWS)
    sets = pipeline.score_sets(job, recipe, ranks.device)
    train, dev = pipeline.split_corpus(wait_for_corpus(args), recipe.row_len)
    sets["dev"] = scoring_set(dev, recipe, ranks.device)
    counts = token_counts(train, program.target.config.vocab_size)
    np.save(args.out.with_name(args.out.stem + "-token-counts.npy"), counts.astype(np.int32))
    for size in (len(counts), *args.head_sizes):
        if time.time() > args.stop_at:
            return
        ids = most_frequent(counts, min(size, len(counts)), always=program.target.config.eos_token_ids)
        cut = BlockProgram(
            program.target, program.drafter, backend="dense", compile_model=False, draft_ids=torch.from_numpy(ids)
        )
        with torch.no_grad():
            reports = {name: part.score(cut) for name, part in sets.items()}
        yield {
            "head_rows": len(ids),
            "share_of_training_tokens": round(float(counts[ids].sum() / counts.sum()), 5),
            "acceptance_length": {name: round(report.acceptance_length, 4) for name, report in reports.items()},
        }


def timed_steps(args: argparse.Namespace, shared: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Block tokens a second of a batch of --speed, with the device to itself."""
    rows_per_step, row_len, anchors = args.speed
    batch = {"rows_per_step": rows_per_step, "row_len": row_len, "anchors_per_row": anchors}
    group = Group(args, shared | batch, {_SPEED: {}})
    group.compile_all()
    train, _ = pipeline.split_corpus(wait_for_corpus(args), group.recipe({}).row_len)
    trainer = group.trainer(_SPEED, pack(train, row_len=group.recipe({}).row_len, seed=0).to(group.ranks.device))
    while not (args.work_dir / _ALONE).is_file():
        time.sleep(0.2)
    for measured in (False, True):  # the first round warms the device up
        began = time.monotonic()
        for _ in range(_TIMED_STEPS):
            trainer.train_step()
        if args.device != "cpu":
            torch.cuda.synchronize()
        elapsed_s = time.monotonic() - began
        if measured:
            tokens = rows_per_step * anchors * trainer.program.block_size * _TIMED_STEPS
            yield {
                **batch,
                "step_ms": round(elapsed_s / _TIMED_STEPS * 1e3, 2),
                "block_tokens_per_s": round(tokens / elapsed_s),
            }


def scoring_set(dev: Corpus, recipe: TrainRecipe, device: str) -> AcceptanceSet:
    return pipeline.acceptance_set(dev, replace(recipe, rows_per_step=_SCORE_ROWS), device)


def wait_for_corpus(args: argparse.Namespace) -> Corpus:
    path = args.work_dir / _CORPUS
    while not path.is_file():
        if time.time() > args.stop_at:
            raise SystemExit("no corpus was written in time")
        time.sleep(0.2)
    return Corpus.load([path])


def child(args: argparse.Namespace) -> None:
    """Appends each result of the group to its file."""
    plan = json.loads(args.variants.read_text())
    own = {_HEAD: cut_heads, _SPEED: timed_steps}.get(args.group)
    results = (
        Group(args, plan["shared"], plan["groups"][args.group]).results() if own is None else own(args, plan["shared"])
    )
    with results_file(args, args.group).open("a") as file:
        for result in results:
            file.write(json.dumps({"group": args.group} | result) + "\n")
            file.flush()


# --------------------------------------------------------------------------------------------------------- all of them


def results_file(args: argparse.Namespace, group: str) -> Path:
    return args.work_dir / f"results-{group.replace(' ', '-')}.jsonl"


def main() -> None:
    args = parse()
    if args.group is not None:
        child(args)
        return
    began = time.time()
    args.work_dir.mkdir(parents=True, exist_ok=True)
    job = job_of(args)
    job.raw_config()
    known = json.loads(args.variants.read_text())["groups"]
    if unknown := sorted(set(args.groups or []) - set(known)):
        raise SystemExit(f"--groups: there is no {unknown[0]!r}; there are {', '.join(known)}")
    chosen = known if args.groups is None else args.groups
    groups = [*chosen, *([_HEAD] if args.drafter else []), *([_SPEED] if args.speed else [])]
    if not groups:
        raise SystemExit("nothing to run: name --groups, or give --drafter or --speed")
    for group in groups:
        results_file(args, group).unlink(missing_ok=True)
    corpus, alone = args.work_dir / _CORPUS, args.work_dir / _ALONE
    for left in (corpus, alone):
        left.unlink(missing_ok=True)
    command = [sys.executable, *sys.argv, "--stop-at", str(began + args.seconds)]
    # All compile at once, each with workers of its own: by default one for every core, hundreds in all.
    compilers = max(2, len(os.sched_getaffinity(0)) // len(groups))
    environment = {"TORCHINDUCTOR_COMPILE_THREADS": str(compilers)} | os.environ
    children = {group: subprocess.Popen([*command, "--group", group], env=environment) for group in groups}
    record: dict[str, Any] = {"command": command_line(), "machine": machine(args.device), "corpus": {}}
    try:
        plan = ResponsePlan(
            turns=args.turns,
            turn_seconds=args.turn_seconds,
            response_seconds=args.response_seconds,
            max_new=args.max_new,
            slots=args.slots,
        )
        record["corpus"] = pipeline.write_corpus(job, plan, Ranks.from_environment(args.device))
        print(json.dumps(record["corpus"]), flush=True)
        if args.device != "cpu":
            torch.cuda.empty_cache()
        while any(process.poll() is None for process in children.values()):
            if time.time() > began + args.seconds + 30:
                print("out of time; unfinished runs are left out", flush=True)
                break
            time.sleep(1.0)
            if all(process.poll() is not None for group, process in children.items() if group != _SPEED):
                alone.touch()
            collect(args, record, groups, began)
    finally:
        for process in children.values():
            process.kill()
        collect(args, record, groups, began)
    failed = [group for group, process in children.items() if process.wait()]
    print("\n".join(json.dumps(result) for result in [*record["results"], *record["cut_heads"], *record["speed"]]))
    if failed:
        sys.exit(f"no clean end: {', '.join(failed)}")


def collect(args: argparse.Namespace, record: dict[str, Any], groups: list[str], began: float) -> None:
    """Writes what there is."""
    found = []
    for group in groups:
        path = results_file(args, group)
        found += [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []
    record["results"] = [result for result in found if "variant" in result]
    record["cut_heads"] = [result for result in found if "head_rows" in result]
    record["speed"] = [result for result in found if "block_tokens_per_s" in result]
    record["seconds"] = round(time.time() - began, 1)
    args.out.write_text(json.dumps(record, indent=1) + "\n")


def machine(device: str) -> str:
    name = torch.cuda.get_device_name() if device != "cpu" else "CPU"
    return f"{name}, torch {torch.__version__}"


if __name__ == "__main__":
    main()
