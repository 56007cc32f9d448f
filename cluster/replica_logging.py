"""What the packages of this project log in a replica goes where Ray Serve's own lines of the replica go."""

import logging

PACKAGES = ("cluster", "workers", "engine")
_SERVE = "ray.serve"


def log_with_serve() -> None:
    """From here on: the level, the files and the form that Serve gave this process's lines.

    Without it only warnings are seen, and bare. At INFO (`dflash serve --verbose`, Serve's default elsewhere) they say
    what each rank does while the engine starts.
    """
    serve = logging.getLogger(_SERVE)
    if not serve.handlers:
        return  # no replica: a test's, or a script's own logging stays as it is
    for name in PACKAGES:
        logger = logging.getLogger(name)
        logger.handlers = list(serve.handlers)
        logger.setLevel(serve.level)
        logger.propagate = False
