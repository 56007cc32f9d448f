"""Short training runs that differ in one thing, on a corpus that `dflash train` wrote; one process, compiled once.

    python benchmarks/train_ablation.py --model DIR --work-dir DIR --variants variants.json --steps 300

variants.json: {"name": {"init": "target", "learning_rate": 0.001, ...}, ...}, fields of the recipe and init. Results go
to WORK_DIR/ablation/results.jsonl: acceptance length of the development documents, which no run trains on.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

from engine.training import pipeline
from engine.training.corpus import Corpus, pack
from engine.training.ranks import Ranks
from engine.training.recipe import TrainRecipe
from engine.training.trainer import Trainer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--work-dir", type=Path, required=True)
    parser.add_argument("--variants", type=Path, required=True)
    parser.add_argument("--only", default="", help="comma-separated names; all by default")
    parser.add_argument("--init", required=True, help="gives the drafter's shape, and weights unless a variant does")
    parser.add_argument("--recipe", type=json.loads, default={}, help="JSON of recipe fields that all variants share")
    parser.add_argument(
        "--widths", type=int, nargs="*", default=[], help="block sizes to score beside the drafter's own"
    )
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--device", default="cuda")
    arguments = parser.parse_args()

    variants: dict[str, dict[str, Any]] = json.loads(arguments.variants.read_text())
    if arguments.only:
        variants = {name: variants[name] for name in arguments.only.split(",")}
    ranks = Ranks.from_environment(arguments.device)
    job = pipeline.TrainJob(model_dir=arguments.model, work_dir=arguments.work_dir, init=arguments.init)
    base: dict[str, Any] = {"steps": arguments.steps, "score_every": 10**9, "save_seconds": 1e9}
    if arguments.device == "cpu":
        base |= {"backend": "dense", "compile_model": False}
    base |= arguments.recipe
    recipe = TrainRecipe(**base)
    corpus = Corpus.load(sorted(job.work_dir.glob("corpus-*.npz")))
    train, dev = pipeline.split_corpus(corpus, recipe.row_len)
    rows = pack(train, row_len=recipe.row_len, seed=0).to(ranks.device)
    held_out = {"dev": pipeline.acceptance_set(dev, recipe, ranks.device)}
    program, arena = pipeline.build(job, recipe, ranks, recipe.row_len)
    out = job.work_dir / "ablation"
    out.mkdir(parents=True, exist_ok=True)
    for name, fields in variants.items():
        fields = dict(fields)
        pipeline.initialise(program.drafter, program.target, fields.pop("init", arguments.init), 0)
        arena.gradients.zero_()
        trainer = Trainer(
            program,
            arena,
            rows,
            TrainRecipe(**base | fields),
            ranks,
            directory=out / name,
            raw_config=job.raw_config(),
            held_out=held_out,
        )
        began = time.monotonic()
        before = trainer.scores() if name == next(iter(variants)) else {}
        scores = trainer.fit()
        record = {
            "variant": name,
            "fields": fields,
            "before": before,
            "scores": scores,
            "scores_at_width": {
                w: round(held_out["dev"].score(program, w).acceptance_length, 4) for w in arguments.widths
            },
            "seconds": round(time.monotonic() - began, 1),
        }
        with (out / "results.jsonl").open("a") as file:
            file.write(json.dumps(record) + "\n")
        print(json.dumps(record), flush=True)


if __name__ == "__main__":
    main()
