"""The one config file of a deployment: its schema, its loader and what the engine is told from it.

Owns the rules between sections and the meaning of relative paths. Knows no checkpoint: what only a loaded model can
decide (number of heads, taps, K against the drafter's block) is checked by `engine.config.resolve`.
"""

import re
from enum import Enum
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError, model_validator

from cluster.config_errors import ConfigError, describe_problems
from cluster.config_sections import (
    ControllerSection,
    DeploymentSection,
    EngineSection,
    HttpSection,
    ModelSection,
    Section,
    SimulationSection,
)
from cluster.control.messages import SHADOW_TIME_SHARE
from engine.config.decoding import DFlashDecodingConfig
from engine.config.yaml_file import read_yaml
from engine.simulated.profile import SimulationOptions

# Keys of `speculative_config` that a running application takes over; the class itself belongs to the engine.
LIVE_SPECULATIVE_KEYS = frozenset({"draft_len_schedule"})

# What to tell who is about to serve tokens that mean nothing, by `ClusterConfig.fabrication`.
FABRICATIONS = {
    "simulated": "engine.device: simulated answers every request with random tokens",
    "synthetic": "engine.synthetic_acceptance_length: drafts are accepted by decree, so answers mean nothing",
}


class ClusterConfig(Section):
    """A whole config file. Build one with `load_config` or `parse_config`, which also resolve relative paths."""

    model: ModelSection = Field(description="What is served.")
    speculative_config: DFlashDecodingConfig | None = Field(
        default=None, description="DFlash speculative decoding, with TensorRT-LLM's keys. Default: plain decoding."
    )
    engine: EngineSection = Field(default_factory=EngineSection, description="How one replica runs the model.")
    simulation: SimulationSection | None = Field(
        default=None, description="The simulated device; only with engine.device: simulated, which needs it."
    )
    deployment: DeploymentSection = Field(
        default_factory=DeploymentSection, description="How Ray Serve runs the replicas."
    )
    controller: ControllerSection = Field(
        default_factory=ControllerSection, description="Cluster-wide control of the draft length."
    )
    http: HttpSection = Field(default_factory=HttpSection, description="The HTTP listener.")

    @model_validator(mode="after")
    def _choices_need_a_drafter(self) -> "ClusterConfig":
        if self.speculative_config is None:
            for key in ("draft_len_choices", "draft_block_width", "draft_sampling", "synthetic_acceptance_length"):
                if getattr(self.engine, key) is not None:
                    raise ValueError(f"engine.{key}: has no effect without speculative_config; remove it")
        return self

    @model_validator(mode="after")
    def _dummy_weights_are_meant(self) -> "ClusterConfig":
        formats: dict[str, str] = {"model.load_format": self.model.load_format}
        if self.speculative_config is not None:
            formats["speculative_config.load_format"] = self.speculative_config.load_format or "auto"
        dummies = [key for key, value in formats.items() if value == "dummy"]
        if dummies and not self.engine.unsafe_dummy_weights:
            raise ValueError(
                f"{dummies[0]}: 'dummy' serves random weights; set engine.unsafe_dummy_weights: true if that is meant"
            )
        return self

    @model_validator(mode="after")
    def _controller_needs_a_drafter(self) -> "ClusterConfig":
        if self.controller.enabled and self.speculative_config is None:
            raise ValueError("controller.enabled: has no effect without speculative_config; remove it")
        return self

    @model_validator(mode="after")
    def _simulation_is_the_device(self) -> "ClusterConfig":
        if self.is_simulated and self.simulation is None:
            raise ValueError("engine.device: simulated needs the section simulation: steps and acceptance")
        if self.simulation is not None and not self.is_simulated:
            raise ValueError("simulation: only applies with engine.device: simulated; remove it")
        return self

    @property
    def is_simulated(self) -> bool:
        """No model runs; tokens are random."""
        return self.engine.device == "simulated"

    @property
    def fabrication(self) -> str | None:
        """Why the tokens mean nothing, as responses say it; None: they are the model's."""
        if self.is_simulated:
            return "simulated"
        return None if self.engine.synthetic_acceptance_length is None else "synthetic"

    @property
    def served_name(self) -> str:
        """The model's name in the API."""
        return self.model.served_name or default_served_name(self.model.source)

    def engine_arguments(self) -> dict[str, Any]:
        """Keyword arguments for `engine.config.resolve.resolve_engine_config`."""
        cache = self.engine.kv_cache
        simulation = None if self.simulation is None else SimulationOptions(**self.simulation.model_dump())
        return {
            "model": self.model.source,
            "speculative_config": self.speculative_config,
            "revision": self.model.revision,
            "dtype": self.model.dtype,
            "max_model_len": self.model.max_model_len,
            "tensor_parallel_size": self.engine.tensor_parallel_size,
            "drafter_tensor_parallel": self.engine.drafter_tensor_parallel,
            "hidden_state_gather": self.engine.hidden_state_gather,
            "drafter_weights": self.engine.drafter_weights,
            "device": self.engine.device,
            "threads": self.engine.threads,
            "max_num_seqs": self.engine.max_num_seqs,
            "max_num_batched_tokens": self.engine.max_num_batched_tokens,
            "block_size": cache.block_size,
            "num_blocks": cache.blocks,
            "kv_cache_memory_bytes": cache.memory,
            "pipeline_depth": self.engine.pipeline_depth,
            "inter_token_target_ms": self.engine.inter_token_target_ms,
            "draft_len_choices": self.engine.draft_len_choices,
            "draft_block_width": self.engine.draft_block_width,
            "synthetic_acceptance_length": self.engine.synthetic_acceptance_length,
            "shadow_time_share": SHADOW_TIME_SHARE if self.controller.enabled and self.speculative_config else 0.0,
            "simulation": simulation,
            "draft_sampling": self.engine.draft_sampling,
            "load_format": self.model.load_format,
        }

    def to_plain(self) -> dict[str, Any]:
        """The config as plain YAML values, every default filled in; `parse_config` of it gives an equal config."""
        values = _plain(self.model_dump())
        speculative = values["speculative_config"]
        if speculative is not None and not speculative["allow_advanced_sampling"]:
            del speculative["allow_advanced_sampling"]  # deprecated: its mere presence is warned about
        return values


def default_served_name(source: str) -> str:
    """API name for a source without `served_name`: a file's stem, a directory's name, or the Hugging Face id."""
    if source.startswith("pypi:"):
        return Path(source.split("#", 1)[0]).stem
    if not _looks_like_path(source):
        return source
    path = Path(source)
    return path.stem if path.suffix == ".gguf" else path.name


# Where the user wrote what `engine.config.resolve` knows under its own argument's name.
_ARGUMENT_PATHS = {
    "model": "model.source",
    "revision": "model.revision",
    "dtype": "model.dtype",
    "load_format": "model.load_format",
    "max_model_len": "model.max_model_len",
    "block_size": "engine.kv_cache.block_size",
    "num_blocks": "engine.kv_cache.blocks",
    "kv_cache_memory_bytes": "engine.kv_cache.memory",
} | {
    name: f"engine.{name}"
    for name in (
        "tensor_parallel_size",
        "drafter_tensor_parallel",
        "hidden_state_gather",
        "drafter_weights",
        "device",
        "threads",
        "max_num_seqs",
        "max_num_batched_tokens",
        "pipeline_depth",
        "inter_token_target_ms",
        "draft_len_choices",
        "draft_block_width",
        "synthetic_acceptance_length",
        "draft_sampling",
    )
}


def in_config_terms(message: str) -> str:
    """An engine error with the argument it starts with replaced by the config's key for it, and those spelled as such
    further on."""
    name, colon, rest = message.partition(":")
    if not colon or name not in _ARGUMENT_PATHS:
        return message
    spelled = r"\b(kv_cache_memory_bytes|num_blocks|block_size|max_model_len|max_num_seqs|max_num_batched_tokens)\b"
    return f"{_ARGUMENT_PATHS[name]}:" + re.sub(r"(?<![.\w])" + spelled, lambda m: _ARGUMENT_PATHS[m[0]], rest)


def load_config(path: str | Path) -> ClusterConfig:
    """Read, validate and resolve a YAML config file.

    Raises:
        ConfigError: the file cannot be read or parsed, or holds one or more problems (all are listed).
    """
    path = Path(path).expanduser()
    try:
        data = read_yaml(path)
    except (OSError, ValueError) as error:
        reason = str(error) if isinstance(error, ValueError) else f"cannot read the config file: {error.strerror}"
        raise ConfigError(str(path), [reason]) from error
    return parse_config(data, base_dir=path.parent, where=str(path))


def parse_config(data: object, *, base_dir: Path, where: str = "config") -> ClusterConfig:
    """Validate a config given as plain values; relative paths in it count from `base_dir`.

    Raises:
        ConfigError: one or more problems; all are listed.
    """
    try:
        config = ClusterConfig.model_validate({} if data is None else data)
    except ValidationError as error:
        problems = describe_problems(error, ClusterConfig)
        raise ConfigError(where, problems + _path_problems(data, base_dir.resolve())) from error
    return _resolve_paths(config, base_dir.resolve(), where)


_SIMULATION_FILES = ("steps", "acceptance")


def _resolve_paths(config: ClusterConfig, base_dir: Path, where: str) -> ClusterConfig:
    problems = _path_problems(config.to_plain(), base_dir)
    if problems:
        raise ConfigError(where, problems)
    model = {"source": _local_source(config.model.source, base_dir)}
    if config.model.chat_template is not None and _is_file_name(config.model.chat_template):
        model["chat_template"] = _local(config.model.chat_template, base_dir).read_text(encoding="utf-8")
    update: dict[str, Any] = {"model": config.model.model_copy(update=model)}
    speculative = config.speculative_config
    if speculative is not None and speculative.speculative_model is not None:
        drafter = _local_source(str(speculative.speculative_model), base_dir)
        update["speculative_config"] = speculative.model_copy(update={"speculative_model": drafter})
    if config.simulation is not None:
        files = {key: str(_local(getattr(config.simulation, key), base_dir)) for key in _SIMULATION_FILES}
        update["simulation"] = config.simulation.model_copy(update=files)
    return config.model_copy(update=update)


def _path_problems(data: object, base_dir: Path) -> list[str]:
    """Paths of a config, valid or not otherwise, that lead to nothing, and a chat template that is none."""
    problems: list[str] = []
    for section, key in (("model", "source"), ("speculative_config", "speculative_model")):
        value = _text_at(data, section, key)
        if not value or value.startswith("pypi:"):
            continue
        reason = _no_path(value, base_dir)
        if reason is not None:
            problems.append(f"{section}.{key}: neither a path nor the name of a model: {reason}")
        elif _looks_like_path(value) and not _local(value, base_dir).exists():
            problems.append(f"{section}.{key}: no such file or directory: {_local(value, base_dir)}")
    for key in _SIMULATION_FILES:
        value = _text_at(data, "simulation", key)
        reason = _no_path(value, base_dir) if value else None
        if reason is not None:
            problems.append(f"simulation.{key}: not a path: {reason}")
        elif value and not _local(value, base_dir).is_file():
            problems.append(f"simulation.{key}: no such file: {_local(value, base_dir)}")
    template = _text_at(data, "model", "chat_template")
    if template:
        problems += _template_problems(template, base_dir)
    return problems


def _no_path(value: str, base_dir: Path) -> str | None:
    """Why nobody can look whether there is something at a path: a null character, a name beyond the file system's
    limit, a directory that may not be read, `~` of nobody. None: it can be seen."""
    try:
        _local(value, base_dir).exists()
    except OSError as error:
        return error.strerror
    except (ValueError, RuntimeError) as error:
        return str(error)
    return None


def _template_problems(template: str, base_dir: Path) -> list[str]:
    from engine.chat_template import check_chat_template  # imports jinja2, which most configs do not need

    if _is_file_name(template):
        reason = _no_path(template, base_dir)
        if reason is not None:
            return [f"model.chat_template: neither a path nor a Jinja template: {reason}"]
        file = _local(template, base_dir)
        if not file.is_file():
            return [f"model.chat_template: no such file: {file}; give a Jinja file or the template itself"]
        try:
            template = file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            return [f"model.chat_template: cannot read {file}: {error}"]
    try:
        check_chat_template(template)
    except ValueError as error:
        return [f"model.{error}"]
    return []


def _text_at(data: object, section: str, key: str) -> str | None:
    inner = data.get(section) if isinstance(data, dict) else None
    value = inner.get(key) if isinstance(inner, dict) else None
    return value if isinstance(value, str) else None


def _local_source(value: str, base_dir: Path) -> str:
    """An absolute path if there is something there, else the text: a Hugging Face id or a `pypi:` source."""
    if value.startswith("pypi:"):
        return value
    path = _local(value, base_dir)
    return str(path) if path.exists() else value


def _local(value: str, base_dir: Path) -> Path:
    return (base_dir / Path(value).expanduser()).resolve()


def _is_file_name(template: str) -> bool:
    """Whether a chat template is given as a file: it has neither Jinja marks nor lines."""
    return not re.search(r"\{[{%#]|\n", template)


def _plain(value: Any) -> Any:
    """Enums, paths and tuples as YAML knows them; keys of mappings stay what they are (batch sizes are integers)."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, Enum):
        return value.value
    return str(value) if isinstance(value, Path) else value


def _looks_like_path(source: str) -> bool:
    return source.startswith(("/", "./", "../", "~")) or source in (".", "..")
