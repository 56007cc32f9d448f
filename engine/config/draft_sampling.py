"""How drafts of sampled requests are chosen and verified: the user's options, defaults, and what excludes what."""

import importlib.metadata
import logging
from typing import Literal, cast, get_args

from engine.config.decoding import DFlashDecodingConfig
from engine.config.options import check_one_of

logger = logging.getLogger(__name__)

DraftSampling = Literal["greedy", "coupled", "probabilistic"]
_MIN_FLASHINFER = (0, 6, 4)


def resolve_draft_sampling(
    config: DFlashDecodingConfig, draft_sampling: str | None, device: str
) -> tuple[DraftSampling, bool]:
    """(how drafts are chosen, whether they are verified by rejection sampling).

    draft_sampling: None takes the better of those the verification allows.
    `use_rejection_sampling` given by the user is kept, and refused where it cannot be had; a value that a subclass's
    default brought in is dropped there, with a log line.

    Raises:
        ValueError: an unknown draft_sampling, or one that the verification excludes.
    """
    if draft_sampling is not None:
        check_one_of("draft_sampling", draft_sampling, get_args(DraftSampling))
    use_rejection_sampling = config.use_rejection_sampling
    if use_rejection_sampling:
        obstacle = _obstacle(draft_sampling, device)
        if obstacle is not None:
            if "use_rejection_sampling" in config.model_fields_set:
                raise ValueError(f"speculative_config.use_rejection_sampling: {obstacle}")
            logger.info("use_rejection_sampling was not set by the config itself and is dropped: %s", obstacle)
            use_rejection_sampling = False
    if draft_sampling == "probabilistic" and not use_rejection_sampling:
        raise ValueError(
            "draft_sampling: 'probabilistic' needs speculative_config.use_rejection_sampling: true; exact match "
            "compares tokens and has no use for their probabilities: take 'coupled'"
        )
    if draft_sampling is None:
        return ("greedy" if use_rejection_sampling else "coupled"), use_rejection_sampling
    return cast(DraftSampling, draft_sampling), use_rejection_sampling


def _obstacle(draft_sampling: str | None, device: str) -> str | None:
    """Why rejection sampling cannot be had; None if it can."""
    if draft_sampling == "coupled":
        return (
            "use_rejection_sampling=True is not supported for this configuration: draft_sampling is 'coupled', which "
            "ties drafts to the draw that exact match makes. Use greedy or probabilistic"
        )
    if draft_sampling == "probabilistic" and device == "cuda":
        version = _flashinfer_version()
        if version is None:
            return (
                "use_rejection_sampling=True requires FlashInfer, which is not available in this environment. Install "
                "flashinfer-python or set use_rejection_sampling=False. (draft_sampling: greedy needs none.)"
            )
        if version < _MIN_FLASHINFER:
            return (
                "Rejection sampling for one-model speculative decoding requires flashinfer>=0.6.4, found "
                f"{'.'.join(map(str, version))}"
            )
    return None


def _flashinfer_version() -> tuple[int, ...] | None:
    try:
        text = importlib.metadata.version("flashinfer-python")
    except importlib.metadata.PackageNotFoundError:
        return None
    return tuple(int(part) for part in text.split(".")[:3] if part.isdigit())
