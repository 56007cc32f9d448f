"""What can go wrong between a replica and its ranks."""


class EngineDeadError(RuntimeError):
    """The engine is gone and will not come back; `str()` is the root cause in one line.

    details: the failing rank's traceback, or what the operating system said; may be empty.
    """

    def __init__(self, cause: str, details: str = "") -> None:
        super().__init__(cause, details)
        self.cause = cause
        self.details = details

    def __str__(self) -> str:
        return self.cause


class EngineClosedError(EngineDeadError):
    """The engine was ended on purpose; nothing failed."""


class EngineStartError(EngineDeadError):
    """The engine did not come up; everything it had taken was given back."""


class ProtocolError(RuntimeError):
    """Bytes on the socket that are not our protocol: a frame over the limit, cut off, or not a known message."""
