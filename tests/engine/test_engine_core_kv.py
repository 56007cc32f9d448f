"""Blocks under pressure: preemption, fairness, prefix hits, lookahead at the limits. At both pipeline depths."""

import pytest

from engine.kv_cache.manager import KvCacheManager
from tests.engine.fake_runner import make_config
from tests.engine.host_harness import Harness


@pytest.fixture(params=[0, 1], ids=["depth0", "depth1"])
def depth(request):
    return request.param


# ---------------------------------------------------------------------------------------- preemption


def test_preemption_takes_the_latest_and_resumes_from_its_emitted_tokens(depth):
    config = make_config(pipeline_depth=depth, num_blocks=20, enable_prefix_caching=False)
    harness = Harness(config)
    for _ in range(3):
        harness.add([1] * 6, max_tokens=40, min_tokens=30, stop_token_ids=(3,))
    harness.run()
    assert harness.core.counters().preemptions > 0
    resumed = [
        (init, chunk)
        for plan in harness.runner.plans
        for init in plan.new_slots
        for chunk in plan.prefill
        if chunk.slot == init.slot and chunk.start == 0 and len(chunk.token_ids) > 6
    ]
    assert resumed
    assert all(init.prompt_len == 6 and init.min_len == 36 and init.max_len == 46 for init, _ in resumed)
    assert harness.core.counters().prompt_tokens == 18 < harness.core.counters().prefill_tokens
    harness.check_outcomes()
    harness.check_counters()
    harness.check_idle()


def test_the_oldest_is_never_preempted(depth):
    """Starvation-freedom: with room for little more than one, requests end in the order of their arrival."""
    config = make_config(pipeline_depth=depth, num_blocks=20, max_num_seqs=4)
    harness = Harness(config, accept=0.5)
    names = [harness.add([1 + i] * 10, max_tokens=40, ignore_eos=True) for i in range(6)]
    ends = []
    while harness.core.has_work():
        ends += [delta.request_id for delta in harness.step() if delta.finish_reason]
    assert ends[0] == names[0]
    assert sorted(ends) == sorted(names)
    first = {init.generation for plan in harness.runner.plans for init in plan.new_slots if init.seed == 1000}
    assert len(first) == 1
    harness.check_outcomes()
    harness.check_idle()


def test_rows_beyond_the_budget_take_turns(depth):
    """8 rows of K + 1 = 8 tokens, budget 16: two per step, and every row has its turn in each round of four."""
    config = make_config(pipeline_depth=depth, max_num_batched_tokens=16, max_num_seqs=8, num_blocks=200)
    harness = Harness(config, accept=0.0)
    for _ in range(8):
        harness.add([1], max_tokens=20, ignore_eos=True)
    for _ in range(13):
        harness.step()
    turns = [slot for plan in harness.runner.plans[1:] for slot in plan.decode_slots]
    assert len(turns) == 24
    assert all(turns.count(slot) == 3 for slot in range(8))
    harness.run()
    harness.check_outcomes()


def test_a_stream_of_short_requests_does_not_starve_a_long_prompt(depth):
    config = make_config(pipeline_depth=depth, max_num_seqs=2, max_num_batched_tokens=12, num_blocks=40)
    harness = Harness(config)
    harness.add([1], max_tokens=4)
    long = harness.add([2] * 50, max_tokens=4)
    for _ in range(120):
        if len(harness.requests) < 60:
            harness.add([3], max_tokens=3)
        harness.step()
        if harness.outcomes[long].finish_reason:
            break
    assert harness.outcomes[long].finish_reason
    assert harness.num_steps < 40
    harness.run()
    harness.check_outcomes()


@pytest.mark.parametrize("num_blocks", range(15, 31, 3))
def test_a_row_chosen_earlier_in_the_step_can_still_be_preempted(depth, num_blocks):
    """Rows take turns for the budget, so an older row may ask for blocks after a younger one was chosen."""
    config = make_config(
        pipeline_depth=depth, block_size=2, max_model_len=20, num_blocks=num_blocks, max_num_batched_tokens=16
    )
    for seed in range(8):
        harness = Harness(config, accept=0.5, seed=seed)
        for i in range(5):
            harness.add([i], max_tokens=18, ignore_eos=True)
        harness.run()
        harness.check_outcomes()
        harness.check_idle()


@pytest.mark.parametrize("low", [1, 2, 3])
def test_blocks_cover_the_longer_verify_still_in_flight_when_k_falls(low):
    """Everything accepted, K falling after some steps at 7: the unread step is then the longer one."""
    harness = Harness(make_config(pipeline_depth=1, block_size=1, num_blocks=300, max_model_len=240), accept=1.0)
    harness.add([1], max_tokens=230, ignore_eos=True)
    version = 0
    while harness.core.has_work():
        version += 1
        harness.core.apply_schedule((1, version), {1: low if version % 6 == 0 else 7})
        harness.step()
    harness.check_outcomes()


# ---------------------------------------------------------------------------------------- prefix cache


def test_prefix_hit_covers_all_full_blocks_but_the_last_tokens(depth):
    harness = Harness(make_config(pipeline_depth=depth))
    prompt = list(range(16))
    cases = [(prompt, 0), (prompt, 12), ([*prompt, 1], 16), (prompt[:15], 12), (prompt[:4], 0), ([9, *prompt[1:]], 0)]
    for tokens, cached in cases:
        name = harness.add(tokens, max_tokens=1)
        harness.run()
        assert harness.outcomes[name].num_cached_tokens == cached, tokens
    counters = harness.core.counters()
    assert counters.prefix_cache_queries == sum(len(tokens) for tokens, _ in cases)
    assert counters.prefix_cache_hits == sum(cached for _, cached in cases)
    assert counters.prefill_tokens == counters.prefix_cache_queries - counters.prefix_cache_hits


def test_output_is_cached_for_the_next_turn(depth):
    harness = Harness(make_config(pipeline_depth=depth))
    first = harness.add([1] * 6, max_tokens=20, ignore_eos=True)
    harness.run()
    conversation = [1] * 6 + harness.outcomes[first].token_ids
    # The runner's truth of the second request is its own prompt, so a hit with other content would be read as foreign.
    second = harness.add([*conversation, 2, 3], max_tokens=4)
    harness.run()
    assert harness.outcomes[second].num_cached_tokens == (6 + 20 - 1) // 4 * 4
    harness.check_outcomes()


def test_salts_and_the_switch_isolate(depth):
    harness = Harness(make_config(pipeline_depth=depth))
    cached = {}
    for name, salt in (("a1", "a"), ("b1", "b"), ("none", None), ("empty", ""), ("a2", "a")):
        harness.add([5] * 12, salt=salt, name=name, max_tokens=1)
        harness.run()
        cached[name] = harness.outcomes[name].num_cached_tokens
    assert cached == {"a1": 0, "b1": 0, "none": 0, "empty": 0, "a2": 8}
    off = Harness(make_config(pipeline_depth=depth, enable_prefix_caching=False))
    for _ in range(2):
        name = off.add([5] * 12, max_tokens=1)
        off.run()
        assert off.outcomes[name].num_cached_tokens == 0
    assert off.core.stats().cached_blocks == 0
    assert off.core.counters().prefix_cache_queries == 0


def test_reset_prefix_cache_forgets_also_what_running_requests_cached(depth):
    harness = Harness(make_config(pipeline_depth=depth))
    harness.add([5] * 12, max_tokens=30, ignore_eos=True)
    for _ in range(4):
        harness.step()
    harness.core.reset_prefix_cache()
    name = harness.add([5] * 12, max_tokens=1)
    harness.run()
    assert harness.outcomes[name].num_cached_tokens == 0
    harness.check_outcomes()
    harness.check_idle()


def test_concurrent_prefix_hits_with_drafts_never_write_shared_blocks(depth):
    """Where engines corrupt neighbours: no lookahead on the first prefill, writes into shared blocks."""
    config = make_config(pipeline_depth=depth, max_num_seqs=8, max_num_batched_tokens=200, num_blocks=120)
    harness = Harness(config, accept=0.7)
    for i in range(24):
        harness.add([4] * 21 + [i], max_tokens=20, ignore_eos=True)
        if i % 3 == 0:
            harness.step()
    harness.run()
    assert harness.core.counters().prefix_cache_hits >= 15 * 20
    harness.check_outcomes()
    harness.check_counters()
    harness.check_idle()


def test_evictions_are_counted_when_a_cached_block_goes_to_another_owner():
    harness = Harness(make_config(num_blocks=20, width=0))
    for token in range(8):
        harness.add([token] * 30, max_tokens=2, ignore_eos=True)
        harness.run()
    counted = harness.core.counters().prefix_cache_evictions
    assert counted == harness.core._kv.pool.num_evictions
    assert counted >= 8 * 7 - 19  # seven full blocks of four tokens each, nineteen places
    harness.core.reset_prefix_cache()
    assert harness.core.counters().prefix_cache_evictions == counted
    harness.check_idle()


# ---------------------------------------------------------------------------------------- limits


def test_lookahead_at_the_context_limit_stays_inside_the_rows_own_table(depth):
    """Page size 1, full context: 2 (K + 1) + W reserved slots neither leave the table nor reach a neighbour."""
    config = make_config(pipeline_depth=depth, block_size=1, max_model_len=24, num_blocks=120, width=16)
    harness = Harness(config, accept=1.0)
    for i in range(6):
        harness.add([i] * (18 + i), ignore_eos=True, max_tokens=None)
    harness.run()
    harness.check_outcomes()
    harness.check_idle()
    widest = max(u.first_index + len(u.block_ids) for plan in harness.runner.plans for u in plan.block_updates)
    assert widest == config.max_blocks_per_seq == 40


def test_a_drafter_that_stops_at_its_position_table_changes_nothing_else(depth):
    """Past the drafter's positions a row has no drafts (its draft_count is 0): plain decoding, same tokens."""
    harness = Harness(make_config(pipeline_depth=depth), accept=1.0)
    harness.runner.max_draft_position = 30
    names = [harness.add([1] * prompt_len, max_tokens=30, ignore_eos=True) for prompt_len in (2, 25)]
    harness.run()
    harness.check_outcomes()
    harness.check_counters()
    drafted = [sum(delta.num_drafted for delta in harness.outcomes[name].deltas) for name in names]
    assert drafted[0] > 0
    assert drafted[1] == 0


@pytest.mark.parametrize("max_num_seqs", [1, 3, 5, 7])
def test_odd_batch_limits(depth, max_num_seqs):
    config = make_config(pipeline_depth=depth, max_num_seqs=max_num_seqs, max_num_batched_tokens=300, num_blocks=300)
    harness = Harness(config)
    for _ in range(2 * max_num_seqs + 1):
        harness.add([1, 2, 3], max_tokens=12)
    harness.run()
    harness.check_outcomes()
    harness.check_counters()
    assert max(cell.batch_bucket for cell in harness.core.counters().cells) <= max_num_seqs


@pytest.mark.parametrize("chunk", [8, 11, 16, 64])
def test_chunked_prefill_sends_every_token_once_and_mixes_with_decode(depth, chunk):
    config = make_config(
        pipeline_depth=depth, max_num_batched_tokens=chunk, enable_prefix_caching=False, num_blocks=200
    )
    harness = Harness(config)
    harness.add([1], max_tokens=30, ignore_eos=True)
    harness.step()
    harness.add(list(range(45)), max_tokens=5)
    harness.run()
    chunks = [chunk for plan in harness.runner.plans[1:] for chunk in plan.prefill]
    assert [t for c in chunks for t in c.token_ids] == list(range(45))
    assert [c.samples for c in chunks] == [False] * (len(chunks) - 1) + [True]
    harness.check_outcomes()


def test_blocks_are_clipped_to_what_a_row_can_write():
    config = make_config(block_size=4, width=8)
    harness = Harness(config)
    harness.add([1] * 5, max_tokens=3, ignore_eos=True)
    harness.step()
    sequence = next(iter(harness.core._scheduler.running.values()))
    assert isinstance(harness.core._kv, KvCacheManager)
    assert len(sequence.block_ids) == -(-(5 + 3 + 8) // 4)
    harness.run()
