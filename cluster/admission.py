"""Admission of requests to one replica: how many choices may run or wait, and whether the replica takes any at all.

Refusals are `ApiError`s, so that a client reads OpenAI's body whatever the proxy in front of the replica is. One event
loop uses an `Admission`; it has no locks.
"""

import enum

from cluster.openai.errors import ApiError, invalid, unavailable

RETRY_AFTER_S = 1  # a step of the queue takes well under a second; clients back off further by themselves


class ReplicaState(enum.Enum):
    """Life of a replica, in order."""

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    DEAD = "dead"


_REFUSALS = {
    ReplicaState.STARTING: "The server is starting; try again in a moment.",
    ReplicaState.DRAINING: "The server is shutting down and takes no new requests; try again.",
    ReplicaState.DEAD: "The engine has stopped and is being replaced; try again.",
}


class Ticket:
    """A request's `num_choices` places of an `Admission`; `release` gives them back once, however often called."""

    def __init__(self, admission: "Admission", num_choices: int) -> None:
        self._admission = admission
        self._num_choices = num_choices

    def release(self) -> None:
        """Give the places back."""
        if self._num_choices:
            self._admission._release(self._num_choices)
            self._num_choices = 0


class Admission:
    """Counts admitted choices (sequences in the engine) against `max_num_seqs + queue_limit`.

    Args:
        max_num_seqs: sequences the engine runs at once.
        queue_limit: sequences that may wait beyond those.
    """

    def __init__(self, *, max_num_seqs: int, queue_limit: int) -> None:
        self._max_num_seqs = max_num_seqs
        self._queue_limit = queue_limit
        self._num_admitted = 0
        self._num_requests = 0
        self.num_rejected = 0
        self.state = ReplicaState.STARTING

    @property
    def capacity(self) -> int:
        """Choices that may be in the replica at once."""
        return self._max_num_seqs + self._queue_limit

    @property
    def num_admitted(self) -> int:
        """Choices in the replica now."""
        return self._num_admitted

    @property
    def num_requests(self) -> int:
        """Requests in the replica now, each with one choice or more."""
        return self._num_requests

    def set_queue_limit(self, queue_limit: int) -> None:
        """Change the limit for requests to come; admitted ones stay."""
        self._queue_limit = queue_limit

    def check_available(self) -> None:
        """Raises ApiError (503 with Retry-After) unless the replica is ready."""
        if self.state is not ReplicaState.READY:
            raise unavailable(_REFUSALS[self.state], retry_after_s=RETRY_AFTER_S)

    def check_fits(self, num_choices: int, *, param: str) -> None:
        """Raises ApiError (400 naming `param`) if a request for `num_choices` could never be admitted."""
        if num_choices > self.capacity:
            raise invalid(
                param,
                f"the request asks for {num_choices} completions, this server holds at most {self.capacity} at once; "
                "split the request",
            )

    def admit(self, num_choices: int, *, param: str = "n") -> Ticket:
        """Take `num_choices` places at once.

        Raises:
            ApiError: 503 if the replica is not ready, 429 with Retry-After if the places are taken, 400 naming `param`
                if the request could never fit.
        """
        self.check_available()
        self.check_fits(num_choices, param=param)
        if self._num_admitted + num_choices > self.capacity:
            self.num_rejected += 1
            raise ApiError(
                429,
                f"The server is at its limit of {self.capacity} running and waiting completions; try again.",
                code="rate_limit_exceeded",
                retry_after_s=RETRY_AFTER_S,
            )
        self._num_admitted += num_choices
        self._num_requests += 1
        return Ticket(self, num_choices)

    def _release(self, num_choices: int) -> None:
        self._num_admitted -= num_choices
        self._num_requests -= 1
        assert self._num_admitted >= 0, "more places were given back than taken"
