"""The operator's order of an application, in the cluster's key-value store: what was acknowledged survives a controller
that dies before its replicas have heard of it."""

import logging

import msgspec

from cluster.control.messages import Order

logger = logging.getLogger(__name__)

_NAMESPACE = b"dflash"


def keep(app: str, deployment: str, order: Order) -> None:
    """In place of the one before. Blocks for a round trip to the head."""
    from ray.experimental import internal_kv

    internal_kv._internal_kv_put(
        _key(app, deployment), msgspec.msgpack.encode(order), overwrite=True, namespace=_NAMESPACE
    )


def recall(app: str, deployment: str) -> Order | None:
    """The order kept last; one of another version's form is told in the log and counts as none, since a controller that
    cannot start would be worse. Blocks for a round trip to the head."""
    from ray.experimental import internal_kv

    kept = internal_kv._internal_kv_get(_key(app, deployment), namespace=_NAMESPACE)
    if kept is None:
        return None
    try:
        return msgspec.msgpack.decode(kept, type=Order)
    except msgspec.MsgspecError as error:
        logger.warning("the order kept for %s:%s cannot be read and is dropped: %s", app, deployment, error)
        return None


def forget(app: str, deployment: str) -> None:
    """The application is deleted. Blocks for a round trip to the head."""
    from ray.experimental import internal_kv

    internal_kv._internal_kv_del(_key(app, deployment), namespace=_NAMESPACE)


def _key(app: str, deployment: str) -> bytes:
    return f"order/{app}/{deployment}".encode()
