"""`SpeculationGate`: switches drafting off for good when too few drafts are accepted (TensorRT-LLM's semantics)."""

import logging
from collections import deque
from fractions import Fraction

logger = logging.getLogger(__name__)


class SpeculationGate:
    """Rolling average of the acceptance rate over the last `window` speculating steps.

    A sample is one step's accepted drafts over its drafts. From the window-th sample on, an average strictly below
    `threshold` disables speculation, once and permanently, until an operator calls `reset`.
    """

    def __init__(self, *, window: int, threshold: float) -> None:
        if window < 1:
            raise ValueError(f"acceptance_rate_window_size must be >= 1, got {window}")
        self.window = window
        self.threshold = threshold
        self.disabled = False
        self._rates: deque[float] = deque()
        self._sum = Fraction(0)  # exact: a running float sum drifts, and equal to the threshold must not trip

    def record_acceptance_rate(self, rate: float | None, sample_id: int | None = None) -> tuple[bool, float | None]:
        """Adds a sample; None (a step without drafts) is ignored.

        Returns:
            (whether this very sample disabled speculation, the average once the window is full).

        Raises:
            ValueError: a rate outside [0, 1].
        """
        if rate is None or self.disabled:
            return False, None
        if not 0.0 <= rate <= 1.0:
            raise ValueError(f"acceptance_rate must be in the range [0.0, 1.0], got {rate}")
        self._rates.append(rate)
        self._sum += Fraction(rate)
        if len(self._rates) > self.window:
            self._sum -= Fraction(self._rates.popleft())
        if len(self._rates) < self.window:
            return False, None
        average = float(self._sum / self.window)
        if self._sum < Fraction(self.threshold) * self.window:
            self.disabled = True
            logger.info(
                "[SpeculationGate] Speculative decoding disabled: rolling acceptance rate avg %.3f < threshold %s over "
                "last %d iterations",
                average,
                self.threshold,
                self.window,
            )
        return self.disabled, average

    def reset(self) -> None:
        """Speculates again, with an empty window."""
        self.disabled = False
        self._rates.clear()
        self._sum = Fraction(0)
