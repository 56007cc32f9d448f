"""What a caller of EngineCore sees: refusals, ends, aborts, the pipeline, gauges. At both pipeline depths."""

import pytest

from engine.core import EngineCore
from engine.request import EngineRequest
from engine.sampling_params import SamplingParams
from tests.engine.fake_runner import EOS, draw_token, expected_output, make_config
from tests.engine.host_harness import Harness


@pytest.fixture(params=[0, 1], ids=["depth0", "depth1"])
def depth(request):
    return request.param


# ---------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ([], {}, "prompt_token_ids: the prompt is empty"),
        ([1, 50], {}, r"prompt_token_ids: ids must be in 0 \.\. 49"),
        ([-1], {}, r"prompt_token_ids: ids must be in 0 \.\. 49"),
        ([1] * 64, {}, "prompt_token_ids: 64 tokens leave no room .* at most 63 tokens"),
        (
            [1] * 60,
            {"max_tokens": 5},
            r"max_tokens: 60 prompt tokens \+ 5 exceed max_model_len = 64; .* at most 4 tokens",
        ),
        ([1] * 10, {"max_tokens": 31}, "need 13 blocks of 4, but the KV cache has 12; ask for at most 30 tokens"),
        ([1] * 45, {"max_tokens": 1}, "need 14 blocks of 4, but the KV cache has 12; shorten the prompt or enlarge"),
        ([1], {"n": 2}, "n: "),
        ([1], {"max_tokens": 0}, "max_tokens"),
    ],
)
def test_add_request_refuses(prompt, params, message):
    harness = Harness(make_config(num_blocks=13))
    with pytest.raises(ValueError, match=message):
        harness.add(prompt, **params)
    assert not harness.core.has_work()


def test_an_id_in_use_is_refused_and_free_again_after_the_end(depth):
    harness = Harness(make_config(pipeline_depth=depth))
    harness.add([1], name="x", max_tokens=2)
    request = EngineRequest(request_id="x", prompt_token_ids=(1,), params=SamplingParams())
    with pytest.raises(ValueError, match="request_id: 'x' is in use"):
        harness.core.add_request(request)
    harness.run()
    harness.core.add_request(request)
    harness.core.abort("x")


def test_a_budget_below_one_verify_is_refused():
    with pytest.raises(ValueError, match=r"max_num_batched_tokens: 7 .* = 8"):
        EngineCore(config=make_config(max_num_batched_tokens=7), runner=None)


def test_a_missing_seed_is_drawn_per_request():
    harness = Harness(make_config())
    for name in "ab":
        params = SamplingParams(max_tokens=2)
        harness.core.add_request(EngineRequest(request_id=name, prompt_token_ids=(1,), params=params))
    seeds = [seq.seed for seq in harness.core._scheduler.waiting]
    assert seeds[0] != seeds[1]
    assert all(0 <= seed < 2**63 for seed in seeds)


# ---------------------------------------------------------------------------------------- ends


def find_seed(wanted, *, position, before=()):
    """A seed whose first draw of `wanted` is at `position` and which draws none of `before` earlier."""
    for seed in range(100_000):
        draws = [draw_token(seed, p) for p in range(1, position + 1)]
        if draws[-1] == wanted and not set(draws[:-1]) & {wanted, *before}:
            return seed
    raise AssertionError


@pytest.mark.parametrize(
    ("token_id", "params", "stop_reason"),
    [
        (EOS, {}, None),
        (EOS, {"stop_token_ids": (EOS,)}, None),
        (EOS, {"stop_token_ids": (EOS,), "ignore_eos": True}, EOS),
        (9, {"stop_token_ids": (9, 11)}, 9),
    ],
)
@pytest.mark.parametrize("position", [1, 2, 5])
def test_stop_inside_a_block(depth, token_id, params, stop_reason, position):
    harness = Harness(make_config(pipeline_depth=depth), accept=1.0)
    seed = find_seed(token_id, position=position, before=(EOS, 9, 11))
    name = harness.add([1], seed=seed, max_tokens=40, **params)
    harness.run()
    outcome = harness.outcomes[name]
    assert outcome.finish_reason == "stop"
    assert outcome.stop_reason == stop_reason
    assert len(outcome.token_ids) == position
    assert outcome.token_ids[-1] == token_id
    harness.check_outcomes()
    harness.check_counters()
    if position == 5:  # prefill draws position 1, one verify draws 2 .. 5 and is cut
        delta = outcome.deltas[-1]
        assert (delta.num_drafted, delta.num_accepted, delta.is_decode_step) == (4, 4, True)


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 8, 9, 10, 17, 63])
def test_length_is_exact_to_the_token(depth, max_tokens):
    """The block reaches past the limit; the row's own k is clipped and nothing is written outside its blocks."""
    harness = Harness(make_config(pipeline_depth=depth), accept=1.0)
    name = harness.add([1], max_tokens=max_tokens, ignore_eos=True)
    harness.run()
    assert harness.outcomes[name].finish_reason == "length"
    assert len(harness.outcomes[name].token_ids) == max_tokens
    harness.check_outcomes()
    harness.check_idle()


def test_no_step_is_launched_for_rows_that_surely_ended():
    harness = Harness(make_config(pipeline_depth=1, width=0))
    harness.add([1], max_tokens=5, ignore_eos=True)
    harness.run()
    assert len(harness.runner.plans) == 5


# ---------------------------------------------------------------------------------------- aborts


@pytest.mark.parametrize("num_steps", range(12))
def test_abort_at_any_time_gives_one_delta_and_leaks_nothing(depth, num_steps):
    config = make_config(pipeline_depth=depth, max_num_seqs=2, max_num_batched_tokens=12, num_blocks=40)
    harness = Harness(config, accept=0.5)
    names = [harness.add([1] * 30, max_tokens=30, ignore_eos=True) for _ in range(4)]  # prefilled in chunks, two wait
    for _ in range(num_steps):
        harness.step()
    harness.core.abort("never seen")
    for name in names[::2]:
        harness.core.abort(name)
        harness.core.abort(name)
    assert harness.core.has_work()
    harness.run()
    for name in names[::2]:
        assert [delta.finish_reason for delta in harness.outcomes[name].deltas][-1:] == ["abort"]
    assert harness.core.counters().finished["abort"] == 2
    harness.check_outcomes()
    harness.check_counters()
    harness.check_idle()


def test_abort_of_everything_still_hands_out_its_deltas(depth):
    harness = Harness(make_config(pipeline_depth=depth))
    name = harness.add([1], max_tokens=9)
    harness.core.abort(name)
    assert harness.core.has_work()
    assert [delta.finish_reason for delta in harness.step()] == ["abort"]
    assert not harness.core.has_work()


# ---------------------------------------------------------------------------------------- pipeline


def test_depth_one_launches_before_it_reads():
    harness = Harness(make_config(pipeline_depth=1))
    harness.add([1], max_tokens=5, ignore_eos=True)
    assert harness.step() == []
    assert len(harness.runner.results) == 1
    assert len(harness.step()) == 1
    assert len(harness.runner.results) == 1
    assert harness.core.stats().num_in_flight == 1


def test_a_slot_is_reused_only_after_its_last_step_in_flight():
    harness = Harness(make_config(pipeline_depth=1, max_num_seqs=1))
    first = harness.add([1], max_tokens=30, ignore_eos=True)
    harness.add([2], max_tokens=3, ignore_eos=True)
    harness.step()
    harness.step()
    harness.core.abort(first)
    assert harness.core.stats().free_blocks == harness.core.stats().total_blocks  # its blocks are back at once
    plans = len(harness.runner.plans)
    harness.step()
    assert len(harness.runner.plans) == plans  # the only slot is still named by a step in flight
    harness.run()
    harness.check_outcomes()
    harness.check_idle()


def test_integrity_check_drains_and_loses_no_delta():
    harness = Harness(make_config(pipeline_depth=1))
    harness.add([1], max_tokens=20, ignore_eos=True)
    for _ in range(200):
        if not harness.core.has_work():
            break
        harness.step()
        harness.core.check_integrity()
        assert harness.core.stats().num_in_flight == 0
    harness.check_outcomes()


def test_a_foreign_result_is_caught(depth):
    harness = Harness(make_config(pipeline_depth=depth))
    harness.add([1], max_tokens=20, ignore_eos=True)
    harness.runner.collect = lambda: harness.runner.results.popleft()[1].__class__(step_id=77, rows=(), duration_s=0.0)
    with pytest.raises(AssertionError, match="expected step 0, got 77"):
        harness.run()


def test_leaks_are_found(depth):
    harness = Harness(make_config(pipeline_depth=depth))
    harness.add([1] * 9, max_tokens=20, ignore_eos=True)
    harness.step()
    harness.core._kv.pool.allocate(1)
    with pytest.raises(RuntimeError, match="1 references, 0 owners"):
        harness.core.check_integrity()
    harness.core._scheduler._free_slots.pop()
    with pytest.raises(RuntimeError, match="slots in use"):
        harness.core.check_integrity()


def test_stats_are_gauges_of_the_moment():
    harness = Harness(make_config(max_num_seqs=2))
    for _ in range(3):
        harness.add([1] * 9, max_tokens=20, ignore_eos=True)
    harness.step()
    stats = harness.core.stats()
    assert (stats.num_running, stats.num_waiting, stats.draft_len, stats.total_blocks) == (2, 1, 7, 99)
    owned = stats.total_blocks - stats.free_blocks - stats.cached_blocks
    assert stats.kv_usage == pytest.approx(owned / 99)
    assert not stats.speculation_disabled
    harness.run()
    assert harness.core.stats().kv_usage == 0.0


def test_broadcast_precedes_the_launch():
    order = []
    config = make_config()
    harness = Harness(config)
    launch = harness.runner.launch
    harness.runner.launch = lambda plan: (order.append(("launch", plan.step_id)), launch(plan))
    harness.core._broadcast = lambda plan: order.append(("broadcast", plan.step_id))
    harness.add([1], max_tokens=3)
    harness.run()
    assert order[:4] == [("broadcast", 0), ("launch", 0), ("broadcast", 1), ("launch", 1)]


def test_expected_output_is_itself_deterministic():
    request = EngineRequest(request_id="x", prompt_token_ids=(1,), params=SamplingParams(seed=3, max_tokens=20))
    assert expected_output(request, max_model_len=64) == expected_output(request, max_model_len=64)
