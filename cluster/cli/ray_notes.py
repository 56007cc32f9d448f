"""What Ray writes to this process's standard output by itself, without what the terminal is told better elsewhere.

Ray prints notes of its node daemon ("(raylet) ...") in the driver whatever its logging options say. Of a rank or a
replica that died it tells, once for each of them and in a paragraph, that it does not know why.
"""

import re
from typing import TextIO

_NOISE = re.compile(
    r"A worker died or was killed while executing a task by an unexpected system error"
    r"|Task \S+ failed\. There are (infinite|\d+) retries remaining"
)


class RayNotes:
    """Stands in for `sys.stdout`: passes whole lines on to `out`, except notes that only repeat that something died."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._line = ""

    def write(self, text: str) -> int:
        """Take text; what is not a whole line yet is kept."""
        *lines, self._line = (self._line + text).split("\n")
        for line in lines:
            if "(raylet" not in line or not _NOISE.search(line):
                self._out.write(line + "\n")
        return len(text)

    def flush(self) -> None:
        """Pass on what was written so far in whole lines."""
        self._out.flush()

    def isatty(self) -> bool:
        """Ray colours its prefixes on a terminal."""
        return self._out.isatty()

    def fileno(self) -> int:
        """The descriptor behind it, for those who write to it themselves."""
        return self._out.fileno()
