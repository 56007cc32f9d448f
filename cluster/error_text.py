"""An error in a line of a log, for those whose traceback would tell nobody more."""


def first_line(error: BaseException) -> str:
    """Type and first line of the message: Ray's go on with the traceback of another process."""
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"
