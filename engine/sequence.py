"""`Sequence`: what the host knows about one request. The device state of its slot is the runner's.

Progress is a chain of ordered integers over the tokens' positions:

    0 ...... hit_len ...... keyed_len ...... committed_len ...... launched_len ...... len(token_ids) ...... max_len
    |  shared   |  own, full,   |   own, result    |  prefill handed to   |  tokens whose K/V   |
    |  blocks   |  in the cache |   read           |  the device, unread  |  nobody asked for   |

hit_len and keyed_len are multiples of the block size. While the prompt is prefilled, launched_len runs ahead of
committed_len by the chunks in flight. When decoding, both are len(token_ids) - 1: the last token is the next verify's
first input. Decode steps in flight are counted (`num_in_flight`), not measured: how far they got is known when read.
"""

import enum

from engine.logits_rules import rules_of, upload_len
from engine.request import EngineRequest
from engine.step import SlotInit


class SequenceState(enum.Enum):
    """Life of a sequence. PREEMPTED sequences are WAITING again, with their emitted tokens."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class Sequence:
    """Host state of one request.

    prefill_len: tokens to prefill in this admission: the prompt, and after a preemption the emitted tokens as well.
    block_ids:   the block table; the first `num_sent_blocks` entries are on the device.
    scored_len:  leading prompt positions whose next token's log-probability was asked of the device.
    """

    __slots__ = (
        "block_ids",
        "block_keys",
        "committed_len",
        "generation",
        "hit_len",
        "in_flight_verify_len",
        "keyed_len",
        "last_draft_len",
        "last_step_id",
        "launched_len",
        "max_len",
        "num_cached_tokens",
        "num_in_flight",
        "num_sent_blocks",
        "prefill_len",
        "prompt_len",
        "request",
        "request_id",
        "root_key",
        "scored_len",
        "seed",
        "slot",
        "state",
        "stop_token_ids",
        "token_ids",
    )

    def __init__(
        self,
        *,
        request: EngineRequest,
        max_len: int,
        seed: int,
        stop_token_ids: tuple[int, ...],
        root_key: bytes,
    ) -> None:
        self.request = request
        self.request_id = request.request_id
        self.token_ids = list(request.prompt_token_ids)
        self.prompt_len = len(self.token_ids)
        self.max_len = max_len
        self.seed = seed
        self.stop_token_ids = stop_token_ids
        self.root_key = root_key
        self.block_keys: list[bytes] = []
        self.state = SequenceState.WAITING
        self.slot = -1
        self.generation = -1
        self.num_cached_tokens = -1  # unknown until the first admission
        self.num_in_flight = 0
        self.last_step_id = -1
        self.scored_len = 0
        self.reset_progress()

    def reset_progress(self) -> None:
        """Nothing is on the device: a new or a preempted sequence."""
        self.block_ids: list[int] = []
        self.num_sent_blocks = 0
        self.hit_len = 0
        self.keyed_len = 0
        self.committed_len = 0
        self.launched_len = 0
        self.prefill_len = len(self.token_ids)
        self.in_flight_verify_len = 0
        self.last_draft_len = 0

    @property
    def is_decoding(self) -> bool:
        """The last prefill chunk is launched: later steps verify drafts."""
        return self.launched_len >= self.prefill_len

    @property
    def is_surely_done(self) -> bool:
        """Every step in flight emits at least one token, and those reach max_len: another step could do nothing."""
        return len(self.token_ids) + self.num_in_flight >= self.max_len

    @property
    def max_hit_len(self) -> int:
        """Tokens that a prefix hit may cover: never the last one, whose own forward the next token is drawn from, and
        none whose row has to be scored."""
        last = len(self.token_ids) - 1
        wants_more = self.request.params.prompt_logprobs is not None and self.scored_len < self.prompt_len - 1
        return min(last, self.scored_len) if wants_more else last

    def take_scores(self, num_tokens: int) -> tuple[int, tuple[int, ...]]:
        """(position of the first row, tokens to score) of the chunk of num_tokens from launched_len on.

        Nothing is scored twice: a preemption happens when every launched step was read.
        """
        start = max(self.scored_len, self.launched_len)
        end = min(self.launched_len + num_tokens, self.prompt_len - 1)
        if self.request.params.prompt_logprobs is None or start >= end:
            return 0, ()
        assert start == self.scored_len, self
        self.scored_len = end
        return start, tuple(self.token_ids[start + 1 : end + 1])

    @property
    def upload_len(self) -> int:
        """Numbers that its next `slot_init` carries to every rank besides its fixed fields, at most."""
        return upload_len(self.request, len(self.token_ids))

    def take_slot(self, *, slot: int, generation: int, hit_block_ids: list[int], hit_len: int) -> None:
        """Admission: WAITING -> RUNNING on `slot`, with the prefix hit as the head of the block table."""
        assert self.state is SequenceState.WAITING, self
        assert self.num_in_flight == 0, self
        self.state = SequenceState.RUNNING
        self.slot = slot
        self.generation = generation
        self.block_ids = hit_block_ids
        self.hit_len = self.keyed_len = self.committed_len = self.launched_len = hit_len
        if self.num_cached_tokens < 0:
            self.num_cached_tokens = hit_len
        self.check()

    def read_chunk(self, num_tokens: int) -> None:
        """A prefill chunk's step was read."""
        self.committed_len += num_tokens
        self.check()

    def append(self, token_ids: tuple[int, ...], *, is_decode_step: bool) -> None:
        """Tokens of a read step. A decode step also committed as many K/V; a prefill row's come with its chunk."""
        self.token_ids.extend(token_ids)
        if not is_decode_step:
            self.check()
            return
        self.committed_len += len(token_ids)
        self.launched_len = self.committed_len
        assert self.keyed_len <= self.committed_len == len(self.token_ids) - 1 < self.max_len, self

    def check(self) -> None:
        """The invariant of the module's docstring."""
        num_tokens = len(self.token_ids)
        assert (
            0 <= self.hit_len <= self.keyed_len <= self.committed_len <= self.launched_len <= num_tokens <= self.max_len
        ), self
        assert num_tokens == self.prefill_len or self.committed_len == self.launched_len == num_tokens - 1, self

    def slot_init(self) -> SlotInit:
        """The slot's upload: limits and seed are the request's own, also when it resumes."""
        params = self.request.params
        return SlotInit(
            slot=self.slot,
            generation=self.generation,
            prompt_len=self.prompt_len,
            max_len=self.max_len,
            min_len=self.prompt_len + params.min_tokens,
            temperature=params.temperature,
            top_k=max(params.top_k, 0),
            top_p=params.top_p,
            min_p=params.min_p,
            seed=self.seed,
            stop_token_ids=self.stop_token_ids,
            num_logprobs=-1 if params.logprobs is None else params.logprobs,
            num_prompt_logprobs=-1 if params.prompt_logprobs is None else params.prompt_logprobs,
            rules=rules_of(self.request, self.token_ids[self.prompt_len :]),
        )

    def __repr__(self) -> str:
        return (
            f"Sequence({self.request_id!r}, {self.state.value}, slot {self.slot}, hit {self.hit_len} <= keyed "
            f"{self.keyed_len} <= committed {self.committed_len} <= launched {self.launched_len} <= tokens "
            f"{len(self.token_ids)} <= max {self.max_len}, prefill {self.prefill_len}, in flight {self.num_in_flight})"
        )
