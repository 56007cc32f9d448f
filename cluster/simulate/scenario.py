"""The scenario file of `dflash simulate`: its schema, its rules and its loader.

A scenario says what the cluster is (replicas, step tables, engine limits), what comes in (classes of requests, their
mix, arrivals) and what goes wrong (noise, lost reports, a controller that is down). Nothing has a hidden default that
changes a result: what is left out is absent. `cluster/simulate/README.md` describes every key.
"""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from cluster.config_errors import ConfigError, describe_problems
from engine.config.yaml_file import read_yaml

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Probability = Annotated[float, Field(ge=0, le=1)]


class Part(BaseModel):
    """A section of a scenario: unknown keys are errors, values do not change."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Lengths(Part):
    """Log-normal numbers of tokens, rounded, cut at the bounds; spread 0 is the median for everybody."""

    median: Positive
    spread: NotNegative = 0.0
    at_least: Annotated[int, Field(ge=1)] = 1
    at_most: Annotated[int, Field(ge=1)]

    @model_validator(mode="after")
    def _bounds(self) -> "Lengths":
        if not self.at_least <= self.median <= self.at_most:
            raise ValueError(f"median: must lie between at_least and at_most, got {self.median}")
        return self


class RequestClass(Part):
    """A kind of request.

    hazards: chance that draft 1, 2, .. is right if all before it were, for a request in the middle of its class; the
    last one holds for later positions. spread, wobble: standard deviations of the log-odds' shift between requests, and
    of a further shift that wanders within one; memory: its correlation from one token to the next.
    """

    hazards: Annotated[tuple[Annotated[float, Field(gt=0, lt=1)], ...], Field(min_length=1)]
    spread: NotNegative = 0.0
    wobble: NotNegative = 0.0
    memory: Annotated[float, Field(ge=0, lt=1)] = 0.0
    prompt: Lengths
    output: Lengths

    @model_validator(mode="after")
    def _two_tokens(self) -> "RequestClass":
        if self.output.at_least < 2:
            raise ValueError("output.at_least: must be >= 2; the first token comes from the prompt's own step")
        return self


class Level(Part):
    """A value from a time on."""

    at_s: NotNegative
    value: NotNegative


class Wave(Part):
    """low + (high - low) (1 - cos(2 pi t / period)) / 2."""

    low: NotNegative
    high: NotNegative
    period_s: Positive


Curve = NotNegative | Wave | Annotated[tuple[Level, ...], Field(min_length=1)]


class MixPhase(Part):
    """Shares of the classes from a time on; they need not sum to 1."""

    at_s: NotNegative
    shares: dict[str, NotNegative]


class Mix(Part):
    """Phases in order; with repeat_s they start over every so many seconds."""

    phases: Annotated[tuple[MixPhase, ...], Field(min_length=1)]
    repeat_s: Positive | None = None

    @model_validator(mode="after")
    def _ordered(self) -> "Mix":
        times = [phase.at_s for phase in self.phases]
        if times[0] != 0 or times != sorted(set(times)):
            raise ValueError(f"phases: at_s must ascend strictly from 0, got {times}")
        if self.repeat_s is not None and self.repeat_s <= times[-1]:
            raise ValueError(f"repeat_s: must be after the last phase's start, got {self.repeat_s}")
        return self


class Poisson(Part):
    """Open loop. rate: requests per second of the whole cluster."""

    kind: Literal["poisson"]
    rate: Curve


class Bursty(Part):
    """Open loop, a Poisson process whose rate is `factor` times higher in bursts; the mean stays `rate`.

    burst_s, calm_s: mean lengths of both states, exponential.
    """

    kind: Literal["bursty"]
    rate: Curve
    factor: Annotated[float, Field(gt=1)]
    burst_s: Positive
    calm_s: Positive


class Closed(Part):
    """Closed loop: every replica has `concurrency` requests at any time, each followed by the next.

    turnaround_s: from the end of a request to the arrival of the one that follows it.
    """

    kind: Literal["closed"]
    concurrency: Curve
    turnaround_s: NotNegative = 0.0


Arrivals = Annotated[Poisson | Bursty | Closed, Field(discriminator="kind")]


class ReplicaGroup(Part):
    """Replicas alike.

    steps: step table, a path relative to the scenario file. from_s, until_s: when they join, and when they take no more
    requests. slowdown: their steps take so many times the table's. serves: the one class they get; default: the mix.
    """

    count: Annotated[int, Field(ge=1)] = 1
    steps: str
    from_s: NotNegative = 0.0
    until_s: Positive | None = None
    slowdown: Positive = 1.0
    serves: str | None = None

    @model_validator(mode="after")
    def _lives(self) -> "ReplicaGroup":
        if self.until_s is not None and self.until_s <= self.from_s:
            raise ValueError(f"until_s: must be after from_s, got {self.until_s}")
        return self


class Engine(Part):
    """Limits of one replica's engine, with the meaning of the config file's keys of the same names.

    drafter_block: positions the drafter's block takes in the KV cache behind a request. pipeline_depth: steps launched
    before a result is read; at 1 a row that has ended takes part in one more step, and a request that arrives during a
    step cannot be in the next one, which is launched by then.
    """

    max_num_seqs: Annotated[int, Field(ge=1, le=1024)]
    max_num_batched_tokens: Annotated[int, Field(ge=1)]
    kv_blocks: Annotated[int, Field(ge=1)]
    block_size: Annotated[int, Field(ge=1)] = 16
    drafter_block: Annotated[int, Field(ge=1)] = 16
    pipeline_depth: Annotated[int, Field(ge=0, le=1)] = 0


class StepNoise(Part):
    """deviation: of the logarithm of a step's time. stragglers: share of steps that take `straggler_factor` as long."""

    deviation: NotNegative = 0.0
    stragglers: Probability = 0.0
    straggler_factor: Annotated[float, Field(ge=1)] = 1.0


class Outage(Part):
    """The controller is gone between two times; it comes back without memory."""

    from_s: NotNegative
    until_s: Positive


class Network(Part):
    """The way between replicas and controller. Delays are means of exponential ones, in seconds.

    report_jitter_s: each report is late by up to so much. lost, doubled: shares of the reports.
    """

    report_delay_s: NotNegative = 0.0
    report_jitter_s: NotNegative = 0.0
    push_delay_s: NotNegative = 0.0
    lost: Probability = 0.0
    doubled: Probability = 0.0
    controller_down: tuple[Outage, ...] = ()


class Bars(Part):
    """What must hold: ratios of scores, means over the seeds.

    regret: largest 1 - ours / clairvoyant. recovered: smallest share of the gap between clairvoyant and best static
    schedule, asked for only where that gap is above 3 %.
    """

    over_static: Positive | None = None
    over_per_replica: Positive | None = None
    regret: Positive | None = None
    recovered: Positive | None = None


class Scenario(Part):
    """A whole scenario file. Build one with `load_scenario`."""

    description: str
    duration_s: Positive
    seeds: Annotated[tuple[int, ...], Field(min_length=1)] = (1, 2, 3, 4, 5)
    draft_lens: Annotated[tuple[int, ...], Field(min_length=2)] = (0, 1, 2, 3, 5, 7, 11, 15)
    configured_schedule: dict[Annotated[int, Field(ge=1)], Annotated[int, Field(ge=0)]]
    replicas: Annotated[tuple[ReplicaGroup, ...], Field(min_length=1)]
    engine: Engine
    classes: Annotated[dict[str, RequestClass], Field(min_length=1)]
    mix: Mix
    arrivals: Arrivals
    step_noise: StepNoise = StepNoise()
    network: Network = Network()
    cold_replicas_s: Positive | None = None
    bars: Bars = Bars()

    @model_validator(mode="after")
    def _between_sections(self) -> "Scenario":
        lens = self.draft_lens
        if lens[0] != 0 or list(lens) != sorted(set(lens)):
            raise ValueError(f"draft_lens: must ascend strictly and start with 0, got {list(lens)}")
        for bound, draft_len in self.configured_schedule.items():
            if draft_len not in lens:
                raise ValueError(f"configured_schedule[{bound}]: {draft_len} is not one of draft_lens {list(lens)}")
        engine = self.engine
        if engine.drafter_block <= lens[-1]:
            raise ValueError(
                f"engine.drafter_block: must be above the longest draft, {lens[-1]}, got {engine.drafter_block}"
            )
        rows = engine.max_num_seqs * (lens[-1] + 1)
        if rows > engine.max_num_batched_tokens:
            raise ValueError(
                f"engine.max_num_batched_tokens: {engine.max_num_seqs} rows of {lens[-1] + 1} tokens are {rows}; the "
                "simulator does not split a decode batch"
            )
        for index, phase in enumerate(self.mix.phases):
            for name in phase.shares:
                self._check_class(f"mix.phases[{index}].shares", name)
            if not sum(phase.shares.values()):
                raise ValueError(f"mix.phases[{index}].shares: at least one must be above 0")
        for index, group in enumerate(self.replicas):
            if group.serves is not None:
                self._check_class(f"replicas[{index}].serves", group.serves)
        if self.cold_replicas_s is not None and not any(group.from_s > 0 for group in self.replicas):
            raise ValueError("cold_replicas_s: no replica joins later; give one a from_s or remove the key")
        slots = engine.kv_blocks * engine.block_size
        for name, kind in self.classes.items():
            needed = kind.prompt.at_most + kind.output.at_most + lens[-1] + 1 + engine.drafter_block
            if needed > slots:
                raise ValueError(f"engine.kv_blocks: one request of class {name} may need {needed} slots of {slots}")
        return self

    def _check_class(self, where: str, name: str) -> None:
        if name not in self.classes:
            raise ValueError(f"{where}: there is no class {name!r}; classes are {', '.join(self.classes)}")


def load_scenario(path: Path) -> Scenario:
    """Reads and checks a scenario file. Step tables become absolute paths.

    Raises:
        ConfigError: every problem with its key and what is wrong. OSError: the file cannot be read.
    """
    try:
        values = read_yaml(path)
    except ValueError as error:
        raise ConfigError(str(path), [str(error)]) from error
    if not isinstance(values, dict):
        raise ConfigError(str(path), ["the file: must be a section of keys"])
    try:
        scenario = Scenario.model_validate(values)
    except ValidationError as error:
        raise ConfigError(str(path), describe_problems(error, Scenario)) from None
    groups = tuple(
        group.model_copy(update={"steps": str((path.parent / group.steps).resolve())}) for group in scenario.replicas
    )
    for index, group in enumerate(groups):
        if not Path(group.steps).is_file():
            raise ConfigError(str(path), [f"replicas[{index}].steps: no such file: {group.steps}"])
    return scenario.model_copy(update={"replicas": groups})
