"""Laws: training's forward equals the reference drafter; a toy overfits; its checkpoint drafts the same in the engine;
acceptance equals the loop that verifies step by step; a resumed run equals an uninterrupted one."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from engine.config.drafter import parse_drafter_config
from engine.training.acceptance import AcceptanceSet, walk
from engine.training.checkpoint import DRAFTER_DIR, drafter_config, load_weights, save_drafter, spread_taps
from engine.training.corpus import Corpus, PackedRows, pack
from engine.training.drafter import TrainableDrafter
from engine.training.optimizer import ParameterArena
from engine.training.program import BlockProgram, blocks_at, random_anchors, teacher_states
from engine.training.ranks import Ranks
from engine.training.recipe import TrainRecipe
from engine.training.target import FrozenTarget
from engine.training.trainer import Trainer
from tests.reference.dflash_loop import ReferenceDrafter, dflash_generate, run_target
from tests.reference.paged import PagedModels, Piece, engine_config
from tests.reference.toy import make_target

PROMPTS = [[17, 4, 90, 33, 21], [56, 3, 8], [5, 99, 100, 7, 7, 40, 12]]
ROW = 128
RECIPE: dict[str, Any] = {
    "row_len": ROW,
    "rows_per_step": 1,
    "anchors_per_row": 24,
    "learning_rate": 1e-2,
    "warmup_steps": 4,
    "acceptance_share": 0.0,
    "backend": "dense",
    "compile_model": False,
}


class Toy:
    def __init__(self, directory: Path) -> None:
        torch.set_num_threads(1)
        self.dir = directory / "target"
        self.model: nn.Module = make_target(self.dir, "llama")
        self.target = FrozenTarget.load(self.dir, num_positions=256, dtype=torch.float32, device="cpu")
        self.raw = drafter_config(
            self.target.config, num_layers=2, block_size=8, mask_token_id=3, target_layer_ids=(0, 2, 3)
        )
        with torch.no_grad():
            texts = [
                self.model.generate(
                    torch.tensor([p]), max_new_tokens=30, do_sample=False, eos_token_id=None, pad_token_id=0
                )[0].tolist()
                for p in PROMPTS
            ]
        self.corpus = Corpus.of([(text, len(p), 0.0) for text, p in zip(texts, PROMPTS, strict=True)])
        self.rows: PackedRows = pack(self.corpus, row_len=ROW, seed=0)

    def program(self, init: str = "random") -> tuple[BlockProgram, ParameterArena]:
        config = parse_drafter_config(self.raw, self.target.config)
        drafter = TrainableDrafter(config, num_positions=256, device="cpu")
        if init == "target":
            drafter.start_from_target(self.target, seed=0)
        else:
            drafter.randomise(0)
        arena = ParameterArena(drafter)
        return BlockProgram(self.target, drafter, backend="dense", compile_model=False), arena

    def trainer(self, directory: Path, **recipe: Any) -> Trainer:
        program, arena = self.program()
        return Trainer(
            program,
            arena,
            self.rows,
            TrainRecipe(**RECIPE | recipe),
            Ranks(rank=0, size=1, device="cpu"),
            directory=directory,
            raw_config=self.raw,
            held_out={},
        )


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Toy:
    return Toy(tmp_path_factory.mktemp("toy"))


@pytest.fixture(scope="module")
def trained(toy: Toy, tmp_path_factory: pytest.TempPathFactory) -> Trainer:
    trainer = toy.trainer(tmp_path_factory.mktemp("run"), steps=150)
    trainer.fit()
    return trainer


@torch.no_grad()
def test_forward_equals_reference_drafter(toy: Toy, tmp_path: Path) -> None:
    """Every block of a packed batch, against the plain drafter given one document and one anchor."""
    program, _ = toy.program("target")
    save_drafter(program.drafter, toy.raw, tmp_path / "d")
    load_weights(program.drafter, tmp_path / "d")  # bfloat16, as the reference reads them
    reference = ReferenceDrafter(tmp_path / "d")
    anchors, used = random_anchors(toy.rows, 20, torch.Generator().manual_seed(0))
    hidden = program.hidden(toy.rows, program.taps(toy.rows), anchors)
    blocks = blocks_at(toy.rows, anchors, used, 8)
    embed = toy.model.get_input_embeddings()
    for row, column in ((0, 0), (0, 7), (0, 19)):
        at = int(anchors[row, column])
        start, end = int(toy.rows.doc_start_NS[row, at]), int(toy.rows.doc_end_NS[row, at])
        text = toy.rows.tokens_NS[row, start:end].tolist()
        taps = run_target(toy.model, text, reference.target_layer_ids)[1]
        block = embed(torch.tensor([text[at - start], *[3] * 7]))
        want = reference.block(block, reference.context(taps[: at - start]), at - start)
        assert (hidden[row, column] - want).abs().max() < 1e-4 * want.abs().max()
        labels = [t for t, ok in zip(blocks.label_RAJ[row, column], blocks.valid_RAJ[row, column], strict=True) if ok]
        assert [int(t) for t in labels] == text[at - start + 1 : at - start + 8]


def test_overfits_and_drafts_the_same_in_the_engine(toy: Toy, trained: Trainer) -> None:
    log = [json.loads(line) for line in (trained.directory / "log.jsonl").read_text().splitlines()]
    losses = [entry["loss"] for entry in log if "loss" in entry]
    assert losses[-1] < 0.2 * losses[0]

    directory = trained.directory / DRAFTER_DIR
    program = trained.program
    load_weights(program.drafter, directory)
    assert len(list(directory.iterdir())) == 2
    engine = PagedModels.load(engine_config(toy.dir, directory), num_seqs=1)
    text = toy.corpus.document(0).tolist()
    anchor = len(PROMPTS[0]) + 2
    with torch.no_grad():
        engine.forward([[Piece(seq=0, start=0, ids=text[:anchor])]])
        drafted = engine.draft_hidden({0: (anchor, text[anchor])})[0] @ program.target.head.T
        rows = pack(toy.corpus.subset([0]), row_len=ROW, seed=0)
        hidden = program.hidden(rows, program.taps(rows), torch.tensor([[anchor]]))
    mine = (hidden[0, 0, 1:] @ program.target.head.T).argmax(-1)
    assert torch.equal(drafted[1:].argmax(-1), mine)
    assert mine[:3].tolist() == text[anchor + 1 : anchor + 4]


def test_acceptance_equals_the_verifying_loop(toy: Toy, trained: Trainer) -> None:
    reference = ReferenceDrafter(trained.directory / DRAFTER_DIR)
    load_weights(trained.program.drafter, trained.directory / DRAFTER_DIR)
    held = AcceptanceSet(toy.corpus, row_len=ROW, rows_per_pass=1, anchors_per_row=7, device="cpu")
    with torch.no_grad():
        report = held.score(trained.program)
    tokens = steps = 0
    for prompt in PROMPTS:
        result = dflash_generate(toy.model, reference, prompt, max_new_tokens=30, draft_len=7)
        tokens += 29  # the first of 30 comes from prefill, not from a step
        steps += len(result.accepted)
    assert (report.tokens, report.steps) == (tokens, steps)
    assert report.acceptance_length > 2.0


def test_the_teacher_of_a_slot_is_the_state_that_predicts_it(toy: Toy) -> None:
    program, _ = toy.program()
    states, taps = program.taught(toy.rows)
    assert torch.equal(taps, program.taps(toy.rows))
    anchors, used = random_anchors(toy.rows, 20, torch.Generator().manual_seed(0))
    blocks = blocks_at(toy.rows, anchors, used, 5)
    for row in range(anchors.shape[0]):
        taught = (teacher_states(states[row], anchors[row], 5) @ program.target.head.T).argmax(-1)
        valid = blocks.valid_RAJ[row]
        assert torch.equal(taught[valid], blocks.label_RAJ[row][valid])  # the corpus is greedy


def test_soft_labels_and_short_blocks_fit_too(toy: Toy, tmp_path: Path) -> None:
    trainer = toy.trainer(tmp_path, steps=60, distill_share=0.5, short_block_share=0.25, short_block_size=4)
    widths = []
    for _ in range(8):
        widths.append(trainer._block_width())
        trainer.train_step()
    assert widths == [8, 8, 8, 4, 8, 8, 8, 4]
    held = AcceptanceSet(toy.corpus, row_len=ROW, rows_per_pass=1, anchors_per_row=7, device="cpu")
    with torch.no_grad():
        before = held.score(trainer.program, 4)
    trainer.fit()
    with torch.no_grad():
        after = held.score(trainer.program, 4)
    assert len(after.survival) == 3
    assert after.acceptance_length > before.acceptance_length + 0.3
    with pytest.raises(ValueError, match="short_block_size=9 is above the drafter's block size, 8"):
        toy.trainer(tmp_path, steps=1, short_block_share=0.5, short_block_size=9)


def test_walk() -> None:
    """Three drafts a step: two right, then all three, then none, then what is left before the end."""
    tokens, steps, reached, accepted = walk([2, 0, 0, 3, 0, 0, 0, 0, 3, 1], slots=3)
    assert (tokens, steps) == (10, 4)
    assert reached == [4, 3, 2]
    assert accepted == [3, 3, 1]


def test_resume_equals_uninterrupted(toy: Toy, tmp_path: Path) -> None:
    whole = toy.trainer(tmp_path / "whole", steps=12)
    whole.fit()
    first = toy.trainer(tmp_path / "parts", steps=12)
    for _ in range(5):
        first.train_step()
    first.save(1.0)
    second = toy.trainer(tmp_path / "parts", steps=12)
    assert second.resume()
    assert second.step == 5
    second.fit()
    assert torch.equal(whole.arena.weights, second.arena.weights)
    other = toy.trainer(tmp_path / "parts", steps=12, optimizer="adamw")
    with pytest.raises(ValueError, match="written by optimizer 'muon'"):
        other.resume()


def test_shapes_are_checked(toy: Toy) -> None:
    assert spread_taps(30, 5) == (1, 8, 14, 20, 27)
    assert spread_taps(36, 5) == (1, 9, 17, 25, 33)
    with pytest.raises(ValueError, match="do not fit a target of 5 layers"):
        spread_taps(5, 5)
    with pytest.raises(ValueError, match="give steps or minutes"):
        TrainRecipe(steps=1, minutes=1.0)
    with pytest.raises(ValueError, match="lower rows_per_step"):
        toy.trainer(Path("unused"), steps=1, rows_per_step=50)
