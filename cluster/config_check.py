"""What `dflash serve` would say about a config on this machine, without starting anything: `dflash config check`.

The loader (`cluster.config`) checks the file; here its models and this machine are looked at.
"""

from cluster.config import ClusterConfig, in_config_terms


def check_local_cpus(config: ClusterConfig, num_cpus: int) -> None:
    """Raises ValueError if the replicas reserve more CPUs than a Ray on this machine would have."""
    deployment = config.deployment
    num_replicas = _num_replicas(config)
    tensor_parallel_size = config.engine.tensor_parallel_size
    needed = num_replicas * tensor_parallel_size * deployment.cpus
    if needed > num_cpus:
        raise ValueError(
            f"deployment.cpus: {num_replicas} replica(s) of {tensor_parallel_size} rank(s) with {deployment.cpus:g} "
            f"CPUs each reserve {needed:g} CPUs, and this machine has {num_cpus}; lower deployment.cpus, "
            "deployment.replicas or engine.tensor_parallel_size"
        )


def num_gpus_needed(config: ClusterConfig) -> int:
    """By the replicas that a start waits for."""
    return _num_replicas(config) * config.engine.tensor_parallel_size if config.engine.device == "cuda" else 0


def _num_replicas(config: ClusterConfig) -> int:
    scaling = config.deployment.autoscaling
    return max(scaling.min_replicas, 1) if scaling is not None else config.deployment.num_replicas or 1


def check_models(config: ClusterConfig, *, download: bool) -> str | None:
    """Resolve the engine's config as a start would: refused options, checkpoints, whether target and drafter fit.

    download: fetch and convert what is missing. Without it Hugging Face ids are checked by their small files.

    Returns:
        What could not be checked because it would have to be downloaded first; None if nothing.

    Raises:
        ValueError: what a start would fail with, in the config's terms.
    """
    from engine.config.resolve import resolve_engine_config
    from engine.weights.source import SourceNotHereError, fetch, fetch_config

    try:
        resolve_engine_config(**config.engine_arguments(), fetch_source=fetch if download else fetch_config)
    except SourceNotHereError as missing:
        return f"{missing}; whether model and drafter fit is checked with --download, or when it is served"
    except ValueError as error:
        raise ValueError(in_config_terms(str(error))) from error
    return None
