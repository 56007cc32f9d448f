"""The version of this distribution."""

import importlib.metadata

DISTRIBUTION = "dflash-serve"


def version() -> str:
    """The installed distribution's version; "0+unknown" when run from a source tree that was not installed."""
    try:
        return importlib.metadata.version(DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        return "0+unknown"
