"""The rotary embedding of a checkpoint: types, their parameters, and the parsing of both spellings."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engine.config.json_fields import number, present

DEFAULT_ROPE_THETA = 10_000.0  # of all supported architectures in transformers

# Rope type -> (required parameters, optional ones).
_ROPE_PARAMETERS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "default": ((), ()),
    "linear": (("factor",), ()),
    "llama3": (("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"), ()),
    "yarn": (
        ("factor", "original_max_position_embeddings"),
        ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
    ),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class RopeConfig:
    """Rotary embedding. rope_type: "default", "llama3", "linear", "yarn", ..; parameters: the other keys."""

    theta: float
    rope_type: str = "default"
    parameters: tuple[tuple[str, float], ...] = ()


def parse_rope(raw: Mapping[str, Any], where: str) -> RopeConfig:
    """`rope_parameters` (transformers 5) or `rope_theta` with `rope_scaling` (earlier).

    Raises:
        ValueError: a type this engine does not implement, or parameters that do not belong to it.
    """
    key = "rope_parameters" if raw.get("rope_parameters") else "rope_scaling"
    values = raw.get(key) or {}
    if not isinstance(values, Mapping):
        raise ValueError(f"{where}: {key} must be an object, got {values!r}.")
    _refuse_two_kinds(raw, where)
    rope_type = values.get("rope_type", values.get("type", "default"))
    if rope_type not in _ROPE_PARAMETERS:
        raise ValueError(
            f"{where}: {key}.rope_type '{rope_type}' is not supported by this version; "
            f"supported: {', '.join(_ROPE_PARAMETERS)}."
        )
    for level, name in ((values, f"{key}.partial_rotary_factor"), (raw, "partial_rotary_factor")):
        if level.get("partial_rotary_factor") not in (None, 1, 1.0):
            raise ValueError(f"{where}: {name}={level['partial_rotary_factor']} is not supported by this version.")
    theta = values.get("rope_theta", raw.get("rope_theta", DEFAULT_ROPE_THETA))
    required, optional = _ROPE_PARAMETERS[rope_type]
    given = present(values)
    if "original_max_position_embeddings" in required and "original_max_position_embeddings" not in given:
        # transformers takes the top level's value, else max_position_embeddings.
        fallback = raw.get("original_max_position_embeddings") or raw.get("max_position_embeddings")
        if fallback is not None:
            given["original_max_position_embeddings"] = fallback
    missing = [name for name in required if name not in given]
    if missing:
        raise ValueError(f"{where}: {key}.{missing[0]} is missing; rope_type '{rope_type}' needs it.")
    known = {"rope_type", "type", "rope_theta", "partial_rotary_factor", *required, *optional}
    # transformers fills in the old context length for every type; it has no effect on the default one.
    known |= {"original_max_position_embeddings"}
    unknown = sorted(set(given) - known)
    if unknown:
        raise ValueError(f"{where}: {key}.{unknown[0]} is not supported by this version for rope_type '{rope_type}'.")
    numbers = [(name, given[name]) for name in (*required, *optional) if name in given]
    return RopeConfig(
        theta=number(theta, "rope_theta", where),
        rope_type=rope_type,
        parameters=tuple(
            (name, float(value) if name == "truncate" else number(value, f"{key}.{name}", where))
            for name, value in numbers
        ),
    )


def _refuse_two_kinds(raw: Mapping[str, Any], where: str) -> None:
    """A checkpoint with both spellings must mean one thing by them."""
    new, old = raw.get("rope_parameters"), raw.get("rope_scaling")
    if not isinstance(new, Mapping) or not isinstance(old, Mapping) or not new or not old:
        return
    kinds = [values.get("rope_type", values.get("type", "default")) for values in (new, old)]
    if kinds[0] != kinds[1]:
        raise ValueError(
            f"{where}: rope_parameters.rope_type '{kinds[0]}' and rope_scaling.rope_type '{kinds[1]}' contradict each "
            "other; keep one of the two keys."
        )
