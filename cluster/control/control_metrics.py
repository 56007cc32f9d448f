"""The controller's series in Ray's own metrics (Prometheus sees them with the prefix `ray_`)."""

from ray.util.metrics import Gauge

from cluster.control.estimate import ControlState
from cluster.control.policy import Schedule

_TAGS = ("app", "deployment")


class ControlMetrics:
    """Gauges of one controller."""

    def __init__(self, *, app: str, deployment: str) -> None:
        self._tags = {"app": app, "deployment": deployment}
        self._replicas = Gauge("dflash_controller_replicas", "Replicas that report.", tag_keys=_TAGS)
        self._lagging = Gauge(
            "dflash_controller_replicas_lagging", "Replicas whose schedule is not the newest.", tag_keys=_TAGS
        )
        self._epoch = Gauge("dflash_controller_epoch", "Epoch of this controller; 0 before it has one.", tag_keys=_TAGS)
        self._changes = Gauge("dflash_controller_changes", "Draft lengths changed since its start.", tag_keys=_TAGS)
        self._held = Gauge("dflash_controller_held", "1 while an operator's pin or freeze is in force.", tag_keys=_TAGS)
        self._draft_len = Gauge(
            "dflash_controller_draft_len", "K by batch size.", tag_keys=(*_TAGS, "accelerator", "batch_size")
        )
        self._hazard = Gauge(
            "dflash_controller_hazard",
            "Chance that a draft is accepted if those before it were, by width of the drafter's block and position "
            "(0 is the first).",
            tag_keys=(*_TAGS, "block_width", "position"),
        )

    def set(self, state: ControlState) -> None:
        """Takes over what is now."""
        replicas = state.replicas.values()
        self._replicas.set(len(replicas), self._tags)
        self._lagging.set(sum(replica.version < replica.target for replica in replicas), self._tags)
        self._epoch.set(state.epoch or 0, self._tags)
        self._changes.set(state.num_changes, self._tags)
        self._held.set(state.held is not None, self._tags)
        for key, line in state.live_lines.items():
            self._set_draft_lens(key.accelerator, line.schedule)
        for width, belief in state.beliefs.items():
            for position, hazard in enumerate(belief.hazards):
                tags = {**self._tags, "block_width": str(width), "position": str(position)}
                self._hazard.set(float(hazard), tags)

    def _set_draft_lens(self, accelerator: str, schedule: Schedule) -> None:
        for bound, setting in schedule.items():
            tags = {**self._tags, "accelerator": accelerator, "batch_size": str(bound)}
            self._draft_len.set(setting.draft_len, tags)
