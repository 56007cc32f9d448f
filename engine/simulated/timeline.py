"""`DeviceTimeline`: when a simulated device's steps end, and the waiting for it."""

import time
from collections.abc import Callable


class DeviceTimeline:
    """Steps one after the other, as on a device: each starts when it is queued or when the one before it ends.

    Ends are deadlines, so a sleep that takes too long does not delay the steps behind it; a host that queues late does.
    speed: simulated seconds in a second of real time. busy_s: simulated seconds of all steps so far.
    """

    def __init__(
        self, *, speed: float, now: Callable[[], float] = time.monotonic, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        self._speed = speed
        self._now = now
        self._sleep = sleep
        self._free_at_s = now()
        self._overslept_s = 0.0
        self.busy_s = 0.0

    def queue(self, duration_s: float) -> float:
        """Adds a step of simulated seconds. Returns its deadline."""
        # A host that was woken late would have queued this step earlier.
        queued_at_s = self._now() - self._overslept_s
        self._free_at_s = max(queued_at_s, self._free_at_s) + duration_s / self._speed
        self.busy_s += duration_s
        return self._free_at_s

    def wait(self, deadline_s: float) -> None:
        """Returns at the deadline, or at once if it has passed."""
        self._overslept_s = 0.0
        while (left_s := deadline_s - self._now()) > 0.0:
            self._sleep(left_s)
            self._overslept_s = max(0.0, self._now() - deadline_s)
