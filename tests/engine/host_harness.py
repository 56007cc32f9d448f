"""`Harness`: an EngineCore on a FakeRunner, with the checks every test of the host side ends with."""

from dataclasses import dataclass, field

from engine.config.engine import EngineConfig
from engine.core import EngineCore
from engine.request import EngineRequest, TokenDelta
from engine.sampling_params import SamplingParams
from tests.engine.fake_runner import FakeRunner, expected_output


@dataclass
class Outcome:
    """What came back for one request."""

    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | None = None
    num_cached_tokens: int = 0
    deltas: list[TokenDelta] = field(default_factory=list)


class Harness:
    """An EngineCore on a FakeRunner; collects deltas and checks their form."""

    def __init__(self, config: EngineConfig, *, seed: int = 0, accept: float | None = None) -> None:
        self.config = config
        self.runner = FakeRunner(config, seed=seed, accept=accept)
        self.core = EngineCore(config=config, runner=self.runner)
        self.runner.core = self.core
        self.requests: dict[str, EngineRequest] = {}
        self.outcomes: dict[str, Outcome] = {}
        self.num_steps = 0

    def add(self, prompt: list[int], *, salt: str | None = None, name: str | None = None, **params: object) -> str:
        """Queues a request whose seed is its number. Returns its id."""
        seed = params.pop("seed", 1000 + len(self.requests))
        name = name or f"r{len(self.requests)}"
        request = EngineRequest(
            request_id=name,
            prompt_token_ids=tuple(prompt),
            params=SamplingParams(seed=seed, **params),
            cache_salt=salt,
        )
        self.core.add_request(request)
        self.runner.requests[seed] = request
        self.requests[name] = request
        self.outcomes[name] = Outcome()
        return name

    def step(self) -> list[TokenDelta]:
        deltas = self.core.step()
        self.num_steps += 1
        self._check_order()
        for delta in deltas:
            outcome = self.outcomes[delta.request_id]
            assert outcome.finish_reason is None, "a delta after the end"
            outcome.deltas.append(delta)
            outcome.token_ids += delta.token_ids
            outcome.finish_reason = delta.finish_reason
            outcome.stop_reason = delta.stop_reason
            outcome.num_cached_tokens = delta.num_cached_tokens
        return deltas

    def _check_order(self) -> None:
        """First come, first served: the running requests are the oldest, and each queue is in order of arrival."""
        scheduler = self.core._scheduler
        arrival = {name: number for number, name in enumerate(self.requests)}
        numbers = [arrival[seq.request_id] for seq in (*scheduler.running.values(), *scheduler.waiting)]
        assert numbers == sorted(numbers), "arrival order is lost"

    def run(self, max_steps: int = 5000) -> None:
        """Until nothing is left. Fails when it takes longer than any fair schedule would."""
        for _ in range(max_steps):
            if not self.core.has_work():
                return
            self.step()
        raise AssertionError(f"still working after {max_steps} steps: {self.core.stats()}")

    def check_outcomes(self) -> None:
        """Every request: the tokens of its seed, the right end, nothing lost."""
        for name, request in self.requests.items():
            outcome = self.outcomes[name]
            token_ids, finish_reason = expected_output(request, max_model_len=self.config.max_model_len)
            if outcome.finish_reason == "abort":
                assert outcome.token_ids == token_ids[: len(outcome.token_ids)]
                assert len(outcome.token_ids) < len(token_ids)
            else:
                assert outcome.token_ids == token_ids
                assert outcome.finish_reason == finish_reason

    def check_counters(self) -> None:
        """The engine's counts against the brute-force recount."""
        snapshot, recount = self.core.counters(), self.runner.recount
        assert {(c.batch_bucket, c.draft_len) for c in snapshot.cells} == set(recount.cells)
        per_position: dict[int, int] = {}
        for cell in snapshot.cells:
            expected = recount.cells[cell.batch_bucket, cell.draft_len]
            for name in ("steps", "rows", "tokens", "decode_steps"):
                assert getattr(cell, name) == expected[name], name
            assert abs(cell.decode_time_s - expected["decode_time_s"]) < 1e-9
            for name in ("at_risk", "accepted"):
                counted = {j: num for j, num in enumerate(getattr(cell, name), 1) if num}
                assert counted == expected[name], name
            for j, num in expected["accepted"].items():
                per_position[j] = per_position.get(j, 0) + num
        deltas = [delta for outcome in self.outcomes.values() for delta in outcome.deltas]
        assert snapshot.num_drafts == sum(delta.num_drafted > 0 for delta in deltas)
        assert snapshot.num_draft_tokens == sum(delta.num_drafted for delta in deltas)
        assert snapshot.num_accepted_tokens == sum(delta.num_accepted for delta in deltas)
        assert {j: n for j, n in enumerate(snapshot.num_accepted_tokens_per_pos, 1) if n} == per_position
        assert snapshot.generation_tokens == sum(len(delta.token_ids) for delta in deltas)
        ends = [outcome.finish_reason for outcome in self.outcomes.values()]
        assert snapshot.finished == {reason: ends.count(reason) for reason in ("stop", "length", "abort", "error")}

    def check_idle(self) -> None:
        """Nothing is left behind."""
        self.core.check_integrity()
        stats = self.core.stats()
        assert (stats.num_running, stats.num_waiting, stats.num_in_flight) == (0, 0, 0)
        assert stats.free_blocks + stats.cached_blocks == stats.total_blocks == self.config.num_blocks - 1
