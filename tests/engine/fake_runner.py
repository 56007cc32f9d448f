"""A device made of Python lists, for tests of the host side: no model, but every rule of the cache is checked.

Tokens are a pure function of (request seed, position). The K/V of a position is a hash of all tokens up to it and of
the request's salt, so a wrong hit, a lost write or a stale table entry shows as a wrong content at the next read.
"""

import random
from collections import deque
from dataclasses import dataclass, field

from engine.config.engine import EngineConfig
from engine.config.model import DrafterConfig, TargetConfig
from engine.config.rope import RopeConfig
from engine.core import EngineCore
from engine.request import EngineRequest
from engine.step import Finish, RowResult, SlotInit, StepPlan, StepResult

VOCAB_SIZE = 50
EOS = 7


def make_config(**changes: object) -> EngineConfig:
    """A small engine; `width` is the drafter's block width W (0: no drafter)."""
    width = changes.pop("width", 8)
    rope = RopeConfig(theta=10000.0)
    sizes = {
        "num_layers": 2,
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_heads": 2,
        "num_kv_heads": 1,
        "head_dim": 4,
    }
    target = TargetConfig(
        architecture="LlamaForCausalLM",
        vocab_size=VOCAB_SIZE,
        rms_norm_eps=1e-5,
        rope=rope,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        qkv_bias=False,
        qk_norm=False,
        eos_token_ids=(EOS,),
        **sizes,
    )
    drafter = DrafterConfig(
        vocab_size=VOCAB_SIZE,
        rms_norm_eps=1e-5,
        rope=rope,
        max_position_embeddings=4096,
        block_size=width,
        mask_token_id=0,
        target_layer_ids=(0,),
        **sizes,
    )
    max_draft_len = width - 1 if width else 0
    choices = tuple(k for k in (0, 1, 2, 3, 5, 7, 11, 15) if k < max_draft_len)
    values = {
        "model_dir": "target",
        "target": target,
        "drafter_dir": "drafter" if width else None,
        "drafter": drafter if width else None,
        "identity": "fake",
        "dtype": "float32",
        "device": "cpu",
        "num_threads": 1,
        "tensor_parallel_size": 1,
        "drafter_tensor_parallel": True,
        "hidden_state_gather": "fused",
        "max_model_len": 64,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 64,
        "block_size": 4,
        "num_blocks": 100,
        "enable_prefix_caching": True,
        "pipeline_depth": 0,
        "max_draft_len": max_draft_len,
        "draft_len_choices": (*choices, max_draft_len),
        "draft_len_schedule": ((64, max_draft_len),) if max_draft_len else (),
        "gate_window": 0,
        "gate_threshold": 0.0,
        "debug_checks": True,
    }
    return EngineConfig(**{**values, **changes})


def draw_token(seed: int, position: int, banned: frozenset[int] = frozenset()) -> int:
    """The token the fake target draws at a position: a hash, re-drawn while it is banned."""
    for attempt in range(1000):
        token_id = hash((seed, position, attempt)) % VOCAB_SIZE
        if token_id not in banned:
            return token_id
    raise AssertionError("every token is banned")


def expected_output(request: EngineRequest, *, max_model_len: int) -> tuple[list[int], str]:
    """Output and finish reason of a request, from its seed alone."""
    params, prompt_len = request.params, len(request.prompt_token_ids)
    stops = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else {EOS})
    max_len = max_model_len if params.max_tokens is None else prompt_len + params.max_tokens
    output: list[int] = []
    for position in range(prompt_len, max_len):
        masked = stops if position < prompt_len + params.min_tokens else frozenset()
        output.append(draw_token(params.seed, position, masked))
        if output[-1] in stops:
            return output, "stop"
    return output, "length"


class Story:
    """All tokens of one request, known in advance, and the K/V contents they imply."""

    def __init__(self, request: EngineRequest, init: SlotInit) -> None:
        self.stops = frozenset(init.stop_token_ids)
        self.token_ids = list(request.prompt_token_ids)
        for position in range(init.prompt_len, init.max_len):
            masked = self.stops if position < init.min_len else frozenset()
            self.token_ids.append(draw_token(init.seed, position, masked))
        self.contents: list[int] = []
        content = hash(("root", request.cache_salt))
        for token_id in self.token_ids:
            content = hash((content, token_id))
            self.contents.append(content)


@dataclass
class DeviceSlot:
    """A slot's state as the architecture describes it."""

    init: SlotInit
    story: Story
    table: list[int]
    committed_len: int = 0
    draft_count: int = 0
    finished: bool = False
    num_entries: int = 0  # table entries received


@dataclass
class Recount:
    """Brute-force counts, from results whose request was alive when they were read."""

    cells: dict[tuple[int, int], dict[str, object]] = field(default_factory=dict)
    gate_rates: list[float] = field(default_factory=list)


class FakeRunner:
    """Runs plans at launch, hands results out at collect, and asserts the rules on the way."""

    def __init__(self, config: EngineConfig, *, seed: int = 0, accept: float | None = None) -> None:
        self.config = config
        self.rng = random.Random(seed)
        self.accept = accept  # probability that a draft is right; None: any accepted length is equally likely
        self.core: EngineCore | None = None
        self.requests: dict[int, EngineRequest] = {}  # by seed
        self.slots: dict[int, DeviceSlot] = {}
        self.target: dict[tuple[int, int], object] = {}
        self.draft: dict[tuple[int, int], object] = {}
        self.results: deque[tuple[StepPlan, StepResult]] = deque()
        self.plans: list[StepPlan] = []
        self.recount = Recount()
        self.check_reads = True  # quadratic in the length: off for long runs that test something else
        self.max_draft_position = 10**9  # the drafter's position table: no drafts for a block that leaves it

    # ---------------------------------------------------------------------------------------- the Runner protocol

    def launch(self, plan: StepPlan) -> None:
        self.plans.append(plan)
        self._check_plan(plan)
        for init in plan.new_slots:
            before = self.slots.get(init.slot)
            assert before is None or init.generation > before.init.generation
            story = Story(self.requests[init.seed], init)
            self.slots[init.slot] = DeviceSlot(init, story, [0] * self.config.max_blocks_per_seq)
        for update in plan.block_updates:
            table = self.slots[update.slot].table
            assert update.first_index == self.slots[update.slot].num_entries, "not the next entries"
            assert update.block_ids
            self.slots[update.slot].num_entries += len(update.block_ids)
            end = update.first_index + len(update.block_ids)
            assert end <= len(table), "a block table's row is too narrow"
            table[update.first_index : end] = update.block_ids
        rows = [self._decode(slot, plan) for slot in plan.decode_slots]
        for chunk in plan.prefill:
            row = self._prefill(chunk, plan)
            if chunk.samples:
                rows.append(row)
        result = StepResult(step_id=plan.step_id, rows=tuple(rows), duration_s=self.rng.random())
        self.results.append((plan, result))
        assert len(self.results) <= self.config.pipeline_depth + 1

    def collect(self) -> StepResult:
        plan, result = self.results.popleft()
        self._recount(plan, result)
        return result

    # ---------------------------------------------------------------------------------------- a step

    def _check_plan(self, plan: StepPlan) -> None:
        config = self.config
        num_tokens = len(plan.decode_slots) * (plan.verify_len + 1) + sum(len(c.token_ids) for c in plan.prefill)
        assert 0 < num_tokens <= config.max_num_batched_tokens
        slots = [*plan.decode_slots, *(chunk.slot for chunk in plan.prefill)]
        assert len(set(slots)) == len(slots) <= config.max_num_seqs
        assert plan.verify_len in config.draft_len_choices
        assert plan.draft_len in config.draft_len_choices
        assert plan.verify_len <= plan.draft_len

    def _decode(self, slot: int, plan: StepPlan) -> RowResult:
        state = self.slots[slot]
        if state.finished:
            return RowResult(slot=slot, generation=state.init.generation, token_ids=())
        start, story = state.committed_len, state.story
        k = max(0, min(plan.verify_len, state.draft_count, state.init.max_len - 2 - start))
        if self.accept is None:
            num_accepted = self.rng.randint(0, k)
        else:
            num_accepted = next((j for j in range(k) if self.rng.random() >= self.accept), k)
        self._read(self.target, slot, start)
        for j in range(k + 1):
            right = j <= num_accepted
            self._write(
                self.target, slot, start + j, story.contents[start + j] if right else ("wrong", slot, start + j)
            )
        token_ids = story.token_ids[start + 1 : start + 2 + num_accepted]
        assert len(token_ids) == num_accepted + 1
        for index, token_id in enumerate(token_ids):
            if token_id in story.stops:
                token_ids = token_ids[: index + 1]
                break
        finish = self._finish(state, start + 1 + len(token_ids))
        state.committed_len += len(token_ids)
        self._draft(slot, start, plan)
        return RowResult(
            slot=slot,
            generation=state.init.generation,
            token_ids=tuple(token_ids),
            num_drafted=k,
            num_accepted=num_accepted,
            finish=finish,
        )

    def _prefill(self, chunk: object, plan: StepPlan) -> RowResult | None:
        state, story, slot = self.slots[chunk.slot], self.slots[chunk.slot].story, chunk.slot
        assert not state.finished
        start, end = chunk.start, chunk.start + len(chunk.token_ids)
        assert list(chunk.token_ids) == story.token_ids[start:end], "a chunk's tokens are not the request's"
        for position in range(start, end):
            self._write(self.target, slot, position, story.contents[position])
        self._read(self.target, slot, end)
        state.committed_len = end
        if not chunk.samples:
            self._write_context(slot, start)
            return None
        token_id = story.token_ids[end]
        finish = self._finish(state, end + 1)
        self._draft(slot, start, plan)
        return RowResult(slot=slot, generation=state.init.generation, token_ids=(token_id,), finish=finish)

    def _finish(self, state: DeviceSlot, num_tokens: int) -> Finish:
        finish = Finish.NONE
        if state.story.token_ids[num_tokens - 1] in state.story.stops and num_tokens > state.init.min_len:
            finish = Finish.STOP
        elif num_tokens == state.init.max_len:
            finish = Finish.LENGTH
        state.finished = finish is not Finish.NONE
        return finish

    def _write_context(self, slot: int, start: int) -> None:
        if self.config.drafter is not None:
            for position in range(start, self.slots[slot].committed_len):
                self._write(self.draft, slot, position, self.slots[slot].story.contents[position])

    def _draft(self, slot: int, start: int, plan: StepPlan) -> None:
        """Step 3 and 4 of D. The block is written for a row that ends in this step as well: a real one may be."""
        self._write_context(slot, start)
        state = self.slots[slot]
        state.draft_count = 0
        if plan.draft_len:
            self._read(self.draft, slot, state.committed_len)
            for position in range(state.committed_len, state.committed_len + self.config.lookahead):
                self._write(self.draft, slot, position, ("block", slot, plan.step_id))
            if state.committed_len + self.config.lookahead <= self.max_draft_position:
                state.draft_count = plan.draft_len

    # ---------------------------------------------------------------------------------------- memory

    def _write(self, memory: dict, slot: int, position: int, content: object) -> None:
        block_size = self.config.block_size
        block_id = self.slots[slot].table[position // block_size]
        assert block_id != 0, f"position {position} of slot {slot} has no block"
        assert self.core._kv.pool.are_writable([block_id]), f"block {block_id} is shared or keyed, and written"
        assert block_id in self._host_blocks(slot), f"block {block_id} is written by slot {slot}, which does not own it"
        memory[block_id, position % block_size] = content

    def _read(self, memory: dict, slot: int, num_positions: int) -> None:
        state, block_size = self.slots[slot], self.config.block_size
        for position in range(num_positions if self.check_reads else 0):
            block_id = state.table[position // block_size]
            content = memory.get((block_id, position % block_size))
            assert content == state.story.contents[position], f"slot {slot} reads a foreign position {position}"

    def _host_blocks(self, slot: int) -> list[int]:
        return next(seq.block_ids for seq in self.core._scheduler.running.values() if seq.slot == slot)

    # ---------------------------------------------------------------------------------------- recount

    def _recount(self, plan: StepPlan, result: StepResult) -> None:
        alive = {(seq.slot, seq.generation) for seq in self.core._scheduler.running.values()}
        num_rows = len(plan.decode_slots)
        if not num_rows:
            return
        bucket = next(b for b in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512) if b >= num_rows)
        key = (min(bucket, self.config.max_num_seqs), plan.verify_len)
        empty = {
            "steps": 0,
            "rows": 0,
            "tokens": 0,
            "decode_steps": 0,
            "decode_time_s": 0.0,
            "at_risk": {},
            "accepted": {},
        }
        cell = self.recount.cells.setdefault(key, empty)
        cell["steps"] += 1
        if not plan.prefill and plan.verify_len == plan.draft_len:
            cell["decode_steps"] += 1
            cell["decode_time_s"] += result.duration_s
        sum_drafted = sum_accepted = 0
        for row in result.rows[:num_rows]:
            if (row.slot, row.generation) not in alive or not row.token_ids:
                continue
            cell["rows"] += 1
            cell["tokens"] += len(row.token_ids)
            is_cut = len(row.token_ids) < row.num_accepted + 1
            for j in range(1, row.num_drafted + 1):
                if is_cut and j > len(row.token_ids):
                    break
                sum_drafted += 1
                if j - 1 <= row.num_accepted:
                    cell["at_risk"][j] = cell["at_risk"].get(j, 0) + 1
                if j <= row.num_accepted:
                    cell["accepted"][j] = cell["accepted"].get(j, 0) + 1
                    sum_accepted += 1
        if sum_drafted:
            self.recount.gate_rates.append(sum_accepted / sum_drafted)
