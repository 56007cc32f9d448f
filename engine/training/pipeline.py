"""The stages of `dflash train`, each readable from the last one's files: prompts, responses, fit.

Work directory: prompts.jsonl.xz, corpus-<rank>.npz, turns-<rank>.jsonl, run/ (state.pt, drafter/, log.jsonl).
"""

import json
import logging
import random
import sysconfig
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from engine.config.drafter import parse_drafter_config
from engine.config.model import DrafterConfig, parse_target_config
from engine.tokenizer import Tokenizer
from engine.training.acceptance import AcceptanceReport, AcceptanceSet
from engine.training.checkpoint import drafter_config, load_weights, spread_taps
from engine.training.corpus import Corpus, pack
from engine.training.cut_head import HEAD_TENSORS, kept_ids
from engine.training.drafter import TrainableDrafter
from engine.training.optimizer import ParameterArena
from engine.training.overlap import OverlapIndex
from engine.training.program import BlockProgram
from engine.training.prompts import Cleaner, docstring_prompts, load_prompts, save_prompts, word_problems
from engine.training.ranks import Ranks
from engine.training.recipe import TrainRecipe
from engine.training.responses import ResponsePlan, evaluation_corpora, save_texts, write_responses, write_turns
from engine.training.target import FrozenTarget
from engine.training.trainer import Trainer

logger = logging.getLogger(__name__)
PROMPTS_FILE = "prompts.jsonl.xz"
RUN_DIR = "run"
_DEV_DOCUMENTS = 256


@dataclass(frozen=True, kw_only=True)
class TrainJob:
    """model_dir: the target. init: "target", "random", or a z-lab drafter to go on from (whose shape is then taken).

    held_out_file: JSON object of set name -> prompts that never enter training and are scored.
    num_layers, block_size, mask_token_id, target_layer_ids: the drafter's shape unless init names one; taps None:
    DFlash's even choice, as many as layers.
    """

    model_dir: Path
    work_dir: Path
    init: str
    held_out_file: Path | None = None
    num_layers: int = 5
    block_size: int = 16
    mask_token_id: int | None = None
    target_layer_ids: tuple[int, ...] | None = None
    score_new_tokens: int = 256

    def held_out(self) -> dict[str, list[str]]:
        """The evaluation prompts by set.

        Raises:
            ValueError: the file is not an object of lists of strings.
        """
        if self.held_out_file is None:
            return {}
        sets = json.loads(self.held_out_file.read_text(encoding="utf-8"))
        if not isinstance(sets, dict) or not all(
            isinstance(texts, list) and all(isinstance(t, str) for t in texts) for texts in sets.values()
        ):
            raise ValueError(f"{self.held_out_file}: must hold a JSON object of set name -> list of prompts.")
        return sets

    def overlap_index(self) -> OverlapIndex:
        return OverlapIndex(text for texts in self.held_out().values() for text in texts)

    def raw_config(self) -> dict[str, Any]:
        """config.json of the drafter to train.

        Raises:
            ValueError: no mask token, or a shape that does not fit the target.
        """
        if self.init not in ("target", "random"):
            raw: dict[str, Any] = json.loads((Path(self.init) / "config.json").read_text(encoding="utf-8"))
            return raw
        if self.mask_token_id is None:
            raise ValueError(
                "mask_token_id is needed for a new drafter: an id of the target's vocabulary that no text contains, "
                "such as an unused special token."
            )
        target = parse_target_config(self.model_dir)
        return drafter_config(
            target,
            num_layers=self.num_layers,
            block_size=self.block_size,
            mask_token_id=self.mask_token_id,
            target_layer_ids=self.target_layer_ids or spread_taps(target.num_layers, self.num_layers),
        )


def write_prompt_file(job: TrainJob, *, problems: int, seed: int) -> int:
    """Stage 1: docstrings of the installed packages and word problems; returns the number of prompts."""
    paths = sysconfig.get_paths()
    roots = [Path(paths["stdlib"]), Path(paths["purelib"])]
    cleaner = Cleaner(job.overlap_index())
    found = cleaner.kept(docstring_prompts(roots, seed=seed))
    if problems:
        found += cleaner.kept(word_problems(problems, seed=seed))
    random.Random(seed).shuffle(found)
    job.work_dir.mkdir(parents=True, exist_ok=True)
    save_prompts(found, job.work_dir / PROMPTS_FILE)
    return len(found)


def write_corpus(job: TrainJob, plan: ResponsePlan, ranks: Ranks) -> dict[str, float]:
    """Stage 2, on every rank: the target writes user turns, and responses to them and to its share of the file."""
    began = time.monotonic()
    tokenizer = Tokenizer.load(job.model_dir)
    longest = max(256, plan.max_prompt + plan.max_new) + 1
    dtype = torch.bfloat16 if ranks.device.startswith("cuda") else torch.float32
    target = FrozenTarget.load(job.model_dir, num_positions=longest, dtype=dtype, device=ranks.device)
    file = job.work_dir / PROMPTS_FILE
    cleaner = Cleaner(job.overlap_index())
    prompts = cleaner.kept(load_prompts(file)[ranks.rank :: ranks.size] if file.is_file() else [])
    figures: dict[str, float] = {"file_prompts": len(prompts), "loaded_s": round(time.monotonic() - began, 1)}
    if plan.turns:
        turns = write_turns(target, tokenizer, plan, cleaner)
        save_texts(turns, job.work_dir / f"turns-{ranks.rank}.jsonl")
        figures |= {"turns": len(turns), "turns_done_s": round(time.monotonic() - began, 1)}
        prompts += turns
    logger.info("rank %d: %s", ranks.rank, figures)
    corpus = write_responses(target, tokenizer, prompts, plan)
    corpus.save(job.work_dir / f"corpus-{ranks.rank}.npz")
    figures |= {
        "documents": len(corpus),
        "response_tokens": corpus.response_tokens,
        "greedy_share": round(float((corpus.temperature == 0).mean()), 3),
        "done_s": round(time.monotonic() - began, 1),
    }
    logger.info("rank %d: %s", ranks.rank, figures)
    return figures


def split_corpus(corpus: Corpus, row_len: int) -> tuple[Corpus, Corpus]:
    """(training, development): the latter is some greedy documents, at most a twentieth of all."""
    fits = [i for i in range(len(corpus)) if int(corpus.start[i + 1] - corpus.start[i]) <= row_len]
    greedy = [i for i in fits if corpus.temperature[i] == 0]
    random.Random(0).shuffle(greedy)
    held = set(greedy[: min(_DEV_DOCUMENTS, len(fits) // 20)])
    return corpus.subset([i for i in fits if i not in held]), corpus.subset(sorted(held))


def build(job: TrainJob, recipe: TrainRecipe, ranks: Ranks, longest: int) -> tuple[BlockProgram, ParameterArena]:
    """Target and drafter on this rank's device, weights as `job.init` says."""
    dtype = torch.bfloat16 if ranks.device.startswith("cuda") else torch.float32
    target = FrozenTarget.load(job.model_dir, num_positions=longest, dtype=dtype, device=ranks.device)
    config = parse_drafter_config(job.raw_config(), target.config)
    drafter = TrainableDrafter(config, num_positions=longest + config.block_size, device=ranks.device)
    initialise(drafter, target, job.init, recipe.seed)
    arena = ParameterArena(drafter)
    return BlockProgram(target, drafter, backend=recipe.backend, compile_model=recipe.compile_model), arena


def initialise(drafter: TrainableDrafter, target: FrozenTarget, init: str, seed: int) -> None:
    """Weights of "target", "random" or a drafter directory."""
    if init == "target":
        drafter.start_from_target(target, seed)
    elif init == "random":
        drafter.randomise(seed)
    else:
        load_weights(drafter, Path(init))


def score_sets(job: TrainJob, recipe: TrainRecipe, device: str, temperature: float = 0.0) -> dict[str, AcceptanceSet]:
    """The evaluation prompts with responses in float32, packed for the recipe's batch."""
    sets = job.held_out()
    if not sets:
        return {}
    corpora = evaluation_corpora(
        job.model_dir,
        Tokenizer.load(job.model_dir),
        sets,
        max_new=job.score_new_tokens,
        temperature=temperature,
        device=device,
    )
    return {name: acceptance_set(corpus, recipe, device) for name, corpus in corpora.items()}


def acceptance_set(corpus: Corpus, recipe: TrainRecipe, device: str) -> AcceptanceSet:
    return AcceptanceSet(
        corpus,
        row_len=recipe.row_len,
        rows_per_pass=recipe.rows_per_step,
        anchors_per_row=recipe.anchors_per_row,
        device=device,
    )


def fit(job: TrainJob, recipe: TrainRecipe, ranks: Ranks) -> dict[str, float]:
    """Stage 3: trains on every rank, goes on from run/ if it holds a state; final acceptance lengths on rank 0."""
    corpus = Corpus.load(sorted(job.work_dir.glob("corpus-*.npz")))
    train, dev = split_corpus(corpus, recipe.row_len)
    rows = pack(train, row_len=recipe.row_len, seed=recipe.seed).to(ranks.device)
    logger.info(
        "rank %d: %d documents, %d response tokens, %d rows", ranks.rank, len(train), train.response_tokens, len(rows)
    )
    program, arena = build(job, recipe, ranks, recipe.row_len)
    held_out: dict[str, AcceptanceSet] = {}
    if ranks.rank == 0:
        held_out = score_sets(job, recipe, ranks.device)
        if len(dev):
            held_out["dev"] = acceptance_set(dev, recipe, ranks.device)
    trainer = Trainer(
        program,
        arena,
        rows,
        recipe,
        ranks,
        directory=job.work_dir / RUN_DIR,
        raw_config=job.raw_config(),
        held_out=held_out,
    )
    if trainer.resume():
        logger.info("rank %d: continues at step %d", ranks.rank, trainer.step)
    return trainer.fit()


def evaluate(
    job: TrainJob, drafter_dir: Path, *, device: str, temperature: float, recipe: TrainRecipe
) -> dict[str, AcceptanceReport]:
    """Acceptance of a drafter on the held-out sets, in float32 throughout. Its head may be rows of the target's."""
    target = FrozenTarget.load(job.model_dir, num_positions=recipe.row_len, dtype=torch.float32, device=device)
    config: DrafterConfig = parse_drafter_config(drafter_dir, target.config)
    drafter = TrainableDrafter(config, num_positions=recipe.row_len + config.block_size, device=device)
    load_weights(drafter, drafter_dir, besides=HEAD_TENSORS)
    program = BlockProgram(
        target, drafter, backend="dense", compile_model=False, draft_ids=kept_ids(job.model_dir, drafter_dir)
    )
    sets = score_sets(job, recipe, device, temperature)
    with torch.no_grad():
        return {name: part.score(program) for name, part in sets.items()}
