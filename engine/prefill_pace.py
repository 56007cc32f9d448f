"""How many prompt tokens a step may take beside decode rows, so that streams keep their rhythm.

Without a target a prompt is not held up by the streams, but prompts that arrive together take turns
(`tokens_of_several`). With a target, `PrefillPace` says.

It reckons a step's time as that of its decode rows plus a time per prompt token, both learnt from the steps that ran:
the first from steps without prompts, the second from what prompts added. A prompt token costs more far behind in a
long prompt, and padding to a program's size, and less among the decode rows than in a program of its own, so the
dearest of the last chunks counts, small ones aside, whose time is mostly that of the launch. Pure arithmetic on the
host.
"""

from collections import deque
from collections.abc import Iterable

from engine.row_buckets import sizes_up_to

_FORGET = 0.8  # weight of a decode time seen before, at each new one
_CHUNKS = 8  # that are remembered
_REMEMBERED = 128  # steps with prompts, after which a size that took too long is tried again
LEAST_TOKENS = 64  # a prompt makes this much progress a step, whatever the target
SEVERAL_TOKENS = 384  # of short prompts that share a step with decode rows
BACKLOG_TOKENS = 1536  # of waiting prompts, from where on throughput counts


def tokens_of_several(num_decode: int, width: int, waiting: Iterable[int], most: int) -> int:
    """Prompt tokens of a step with decode rows if they are of several prompts.

    width: tokens of a decode row. waiting: lengths of the prompts that wait. most: what the step has left.

    A step of decode rows and three prompts takes as long as three with one each, of which every stream gets tokens and
    the first two prompts theirs sooner. So several together add no more than the decode rows themselves, or than
    SEVERAL_TOKENS beside few rows; under full load, where decode rows are many, that fills the slots of those that
    end. A backlog says that it does not: then all that fit join. Where prompts are rows beside the decode rows, these
    many leave no filler rows (`engine.row_buckets`), if two thirds of them are enough for it.
    """
    total = 0
    for length in waiting:
        total += length
        if total > BACKLOG_TOKENS:
            return most
    num_rows = max(SEVERAL_TOKENS // width, num_decode)
    fitting = sizes_up_to(num_decode + num_rows)[-1] - num_decode
    return min(most, width * (fitting if 3 * fitting >= 2 * num_rows else num_rows))


class PrefillPace:
    """Learns from steps that were read, answers for steps that are planned.

    target_s: seconds between two steps of a stream; a step that decodes takes prompt tokens for no more than that.
    """

    def __init__(self, *, target_s: float) -> None:
        assert target_s > 0
        self._target_s = target_s
        self._decode_s: dict[int, float] = {}  # bucket of the decode rows' tokens -> seconds without prompts
        self._chunks: deque[tuple[int, float]] = deque(maxlen=_CHUNKS)  # (prompt tokens, seconds they added)
        self._too_large: int | None = None  # smallest bucket of all tokens of a step that lately missed the target
        self._steps_since = 0  # with prompts

    def tokens_beside(self, num_decode: int, verify_len: int) -> int:
        """Prompt tokens for a step with these decode rows. Until a prompt was seen: the least."""
        if not self._chunks:
            return LEAST_TOKENS
        large = max(tokens for tokens, _ in self._chunks) // 2
        token_s = max(added_s / tokens for tokens, added_s in self._chunks if tokens >= large)
        left_s = self._target_s - self._most_s(_bucket(num_decode * (verify_len + 1)))
        if left_s <= LEAST_TOKENS * token_s:
            return LEAST_TOKENS
        tokens = int(left_s / token_s)
        if self._too_large is not None:
            tokens = min(tokens, _largest(self._too_large - 1) - num_decode * (verify_len + 1))
        return max(tokens, LEAST_TOKENS)

    def observe(self, *, num_decode: int, verify_len: int, prompt_tokens: int, duration_s: float) -> None:
        """A step that has run."""
        decode_tokens = num_decode * (verify_len + 1)
        bucket = _bucket(decode_tokens)
        if prompt_tokens and num_decode:
            self._judge(_bucket(decode_tokens + prompt_tokens), duration_s)
        if prompt_tokens:
            alone_s = self._least_s(bucket) if num_decode else 0.0
            if 0.0 < duration_s <= alone_s:  # alone they take less than with a prompt: the times known were accidents
                for known in [known for known in self._decode_s if known <= bucket]:
                    self._decode_s[known] = min(self._decode_s[known], duration_s)
            elif duration_s:
                self._chunks.append((prompt_tokens, duration_s - alone_s))
        elif num_decode:
            before_s = self._decode_s.get(bucket, duration_s)
            self._decode_s[bucket] = before_s * _FORGET + duration_s * (1 - _FORGET)

    def _judge(self, bucket: int, duration_s: float) -> None:
        """A few tokens more can take a program of a larger size, and much longer. One that took too long is left alone
        for some time, unless the time was an accident: as large a step has kept the target since."""
        self._steps_since += 1
        if duration_s > self._target_s:
            self._too_large = bucket if self._too_large is None else min(bucket, self._too_large)
            self._steps_since = 0
        elif self._too_large is not None and (bucket >= self._too_large or self._steps_since > _REMEMBERED):
            self._too_large = None

    def _most_s(self, bucket: int) -> float:
        """Seconds that such rows take alone; of ones not seen alone, what more rows took, or the longest that any did:
        the target is kept from their first step on."""
        seen = [seconds for known, seconds in self._decode_s.items() if known >= bucket]
        return self._decode_s.get(bucket, min(seen, default=max(self._decode_s.values(), default=0.0)))

    def _least_s(self, bucket: int) -> float:
        """The same; of ones not seen alone, what fewer rows took. With nothing to subtract a prompt's tokens would seem
        so dear that it comes in slivers, and while it does, no step without prompts is there to learn from."""
        seen = [seconds for known, seconds in self._decode_s.items() if known <= bucket]
        return self._decode_s.get(bucket, max(seen, default=0.0))


def _bucket(num_tokens: int) -> int:
    """Four of them to each power of two, ascending."""
    exponent = max((num_tokens - 1).bit_length() - 3, 0)
    return 4 * exponent + ((num_tokens - 1) >> exponent)


def _largest(bucket: int) -> int:
    """Tokens, the most of this bucket."""
    exponent = max(bucket // 4 - 1, 0)
    return (bucket - 4 * exponent + 1) << exponent
