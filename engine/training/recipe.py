"""What a training run does, in one frozen object."""

from dataclasses import asdict, dataclass
from typing import Any

from engine.training.attention import TILE, Backend
from engine.training.optimizer import OptimizerKind


@dataclass(frozen=True, kw_only=True)
class TrainRecipe:
    """The defaults are what did best in short runs (`README.md` beside this).

    row_len, rows_per_step, anchors_per_row: a step holds rows * anchors * block_size block tokens on each rank.
    steps, or minutes: the length; with minutes the number of steps follows from the speed of the first ones.
    gamma: slots weigh exp(-j / gamma). acceptance_share: 0 .. 1, see `loss.acceptance_weights`.
    distill_share: 0 .. 1, how much of the label's place the target's own distribution takes (`loss.block_loss`).
    short_block_share, short_block_size: share of the steps whose blocks are this short, so that a drafter run with a
        narrower block than its own stays good.
    backend, compile_model: "flex" and true on CUDA, "dense" and false elsewhere.
    """

    row_len: int = 2048
    rows_per_step: int = 8
    anchors_per_row: int = 160
    steps: int | None = None
    minutes: float | None = None
    optimizer: OptimizerKind = "muon"
    learning_rate: float = 4e-3
    weight_decay: float = 0.05
    warmup_steps: int = 100
    clip_norm: float = 1.0
    gamma: float = 7.0
    acceptance_share: float = 1.0
    distill_share: float = 0.0
    short_block_share: float = 0.0
    short_block_size: int = 8
    seed: int = 0
    backend: Backend = "flex"
    compile_model: bool = True
    log_every: int = 25
    score_every: int = 1000
    save_seconds: float = 100.0

    def __post_init__(self) -> None:
        """Raises ValueError for values that make no run."""
        if (self.steps is None) == (self.minutes is None):
            raise ValueError("give steps or minutes, one of the two.")
        for name in ("row_len", "rows_per_step", "anchors_per_row", "log_every", "score_every"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}.")
        if self.learning_rate <= 0 or self.gamma <= 0 or self.clip_norm <= 0:
            raise ValueError("learning_rate, gamma and clip_norm must be above 0.")
        for name in ("acceptance_share", "distill_share", "short_block_share"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise ValueError(f"{name} must lie in 0 .. 1, got {getattr(self, name)}.")
        if self.short_block_size < 2:
            raise ValueError(f"short_block_size must be at least 2, got {self.short_block_size}.")
        if self.backend == "flex" and self.row_len % TILE:
            raise ValueError(f"row_len={self.row_len} must be a multiple of {TILE} with backend='flex'.")

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)
