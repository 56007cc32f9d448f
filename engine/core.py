"""`EngineCore`: the loop body of an engine. Requests in, one plan per step to the runner, token deltas out.

Owns the host side of every request from arrival to its last delta. Knows no torch, no text and no transport. It is not
thread-safe: every method is called from the loop's thread, between two steps.

Pipeline. At depth 0 a step is launched and read. At depth 1 step N+1 is launched before step N is read, so the device
never waits for the host; a sequence that ended in step N is then a no-op row of step N+1.
"""

import logging
import random
from collections import deque
from collections.abc import Callable, Mapping
from typing import Protocol

import msgspec
from msgspec import structs

from engine.config.engine import EngineConfig
from engine.kv_cache.manager import KvCacheManager
from engine.kv_cache.prefix_keys import root_key
from engine.logits_rules import check_request
from engine.request import EngineRequest, TokenDelta
from engine.request_limits import max_len_of
from engine.scheduler import PipelineNotEmpty, ScheduledStep, Scheduler
from engine.sequence import Sequence, SequenceState
from engine.speculative.counters import CounterSnapshot, SpeculationCounters, drafts_at_risk
from engine.speculative.gate import SpeculationGate
from engine.speculative.schedule import DraftLengthSchedule, ScheduleAck, Version
from engine.speculative.shadow import ShadowScoring
from engine.step import Finish, RowResult, StepPlan, StepResult

logger = logging.getLogger(__name__)


class Runner(Protocol):
    """Executes plans. Results come back in launch order."""

    def launch(self, plan: StepPlan) -> None:
        """Starts a step behind those already launched."""

    def collect(self) -> StepResult:
        """Waits for the oldest launched step that was not collected."""


class EngineStats(msgspec.Struct, frozen=True, kw_only=True):
    """Gauges: the engine now. Blocks leave the null block out; kv_usage is the share of blocks owned by requests."""

    num_running: int
    num_waiting: int
    num_in_flight: int
    free_blocks: int
    cached_blocks: int
    total_blocks: int
    kv_usage: float
    draft_len: int
    schedule_version: Version
    schedule: dict[int, int]
    speculation_disabled: bool


class EngineCore:
    """Scheduler, KV bookkeeping, speculation control and one runner.

    broadcast: sends a plan to the other ranks; called before the own rank's launch.
    """

    def __init__(
        self,
        *,
        config: EngineConfig,
        runner: Runner,
        broadcast: Callable[[StepPlan], None] | None = None,
    ) -> None:
        if config.max_num_batched_tokens < config.max_draft_len + 1:
            raise ValueError(
                f"max_num_batched_tokens: {config.max_num_batched_tokens} is less than one row's verify, max_draft_len "
                f"+ 1 = {config.max_draft_len + 1}"
            )
        self._config = config
        self._runner = runner
        self._broadcast = broadcast
        self._kv = KvCacheManager(config)
        self._scheduler = Scheduler(config=config, kv=self._kv, draft_len_for=self._draft_len_for)
        self._counters = SpeculationCounters(max_num_seqs=config.max_num_seqs)
        self._gate = (
            SpeculationGate(window=config.gate_window, threshold=config.gate_threshold) if config.gate_window else None
        )
        self._schedule = DraftLengthSchedule(dict(config.draft_len_schedule))
        assert set(self._schedule.entries.values()) <= set(config.draft_len_choices), "resolved schedules are rounded"
        self._schedule_version: Version = (0, 0)
        self._shadow: ShadowScoring | None = None
        if config.shadow_time_share and config.max_draft_len and config.synthetic_acceptance_length is None:
            self._shadow = ShadowScoring(
                max_draft_len=config.max_draft_len, time_share=config.shadow_time_share, counters=self._counters
            )
        self._sequences: dict[str, Sequence] = {}
        self._in_flight: deque[ScheduledStep] = deque()
        self._deltas: list[TokenDelta] = []
        self._next_step_id = 0
        self._rng = random.Random()  # seeds of requests that named none

    # ---------------------------------------------------------------------------------------- requests

    def add_request(self, request: EngineRequest) -> None:
        """Queues a request. Its first tokens come from a later `step`.

        Raises:
            ValueError: names the field: id in use, empty prompt, token id outside the vocabulary, n above 1, a length
                that can never fit, or an option that this deployment does not have.
        """
        if request.request_id in self._sequences:
            raise ValueError(f"request_id: {request.request_id!r} is in use by an unfinished request")
        params = request.params
        if params.n != 1:
            raise ValueError(f"n: the engine decodes one sequence per request, got {params.n}; send one request each")
        max_len = max_len_of(request, self._config, num_blocks=self._kv.pool.num_total)
        config = self._config
        eos_token_ids = () if params.ignore_eos else config.target.eos_token_ids
        stop_token_ids = tuple(sorted({*eos_token_ids, *params.stop_token_ids}))
        check_request(request, config, stop_token_ids)
        seq = Sequence(
            request=request,
            max_len=max_len,
            seed=self._rng.getrandbits(63) if params.seed is None else params.seed,
            stop_token_ids=stop_token_ids,
            root_key=root_key(identity=config.identity, cache_salt=request.cache_salt),
        )
        self._sequences[request.request_id] = seq
        self._scheduler.add(seq)

    def abort(self, request_id: str) -> None:
        """Ends a request; its last delta has finish_reason "abort". An unknown id is no error: a client that hangs up
        races with the request's own end."""
        seq = self._sequences.get(request_id)
        if seq is not None:
            self._end(seq, "abort")
            if self._shadow is not None:
                self._shadow.end(seq)
            num_cached_tokens = max(seq.num_cached_tokens, 0)
            self._deltas.append(
                TokenDelta(request_id=request_id, finish_reason="abort", num_cached_tokens=num_cached_tokens)
            )

    def has_work(self) -> bool:
        """Something is waiting, running, in flight, or to be handed out."""
        return bool(self._sequences or self._in_flight or self._deltas)

    # ---------------------------------------------------------------------------------------- the loop

    def step(self) -> list[TokenDelta]:
        """Launches at most one step, reads what the pipeline's depth demands, returns the deltas."""
        launched = self._launch()
        assert launched or self._in_flight or not self._sequences, "requests wait, but no step can be planned"
        depth = self._config.pipeline_depth if launched else 0
        while len(self._in_flight) > depth:
            self._read()
        if self._config.debug_checks and not self._sequences and not self._in_flight:
            self._scheduler.check_integrity()
        deltas, self._deltas = self._deltas, []
        return deltas

    def _launch(self) -> bool:
        """Plans and starts a step. False: there is nothing to run."""
        step_id = self._next_step_id
        try:
            scheduled = self._scheduler.schedule(step_id=step_id, may_preempt=not self._in_flight)
        except PipelineNotEmpty:
            self._drain()
            scheduled = self._scheduler.schedule(step_id=step_id, may_preempt=True)
        if scheduled is None:
            return False
        self._next_step_id += 1
        if self._shadow is not None and self._speculates and self._shadow.is_due(scheduled.plan):
            plan = structs.replace(scheduled.plan, draft_len=self._config.max_draft_len, report_drafts=True)
            scheduled = structs.replace(scheduled, plan=plan)
        self._in_flight.append(scheduled)
        if self._broadcast is not None:
            self._broadcast(scheduled.plan)
        self._runner.launch(scheduled.plan)
        return True

    def _drain(self) -> None:
        """Reads every step in flight; the deltas leave with the next `step`."""
        while self._in_flight:
            self._read()

    def _read(self) -> None:
        """Takes in the oldest step in flight: progress, tokens, ends, counts."""
        scheduled = self._in_flight.popleft()
        plan, result = scheduled.plan, self._runner.collect()
        assert result.step_id == plan.step_id, f"expected step {plan.step_id}, got {result.step_id}"
        sampling = [row.seq for row in scheduled.prefill if row.samples]
        num_decode = len(scheduled.decode)
        assert len(result.rows) == num_decode + len(sampling), f"step {plan.step_id}: {len(result.rows)} results"
        counters = self._counters
        counters.num_steps += 1
        self._read_prompt_scores(scheduled, result)
        counters.device_time_s += result.duration_s
        self._scheduler.step_has_run(scheduled, result.duration_s)
        for chunk in scheduled.prefill:
            counters.prefill_tokens += chunk.num_tokens
            if chunk.seq.state is SequenceState.RUNNING:
                chunk.seq.read_chunk(chunk.num_tokens)
                self._kv.key_filled_blocks(chunk.seq)

        outcomes: list[tuple[int, int]] = []
        tokens_before = counters.generation_tokens
        for seq, row in zip(scheduled.decode, result.rows[:num_decode], strict=True):
            outcome = self._read_row(seq, row, is_decode_step=True)
            if outcome is not None:
                outcomes.append(outcome)
        if num_decode:
            steady = not plan.prefill and plan.verify_len == plan.draft_len
            counters.record_decode(
                num_program_rows=num_decode,
                verify_len=plan.verify_len,
                outcomes=outcomes,
                num_tokens=counters.generation_tokens - tokens_before,
                steady_time_s=result.duration_s if steady else None,
            )
        for seq, row in zip(sampling, result.rows[num_decode:], strict=True):
            self._read_row(seq, row, is_decode_step=False)
        if self._shadow is not None:
            self._shadow.read(plan, result, [*scheduled.decode, *sampling])
        self._scheduler.step_was_read(scheduled)
        if self._gate is not None:
            num_drafted = sum([drafted for drafted, _ in outcomes])
            if num_drafted:
                rate = sum([accepted for _, accepted in outcomes]) / num_drafted
                self._gate.record_acceptance_rate(rate, result.step_id)

    def _read_prompt_scores(self, scheduled: ScheduledStep, result: StepResult) -> None:
        """Log-probabilities of prompt tokens leave in deltas of their own, ahead of the request's first token."""
        scored = [
            row.seq for row, chunk in zip(scheduled.prefill, scheduled.plan.prefill, strict=True) if chunk.scored_next
        ]
        for seq, scores in zip(scored, result.prompt_scores, strict=True):
            assert (scores.slot, scores.generation) == (seq.slot, seq.generation), f"not a result of {seq}"
            if seq.state is SequenceState.RUNNING:
                self._deltas.append(
                    TokenDelta(
                        request_id=seq.request_id,
                        prompt_logprobs=scores.logprobs,
                        num_cached_tokens=seq.num_cached_tokens,
                    )
                )

    def _read_row(self, seq: Sequence, row: RowResult, *, is_decode_step: bool) -> tuple[int, int] | None:
        """One row's tokens. Returns (drafted, accepted) as counted; None when the request has ended meanwhile."""
        assert row.slot == seq.slot, f"{row} is not a result of {seq}"
        assert row.generation == seq.generation, f"{row} is not a result of {seq}"
        if seq.state is not SequenceState.RUNNING:
            return None
        token_ids = row.token_ids
        num_tokens = len(token_ids)
        assert num_tokens <= row.num_accepted + 1 <= row.num_drafted + 1, f"{row} of {seq}"
        assert num_tokens > 0 or row.finish is Finish.ERROR, f"{row} of {seq}"
        drafted, accepted = row.num_drafted, row.num_accepted
        if num_tokens <= accepted:  # a cut block
            drafted, accepted = drafts_at_risk(num_tokens=num_tokens, num_drafted=drafted, num_accepted=accepted)
        seq.append(token_ids, is_decode_step=is_decode_step)
        self._counters.generation_tokens += num_tokens
        if is_decode_step:
            self._kv.key_filled_blocks(seq)
        finish_reason: str | None = None
        stop_reason: int | None = None
        error: str | None = None
        if row.finish is Finish.NONE:
            assert len(seq.token_ids) < seq.max_len, f"did not end by length: {seq}"
        elif row.finish is Finish.LENGTH:
            assert len(seq.token_ids) == seq.max_len, f"ended by length: {seq}"
            finish_reason = "length"
        elif row.finish is Finish.STOP:
            finish_reason = "stop"
            stop_reason = self._stop_reason(seq, token_ids[-1])
        else:
            assert row.finish is Finish.ERROR, f"{row} of {seq}"
            finish_reason = "error"
            position = len(seq.token_ids)
            error = f"the model's output is not finite (NaN or infinity) at position {position} of the request"
            logger.error("Request %s ends: %s", seq.request_id, error)
            self._kv.pool.condemn(seq.block_ids)
        if finish_reason is not None:
            self._end(seq, finish_reason)
        self._deltas.append(
            TokenDelta(
                request_id=seq.request_id,
                token_ids=token_ids,
                finish_reason=finish_reason,
                stop_reason=stop_reason,
                logprobs=row.logprobs,
                num_drafted=drafted,
                num_accepted=accepted,
                is_decode_step=is_decode_step,
                num_cached_tokens=seq.num_cached_tokens,
                error=error,
            )
        )
        return drafted, accepted

    def _stop_reason(self, seq: Sequence, token_id: int) -> int | None:
        """None for an end-of-sequence token that the request did not ignore, else the request's own stop id."""
        assert token_id in seq.stop_token_ids, f"stopped at token {token_id}: {seq}"
        is_eos = token_id in self._config.target.eos_token_ids and not seq.request.params.ignore_eos
        return None if is_eos else token_id

    def _end(self, seq: Sequence, finish_reason: str) -> None:
        self._scheduler.finish(seq)
        del self._sequences[seq.request_id]
        self._counters.finished[finish_reason] += 1

    # ---------------------------------------------------------------------------------------- speculation

    def _draft_len_for(self, batch_size: int) -> int:
        """K in force for a batch size: the schedule's, 0 once the gate has tripped."""
        return self._schedule.draft_len(batch_size) if self._speculates else 0

    @property
    def _speculates(self) -> bool:
        return self._gate is None or not self._gate.disabled

    def apply_schedule(self, version: Version, schedule: Mapping[int, int]) -> ScheduleAck:
        """Puts a newer schedule in force from the next planned step on. Steps in flight keep their own K, and
        blocks were reserved for it, so the pipeline need not be empty.

        Raises:
            ValueError: an entry no schedule may have.
        """
        live, rounded = DraftLengthSchedule.live(
            schedule, max_draft_len=self._config.max_draft_len, choices=self._config.draft_len_choices
        )
        applied = version > self._schedule_version
        if applied:
            if self._gate is not None and self._schedule_version == (0, 0):
                logger.warning(
                    "The speculation gate (threshold %s) is on together with live draft-length schedules: the "
                    "acceptance rate falls when the draft length rises, so a longer schedule can trip the gate",
                    self._gate.threshold,
                )
            self._schedule, self._schedule_version = live, version
        return ScheduleAck(
            applied=applied,
            version=self._schedule_version,
            schedule=self._schedule.entries,
            rounded=rounded if applied else "",
        )

    def reset_gate(self) -> None:
        """Lets a tripped gate speculate again; without a gate there is nothing to reset."""
        if self._gate is not None:
            self._gate.reset()

    def reset_prefix_cache(self) -> None:
        """Forgets all cached prefixes; running requests keep their blocks. Makes a measurement start cold."""
        self._kv.pool.drop_cache()

    # ---------------------------------------------------------------------------------------- views

    def counters(self) -> CounterSnapshot:
        """Cumulative counts of everything read so far."""
        return self._counters.snapshot(
            preemptions=self._scheduler.num_preemptions,
            prompt_tokens=self._scheduler.num_prompt_tokens,
            prefix_cache_queries=self._scheduler.num_queried_tokens,
            prefix_cache_hits=self._scheduler.num_hit_tokens,
            prefix_cache_evictions=self._kv.pool.num_evictions,
        )

    def stats(self) -> EngineStats:
        """Gauges of this moment."""
        pool = self._kv.pool
        return EngineStats(
            num_running=len(self._scheduler.running),
            num_waiting=len(self._scheduler.waiting),
            num_in_flight=len(self._in_flight),
            free_blocks=pool.num_free,
            cached_blocks=pool.num_cached,
            total_blocks=pool.num_total,
            kv_usage=1.0 - pool.num_available / pool.num_total,
            draft_len=self._scheduler.draft_len,
            schedule_version=self._schedule_version,
            schedule=self._schedule.entries,
            speculation_disabled=self._gate is not None and self._gate.disabled,
        )

    def check_integrity(self) -> None:
        """Reads the steps in flight, then compares slots, blocks and references with their owners.

        Raises:
            RuntimeError: what leaked or disagrees.
        """
        self._drain()
        self._scheduler.check_integrity()
