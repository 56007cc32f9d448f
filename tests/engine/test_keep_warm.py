"""A phase without drafts costs nothing later: the drafter's context is written in every step, whatever K is.

Drafts depend on the context alone, so an engine that kept it proposes, at every position, what it would have proposed
without the phase; acceptance there is the same, not just within a few percent.
"""

from pathlib import Path

import pytest

from engine import LLM, DFlashDecodingConfig, SamplingParams
from engine.request import EngineRequest
from tests.engine.drafting import after_drafts
from tests.toy import make_drafter, make_target

PROMPTS = [[17, 4, 90, 33, 21, 56, 3, 200, 11, 62], [9, 8, 7, 6, 5, 4, 90, 33, 2, 77, 15], [120, 31, 8, 99, 4, 61, 7]]
PAUSE = range(6, 46)  # steps at K = 0
MAX_TOKENS = 110


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("warm")
    target = make_target(root / "target")
    return target, make_drafter(root / "drafter", target, head_dim=8)


class Run:
    """Decodes the prompts; during the pause the schedule says 0, and in its middle a known prompt comes again.

    drafts: (request, tokens it had) -> the block proposed there. late: those proposed after the pause.
    forget: nobody writes the drafter's context in the pause, as in an engine that skips the drafter altogether.
    """

    def __init__(
        self, models: tuple[Path, Path], *, pause: bool, forget: bool = False, checks: bool = True, **options: int
    ) -> None:
        spec = DFlashDecodingConfig(max_draft_len=7, speculative_model=str(models[1]))
        settings = {"dtype": "float32", "max_model_len": 144, "max_num_seqs": 4, "block_size": 4, "threads": 1}
        settings |= {"num_blocks": 400} | options
        with LLM(str(models[0]), speculative_config=spec, debug_checks=checks, **settings) as llm:
            self.drafts: dict[tuple[int, int], list[int]] = {}
            self.late: set[tuple[int, int]] = set()
            self.tokens: dict[int, list[int]] = {index: [] for index in range(4)}
            self.preemptions = self.hits = 0
            core, program, state = llm.core, llm._rank.runner._draft_program, llm._rank.runner.state
            real_write = program.write_context
            step = 0

            def record(slots_S, draft_len) -> None:  # type: ignore[no-untyped-def]
                for slot in slots_S.tolist():
                    key = state.init_of(slot).seed, int(state.committed_len[slot])
                    count = int(state.draft_count[slot])
                    if count:
                        self.drafts[key] = state.draft_tokens[slot, :count].tolist()
                        if step >= PAUSE.stop:
                            self.late.add(key)

            after_drafts(llm, record)
            for index, prompt in enumerate(PROMPTS):
                self._add(llm, index, prompt)
            before = core.counters()
            while core.has_work():
                if pause and step == PAUSE.start:
                    before = core.counters()
                    core.apply_schedule((1, 1), {4: 0})
                    program.write_context = (lambda *_, **__: None) if forget else real_write
                if pause and step == PAUSE.start + len(PAUSE) // 2:
                    self._add(llm, 3, PROMPTS[0])
                if pause and step == PAUSE.stop:
                    after = core.counters()
                    self.preemptions = after.preemptions - before.preemptions
                    self.hits = after.prefix_cache_hits - before.prefix_cache_hits
                    core.apply_schedule((1, 2), {4: 7})
                    program.write_context = real_write
                for delta in core.step():
                    self.tokens[int(delta.request_id)] += delta.token_ids
                step += 1

    @staticmethod
    def _add(llm: LLM, index: int, prompt: list[int]) -> None:
        params = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True, seed=index)
        request = EngineRequest(request_id=str(index), prompt_token_ids=tuple(prompt), params=params)
        llm.core.add_request(request)


@pytest.mark.parametrize("checks", [False, True])
@pytest.mark.parametrize("depth", [0, 1])
def test_forty_steps_without_drafts_change_no_later_draft(models: tuple[Path, Path], depth: int, checks: bool) -> None:
    """With a preemption and a prefix hit in the pause. Without checks a CPU writes the context of several steps at
    once."""
    usual = Run(models, pause=False, checks=checks)
    paused = Run(models, pause=True, num_blocks=50, pipeline_depth=depth, checks=checks)
    assert paused.preemptions > 0 and paused.hits > 0
    assert [paused.tokens[i] for i in range(3)] == [usual.tokens[i] for i in range(3)]
    assert paused.tokens[3] == usual.tokens[0]
    common = [key for key in paused.late if key in usual.drafts]
    assert len(common) > 100 and {request for request, _ in common} == {0, 1, 2}
    assert all(paused.drafts[key] == usual.drafts[key] for key in common)
    again = [(length, paused.drafts[3, length]) for request, length in paused.late if request == 3]
    assert again and all(usual.drafts.get((0, length), block) == block for length, block in again)


def test_an_engine_that_forgets_would_be_seen(models: tuple[Path, Path]) -> None:
    usual, forgetful = Run(models, pause=False), Run(models, pause=True, forget=True)
    common = [key for key in forgetful.late if key in usual.drafts and key[0] != 3]
    same = sum(forgetful.drafts[key] == usual.drafts[key] for key in common)
    assert same < 0.9 * len(common)
    assert [forgetful.tokens[i] for i in range(3)] == [usual.tokens[i] for i in range(3)]
