"""The training loop: steps, log, scores, checkpoints, resume.

Every random choice of a step follows from (seed, step, rank) alone, so a resumed run repeats an uninterrupted one.
"""

import json
import time
from pathlib import Path
from typing import Any, TextIO

import torch
from torch import Tensor

from engine.training.acceptance import AcceptanceSet
from engine.training.checkpoint import DRAFTER_DIR, load_state, save_drafter, save_state
from engine.training.corpus import PackedRows
from engine.training.loss import learning_rate, position_weights
from engine.training.optimizer import Optimizer, ParameterArena
from engine.training.program import BlockProgram, blocks_at, random_anchors, teacher_states
from engine.training.ranks import Ranks
from engine.training.recipe import TrainRecipe

_TIMED_FROM, _TIMED_TO = 20, 60  # steps whose speed turns minutes into a number of steps; the first ones compile
_SUMS = ("loss", "weight", "hits", "first_hits", "blocks", "gradient_norm")


class Trainer:
    """Fits the program's drafter to packed rows.

    arena must have been made of the drafter before anything compiled it. directory: rank 0 writes state, drafter, log.
    held_out: scored by rank 0 every `score_every` steps and at the end.
    """

    def __init__(
        self,
        program: BlockProgram,
        arena: ParameterArena,
        rows: PackedRows,
        recipe: TrainRecipe,
        ranks: Ranks,
        *,
        directory: Path,
        raw_config: dict[str, Any],
        held_out: dict[str, AcceptanceSet],
    ) -> None:
        if len(rows) < recipe.rows_per_step * ranks.size:
            raise ValueError(
                f"{len(rows)} rows of {recipe.row_len} tokens are fewer than the {recipe.rows_per_step * ranks.size} "
                "of a step; generate more responses or lower rows_per_step."
            )
        self.program, self.arena, self.rows, self.recipe, self.ranks = program, arena, rows, recipe, ranks
        self.directory, self.raw_config, self.held_out = directory, raw_config, held_out
        self.optimizer = Optimizer(arena, kind=recipe.optimizer, weight_decay=recipe.weight_decay)
        if recipe.short_block_share and recipe.short_block_size > program.block_size:
            raise ValueError(
                f"short_block_size={recipe.short_block_size} is above the drafter's block size, {program.block_size}."
            )
        self.decay_J = position_weights(program.block_size - 1, recipe.gamma, ranks.device)
        widths = (program.block_size, recipe.short_block_size)
        self._decay_sums = {width: float(self.decay_J[: width - 1].sum()) for width in widths}
        self.step, self.total_steps, self.seconds_before = 0, recipe.steps, 0.0
        self._sums = torch.zeros(len(_SUMS), device=ranks.device)
        directory.mkdir(parents=True, exist_ok=True)

    def resume(self) -> bool:
        """Continues from the directory's state, if there is one.

        Raises:
            ValueError: the state's drafter or optimiser has another shape.
        """
        state = load_state(self.directory, self.ranks.device)
        if state is None:
            return False
        if state["weights"].shape != self.arena.weights.shape:
            raise ValueError(f"{self.directory}: the saved state belongs to a drafter of another shape.")
        with torch.no_grad():
            self.arena.weights.copy_(state["weights"])
        self.optimizer.load_state(state["optimizer"])
        self.step, self.seconds_before = state["step"], state["seconds"]
        if self.recipe.steps is None:
            self.total_steps = state["total_steps"]
        return True

    def fit(self) -> dict[str, float]:
        """Trains to the end; returns the final acceptance length of every held-out set."""
        recipe, began = self.recipe, time.monotonic()
        timed = logged = saved = began
        logged_step, scores = self.step, dict[str, float]()
        first_step = self.step
        with self._open_log() as log:
            while self.total_steps is None or self.step < self.total_steps:
                self.train_step()
                ran = self.step - first_step
                if self.total_steps is None and ran in (_TIMED_FROM, _TIMED_TO):
                    self._synchronise()
                    if ran == _TIMED_FROM:
                        timed = time.monotonic()
                    else:
                        self._plan(began, timed)
                if self.step % recipe.log_every == 0:
                    record = self._read_sums(time.monotonic() - logged, self.step - logged_step)
                    logged, logged_step = time.monotonic(), self.step
                    self._write(log, record | {"seconds": round(self.seconds_before + logged - began, 1)})
                if self.step % recipe.score_every == 0 and self.step != self.total_steps:
                    self._write(log, {"step": self.step, "acceptance_length": self.scores()})
                    logged = time.monotonic()
                if self.ranks.rank == 0 and time.monotonic() - saved > recipe.save_seconds:
                    self.save(self.seconds_before + time.monotonic() - began)
                    saved = time.monotonic()
            scores = self.scores()
            self._write(log, {"step": self.step, "acceptance_length": scores})
        if self.ranks.rank == 0:
            self.save(self.seconds_before + time.monotonic() - began)
        self.ranks.barrier()
        return scores

    def train_step(self) -> None:
        """One optimiser step."""
        recipe, ranks, program = self.recipe, self.ranks, self.program
        rows = self.rows.rows(self._row_index())
        generator = torch.Generator(ranks.device).manual_seed(
            (recipe.seed * 1_000_003 + self.step) * 64 + ranks.rank  # distinct while there are at most 64 ranks
        )
        anchors, used = random_anchors(rows, recipe.anchors_per_row, generator)
        width = self._block_width()
        blocks = blocks_at(rows, anchors, used, width)
        states, taps = program.taught(rows) if recipe.distill_share else (None, program.taps(rows))
        hidden = program.hidden(rows, taps, anchors, width)[:, :, 1:]
        leaf = hidden.detach()
        gradient = torch.empty_like(leaf)
        decay_J = self.decay_J[: width - 1]
        scale = 1.0 / (used.numel() * self._decay_sums[width])
        sums = self._sums
        for row in range(leaf.shape[0]):
            out = program.loss(
                leaf[row],
                program.target.head,
                blocks.label_RAJ[row],
                blocks.valid_RAJ[row],
                decay_J,
                recipe.acceptance_share,
                None if states is None else teacher_states(states[row], anchors[row], width),
                recipe.distill_share,
            )
            gradient[row] = out.grad_AJH * scale
            sums[0] += (out.nll_AJ * out.weight_AJ).sum()
            sums[1] += out.weight_AJ.sum()
            sums[2] += out.hit_AJ.long().cumprod(-1).sum()
            sums[3] += out.hit_AJ[:, 0].sum()
        sums[4] += used.sum()
        hidden.backward(gradient)
        ranks.mean_(self.arena.gradients)
        sums[5] += self.optimizer.clip(recipe.clip_norm)
        rate = learning_rate(
            self.step, peak=recipe.learning_rate, warmup_steps=recipe.warmup_steps, total_steps=self.total_steps
        )
        self.optimizer.step(rate)
        self.step += 1

    def _block_width(self) -> int:
        """W of this step, equal on all ranks: short blocks are spread evenly over the steps."""
        share = self.recipe.short_block_share
        is_short = int((self.step + 1) * share) > int(self.step * share)
        return self.recipe.short_block_size if is_short else self.program.block_size

    def scores(self) -> dict[str, float]:
        """Acceptance length of every held-out set; rank 0's, {} on others."""
        if self.ranks.rank:
            return {}
        return {name: round(part.score(self.program).acceptance_length, 4) for name, part in self.held_out.items()}

    def save(self, seconds: float) -> None:
        """State and drafter."""
        state = {
            "step": self.step,
            "total_steps": self.total_steps,
            "seconds": seconds,
            "weights": self.arena.weights,
            "optimizer": self.optimizer.state(),
            "recipe": self.recipe.as_dict(),
        }
        save_state(state, self.directory)
        save_drafter(self.program.drafter, self.raw_config, self.directory / DRAFTER_DIR)

    def _row_index(self) -> Tensor:
        """This rank's rows of the step: every epoch is a permutation of all rows, cut into steps."""
        recipe, ranks = self.recipe, self.ranks
        per_step = recipe.rows_per_step * ranks.size
        steps_per_epoch = len(self.rows) // per_step
        epoch, at = divmod(self.step, steps_per_epoch)
        if getattr(self, "_epoch", None) != epoch:
            self._epoch = epoch
            generator = torch.Generator().manual_seed(recipe.seed * 7919 + epoch)
            self._order = torch.randperm(len(self.rows), generator=generator).to(ranks.device)
        first = at * per_step + ranks.rank * recipe.rows_per_step
        return self._order[first : first + recipe.rows_per_step]

    def _plan(self, began: float, timed: float) -> None:
        """Fixes the number of steps from the speed seen; all ranks take rank 0's."""
        assert self.recipe.minutes is not None
        now = time.monotonic()
        per_step = (now - timed) / (_TIMED_TO - _TIMED_FROM)
        left = self.recipe.minutes * 60.0 - (now - began)
        self.total_steps = int(self.ranks.from_first(float(self.step + max(1, int(left / per_step)))))

    def _read_sums(self, seconds: float, steps: int) -> dict[str, Any]:
        """The log record of the steps since the last; waits for the device."""
        loss, weight, hits, first_hits, blocks, norm = self._sums.tolist()
        self._sums.zero_()
        block_tokens = steps * self.recipe.rows_per_step * self.recipe.anchors_per_row * self.program.block_size
        rate = learning_rate(
            self.step,
            peak=self.recipe.learning_rate,
            warmup_steps=self.recipe.warmup_steps,
            total_steps=self.total_steps,
        )
        return {
            "step": self.step,
            "total_steps": self.total_steps,
            "loss": round(loss / max(weight, 1e-9), 4),
            "accepted_per_anchor": round(hits / max(blocks, 1.0), 4),
            "first_right": round(first_hits / max(blocks, 1.0), 4),
            "gradient_norm": round(norm / max(steps, 1), 4),
            "learning_rate": rate,
            "block_tokens_per_s": round(block_tokens * self.ranks.size / max(seconds, 1e-9)),
        }

    def _synchronise(self) -> None:
        if self.ranks.device.startswith("cuda"):
            torch.cuda.synchronize()

    def _open_log(self) -> TextIO:
        name = "log.jsonl" if self.ranks.rank == 0 else f"log-rank{self.ranks.rank}.jsonl"
        return (self.directory / name).open("a", encoding="utf-8")

    @staticmethod
    def _write(log: TextIO, record: dict[str, Any]) -> None:
        log.write(json.dumps(record) + "\n")
        log.flush()
