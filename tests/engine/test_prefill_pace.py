"""What prompts a step that decodes takes: by the inter-token target, on a device whose times are known, or in turns."""

import msgspec
import pytest

from engine.config.resolve import resolve_engine_config
from engine.prefill_pace import BACKLOG_TOKENS, LEAST_TOKENS, SEVERAL_TOKENS, PrefillPace, tokens_of_several
from tests.engine.fake_runner import FakeRunner, make_config
from tests.engine.host_harness import Harness

ROW_S, TOKEN_S = 0.002, 0.0001
SIZES = {"max_model_len": 2048, "max_num_batched_tokens": 2048, "num_blocks": 1500, "debug_checks": False}


class TimedRunner(FakeRunner):
    """A step takes 2 ms for each decode row and 0.1 ms for each prompt token."""

    def collect(self):
        plan, result = self.results[0]
        prompt_tokens = sum(len(chunk.token_ids) for chunk in plan.prefill)
        seconds = ROW_S * len(plan.decode_slots) + TOKEN_S * prompt_tokens
        self.results[0] = (plan, msgspec.structs.replace(result, duration_s=seconds))
        return super().collect()


def serve(depth, target_ms):
    """Three streams, then a prompt of 1,500 tokens. Returns (seconds, prompt tokens) of each step that decoded."""
    harness = Harness(make_config(pipeline_depth=depth, inter_token_target_ms=target_ms, **SIZES))
    harness.runner = TimedRunner(harness.config)
    harness.runner.check_reads = False
    harness.core._runner = harness.runner
    harness.runner.core = harness.core
    for _ in range(3):
        harness.add([1] * 20, max_tokens=300, ignore_eos=True)
    for _ in range(8):
        harness.step()
    first = len(harness.runner.plans)
    harness.add([2] * 1500, max_tokens=2, ignore_eos=True)
    harness.run()
    harness.check_outcomes()
    harness.check_idle()
    steps = []
    for plan in harness.runner.plans[first:]:
        prompt_tokens = sum(len(chunk.token_ids) for chunk in plan.prefill)
        if plan.decode_slots:
            steps.append((ROW_S * len(plan.decode_slots) + TOKEN_S * prompt_tokens, prompt_tokens))
    return steps


@pytest.mark.parametrize("depth", [0, 1])
def test_steps_with_a_prompt_keep_the_target_and_use_it(depth):
    steps = serve(depth, target_ms=20.0)
    assert max(seconds for seconds, _ in steps) <= 0.020 * 1.05
    mixed = [tokens for _, tokens in steps if tokens]
    assert sum(mixed) == 1500
    assert max(mixed) >= 0.9 * (0.020 - 3 * ROW_S) / TOKEN_S  # nor is it left unused


@pytest.mark.parametrize("depth", [0, 1])
def test_without_a_target_a_prompt_takes_the_whole_budget(depth):
    steps = serve(depth, target_ms=None)
    assert max(tokens for _, tokens in steps) == 1500


def arrive_together(depth, lengths, *, num_streams=3, target_ms=None):
    """Prompt tokens of each step with decode rows, by request, from the step on in which these prompts are there."""
    sizes = SIZES | {"max_num_seqs": num_streams + 16, "num_blocks": 8000}
    config = make_config(pipeline_depth=depth, inter_token_target_ms=target_ms, **sizes)
    harness = Harness(config)
    harness.runner.check_reads = False
    for _ in range(num_streams):
        harness.add([1] * 20, max_tokens=200, ignore_eos=True)
    for _ in range(4):
        harness.step()
    first = len(harness.runner.plans)
    for number, length in enumerate(lengths):
        harness.add([2 + number] * length, max_tokens=2, ignore_eos=True)
    harness.run()
    harness.check_outcomes()
    harness.check_idle()
    plans = [plan for plan in harness.runner.plans[first:] if plan.prefill]
    assert all(plan.decode_slots for plan in plans)
    return [[len(chunk.token_ids) for chunk in plan.prefill] for plan in plans]


@pytest.mark.parametrize("depth", [0, 1])
def test_short_prompts_that_arrive_together_take_turns(depth):
    # 48 - 3 rows of 8 tokens: 256 of the first and 104 of the second; then 48 - 4, as the first decodes.
    assert arrive_together(depth, [256, 256, 256]) == [[256, 104], [152, 200], [56]]
    assert arrive_together(depth, [100, 100, 100]) == [[100, 100, 100]]


@pytest.mark.parametrize("depth", [0, 1])
def test_a_long_prompt_is_whole_and_the_next_waits_for_it(depth):
    assert arrive_together(depth, [1100, 256, 150]) == [[1100], [256, 96], [54]]


def test_several_prompts_may_add_as_much_as_many_decode_rows():
    # 60 rows of 8 tokens; the 36 that would fill a program of 96 are too few.
    assert arrive_together(0, [250, 250, 250], num_streams=60) == [[250, 230], [20, 250]]


@pytest.mark.parametrize("depth", [0, 1])
def test_a_backlog_joins_as_far_as_the_budget_allows(depth):
    # All that three decode rows leave of 2,048 tokens; what is left then is a backlog no more.
    assert arrive_together(depth, [256] * 10) == [[256] * 7 + [232], [24, 256, 24], [232]]


def test_a_target_takes_the_place_of_turns():
    assert arrive_together(0, [30, 30, 30], target_ms=1000.0)[0] == [30, 30, LEAST_TOKENS - 60]


def test_tokens_of_several_prompts():
    assert tokens_of_several(32, 8, [256, 256], 8000) == SEVERAL_TOKENS == 384
    assert tokens_of_several(1, 8, [256, 256], 8000) == 47 * 8  # 48 rows in all
    assert tokens_of_several(40, 8, [256, 256], 8000) == 40 * 8  # 80
    assert tokens_of_several(124, 8, [256, 256], 8000) == 124 * 8
    assert tokens_of_several(16, 16, [256, 256], 8000) == 24 * 16  # 40
    assert tokens_of_several(128, 1, [256, 256], 8000) == 384
    assert tokens_of_several(32, 8, [256, 256], 100) == 100
    assert tokens_of_several(32, 8, [BACKLOG_TOKENS], 8000) == 384
    assert tokens_of_several(32, 8, [BACKLOG_TOKENS, 1], 8000) == 8000


def test_a_target_that_cannot_be_kept_still_lets_prompts_through():
    steps = serve(0, target_ms=1.0)
    mixed = [tokens for _, tokens in steps if tokens]
    assert sum(mixed) == 1500
    assert set(mixed[:-1]) == {LEAST_TOKENS}


def test_a_device_that_becomes_slower_is_followed():
    pace = PrefillPace(target_s=0.05)
    assert pace.tokens_beside(4, 7) == LEAST_TOKENS  # nothing is known
    for token_s in (0.0001, 0.0004):
        for _ in range(40):
            pace.observe(num_decode=4, verify_len=7, prompt_tokens=0, duration_s=0.01)
            pace.observe(num_decode=4, verify_len=7, prompt_tokens=100, duration_s=0.01 + 100 * token_s)
        assert pace.tokens_beside(4, 7) == pytest.approx(0.04 / token_s, rel=0.02)
    # A shape never seen counts as the slowest one seen, so the target is kept from its first step on.
    assert pace.tokens_beside(16, 15) == pace.tokens_beside(4, 7)


def test_prompt_tokens_that_get_dearer_do_not_break_the_target():
    """As far behind in a long prompt: each token costs more than the one before, and each prompt starts cheap again."""
    pace, target_s, steps = PrefillPace(target_s=0.04), 0.04, []
    pace.observe(num_decode=8, verify_len=15, prompt_tokens=0, duration_s=0.007)
    for number in range(6):
        done = 0
        while done < 4096:
            tokens = min(4096 - done, pace.tokens_beside(8, 15) if number else 4096)
            seconds = 0.007 * (number > 0) + tokens * 2e-5 * (1 + (done + tokens / 2) / 4096)
            pace.observe(num_decode=8 if number else 0, verify_len=15, prompt_tokens=tokens, duration_s=seconds)
            steps += [(tokens, seconds)] if number else []
            done += tokens
    assert max(seconds for _, seconds in steps) <= 1.1 * target_s
    assert max(tokens for tokens, _ in steps) > 800  # 0.033 s are 1,100 tokens on average


def mixed_steps(pace, num_steps, *, num_decode, decode_s, token_s=1e-5):
    """Seconds of steps that always have a prompt beside these rows."""
    times = []
    for _ in range(num_steps):
        tokens = min(pace.tokens_beside(num_decode, 15), 20_000)
        times.append(decode_s + tokens * token_s)
        pace.observe(num_decode=num_decode, verify_len=15, prompt_tokens=tokens, duration_s=times[-1])
    return times


def test_rows_that_never_ran_alone_keep_the_target():
    pace = PrefillPace(target_s=0.02)
    pace.observe(num_decode=0, verify_len=15, prompt_tokens=2000, duration_s=0.02)
    for _ in range(5):
        pace.observe(num_decode=32, verify_len=15, prompt_tokens=0, duration_s=0.017)
    assert max(mixed_steps(pace, 60, num_decode=4, decode_s=0.006)) <= 0.02


def test_more_rows_than_ever_ran_alone_do_not_leave_slivers():
    """A queue of prompts beside 40 rows: there is never a step without prompts to learn from."""
    pace = PrefillPace(target_s=0.022)
    pace.observe(num_decode=0, verify_len=15, prompt_tokens=256, duration_s=0.009)
    for _ in range(5):
        pace.observe(num_decode=16, verify_len=15, prompt_tokens=0, duration_s=0.007)
    times = mixed_steps(pace, 40, num_decode=40, decode_s=0.011, token_s=2.5e-5)
    assert max(times) <= 0.022
    assert min(times[1:]) >= 0.011 + 200 * 2.5e-5  # 440 tokens would reach the target


def test_rows_count_by_their_tokens():
    """Fewer tokens never take longer than more, whichever rows and drafts they are of."""
    pace = PrefillPace(target_s=0.03)
    pace.observe(num_decode=0, verify_len=7, prompt_tokens=1000, duration_s=0.01)
    pace.observe(num_decode=64, verify_len=7, prompt_tokens=0, duration_s=0.02)
    pace.observe(num_decode=8, verify_len=7, prompt_tokens=0, duration_s=0.005)
    assert pace.tokens_beside(4, 15) == pytest.approx(2500, abs=1)
    assert pace.tokens_beside(16, 15) == pace.tokens_beside(64, 7) == pytest.approx(1000, abs=1)


def test_a_program_that_is_too_large_is_tried_seldom():
    """Steps take what their program's size does, and the next size takes much more than the tokens beyond this one."""
    pace, late, sizes = PrefillPace(target_s=0.025), 0, []
    for number in range(600):
        tokens = min(pace.tokens_beside(40, 7), 512) if number % 3 else 0
        seconds = next(
            s for most, s in ((320, 0.010), (512, 0.013), (768, 0.018), (1024, 0.031)) if 320 + tokens <= most
        )
        pace.observe(num_decode=40, verify_len=7, prompt_tokens=tokens, duration_s=seconds)
        late += seconds > 0.025
        sizes.append(tokens)
    assert 1 <= late <= 5
    assert sum(size == 448 for size in sizes) > 300  # the program below it is filled


def test_one_slow_step_is_forgotten():
    pace = PrefillPace(target_s=0.02)
    pace.observe(num_decode=0, verify_len=15, prompt_tokens=2000, duration_s=0.02)
    pace.observe(num_decode=4, verify_len=15, prompt_tokens=0, duration_s=3.0)
    times = mixed_steps(pace, 60, num_decode=4, decode_s=0.006)
    assert max(times) <= 0.021
    assert times[-1] > 0.015


@pytest.mark.parametrize("value", [0.0, -1.0, float("inf"), float("nan")])
def test_a_target_that_is_none_is_refused(value):
    with pytest.raises(ValueError, match="inter_token_target_ms: must be a positive number of milliseconds"):
        resolve_engine_config(model="nowhere", inter_token_target_ms=value)
