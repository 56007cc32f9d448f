"""Why engines died, from replicas to the terminal of `dflash serve`.

Serve knows that a replica ended, not why. A replica leaves its root cause in the cluster's key-value store, which
outlives its process; the command takes it from there. One note a replica rank, so notes that nobody takes stay few.
"""

_NAMESPACE = b"dflash"
_MAX_CAUSE_CHARS = 2000


def leave(app: str, rank: int, cause: str) -> None:
    """Leave the root cause of the death of replica `rank` of an application. Blocks for a round trip to the head."""
    from ray.experimental import internal_kv

    internal_kv._internal_kv_put(
        _key(app, rank), cause[:_MAX_CAUSE_CHARS].encode(), overwrite=True, namespace=_NAMESPACE
    )


def take(app: str) -> list[str]:
    """The causes left since the last call. Blocks for a round trip to the head."""
    from ray.experimental import internal_kv

    causes = []
    for key in sorted(internal_kv._internal_kv_list(_key(app), namespace=_NAMESPACE)):
        cause = internal_kv._internal_kv_get(key, namespace=_NAMESPACE)
        internal_kv._internal_kv_del(key, namespace=_NAMESPACE)
        if cause is not None:
            causes.append(cause.decode())
    return causes


def _key(app: str, rank: int | None = None) -> bytes:
    return f"death/{app}/{'' if rank is None else rank}".encode()
