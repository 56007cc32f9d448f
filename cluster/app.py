"""`build(args)`: the Serve application of a config, for `serve run`, `serve deploy` and the `dflash` command."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ray import serve
from ray.serve import Application
from ray.serve.config import AutoscalingConfig

from cluster.config import FABRICATIONS, ClusterConfig, ConfigError, load_config, parse_config
from cluster.config_sections import DeploymentSection
from cluster.model_server import HEALTH_PERIOD_S, ModelServer
from cluster.replica_engine import EngineStarter, start_engine
from workers.placement import rank_bundles

DEPLOYMENT = "ModelServer"
ALLOW_SIMULATED = "allow_simulated"
_SPARE_REQUESTS = 32  # health, metrics and model lists are answered while the completions' places are taken
_STOP_MARGIN_S = 15.0  # beyond drain_s: the replica notices that it is stopped, answers what it cuts, ends its ranks
_STOP_POLL_S = 0.5
_MAX_START_ATTEMPTS = 3  # a config that cannot work should say so soon


def build(args: str | Path | Mapping[str, Any] | ClusterConfig) -> Application:
    """The application of one config. Exactly one parameter: Serve refuses a builder with more.

    Args:
        args: a config file's path; `{"config": path}`, as `serve run cluster.app:build config=FILE` gives it; the
            config's mapping, as `args` in a Serve config file gives it (relative paths count from the working
            directory); or a loaded config. The mappings may also hold `allow_simulated: true`, without which a
            config whose tokens mean nothing (a simulated device, synthetic acceptance) is refused.

    Raises:
        ConfigError: the config is not valid; all problems are listed.
    """
    allow_simulated = False
    if isinstance(args, Mapping):
        given = dict(args)
        allow_simulated = _read_flag(given.pop(ALLOW_SIMULATED, False))
        args = given
    config = read_config(args)
    if config.fabrication is not None and not allow_simulated:
        raise ConfigError(
            "args",
            [
                f"{FABRICATIONS[config.fabrication]}; if that is meant, add {ALLOW_SIMULATED}: true to the "
                "application's args (dflash serve: --allow-simulated)"
            ],
        )
    return application(config, start_engine)


def _read_flag(value: object) -> bool:
    """true or false, also as text: `serve run ... allow_simulated=true` gives text."""
    flags = {True: True, False: False, "true": True, "false": False}
    if not isinstance(value, bool | str) or value not in flags:
        raise ConfigError("args", [f"{ALLOW_SIMULATED}: must be true or false, got {value!r}"])
    return flags[value]


def application(config: ClusterConfig, starter: EngineStarter) -> Application:
    """The application whose replicas get their engine from `starter`."""
    deployment = config.deployment
    deploy = serve.deployment(
        name=DEPLOYMENT,
        **_scale(deployment),
        max_ongoing_requests=config.engine.max_num_seqs + deployment.queue_limit + _SPARE_REQUESTS,
        max_queued_requests=-1,  # admission answers in OpenAI's form
        max_constructor_retry_count=_MAX_START_ATTEMPTS,
        graceful_shutdown_timeout_s=deployment.drain_s + _STOP_MARGIN_S,
        graceful_shutdown_wait_loop_s=_STOP_POLL_S,
        health_check_period_s=HEALTH_PERIOD_S,
        health_check_timeout_s=deployment.stall_timeout_s,
        placement_group_bundles=rank_bundles(
            device=config.engine.device,
            tensor_parallel_size=config.engine.tensor_parallel_size,
            cpus_per_rank=deployment.cpus,
        ),
        placement_group_strategy="STRICT_PACK",
        # The ranks own the CPUs and GPUs of the group; the replica lives beside rank 0.
        ray_actor_options={"num_cpus": 0},
        user_config=live_values(config),
    )
    return deploy(ModelServer).bind(without_live_values(config), starter)


def read_config(args: str | Path | Mapping[str, Any] | ClusterConfig) -> ClusterConfig:
    """The config that `build`'s argument means. Raises ConfigError."""
    if isinstance(args, ClusterConfig):
        return args
    if isinstance(args, str | Path):
        return load_config(args)
    if set(args) == {"config"}:
        return load_config(args["config"])
    return parse_config(dict(args), base_dir=Path.cwd(), where="args")


def live_values(config: ClusterConfig) -> dict[str, Any]:
    """What `ModelServer.reconfigure` takes over in a running replica (JSON values)."""
    speculative = config.speculative_config
    schedule = None if speculative is None else speculative.draft_len_schedule
    return {
        "queue_limit": config.deployment.queue_limit,
        "drain_s": config.deployment.drain_s,
        "draft_len_schedule": None if schedule is None else {str(key): value for key, value in schedule.items()},
    }


def without_live_values(config: ClusterConfig) -> dict[str, Any]:
    """The constructor's config. It lacks the live values, so that changing one of them restarts no replica."""
    plain = config.to_plain()
    for key in ("queue_limit", "drain_s"):
        plain["deployment"].pop(key)
    if plain["speculative_config"] is not None:
        plain["speculative_config"].pop("draft_len_schedule", None)
    return plain


def _scale(deployment: DeploymentSection) -> dict[str, Any]:
    autoscaling = deployment.autoscaling
    if autoscaling is None:
        return {"num_replicas": deployment.num_replicas}
    return {
        "autoscaling_config": AutoscalingConfig(
            min_replicas=autoscaling.min_replicas,
            max_replicas=autoscaling.max_replicas,
            target_ongoing_requests=autoscaling.target_ongoing_requests,
            upscale_delay_s=autoscaling.upscale_delay_s,
            downscale_delay_s=autoscaling.downscale_delay_s,
        )
    }
