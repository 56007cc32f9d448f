"""Do the ranks of a tensor-parallel group decide alike? A checksum of tokens and counts, compared at certain steps."""

import zlib

import torch

from engine.parallel.tp_group import TpGroup
from engine.runner.draft_program import Decision

COMPARE_EVERY = 1000  # steps, where debug_checks is off


class RankAgreement:
    """Compares the ranks every step (debug) or every COMPARE_EVERY steps, the first one included.

    Which steps are compared follows from the step's id alone, so that all ranks make the same collectives.
    """

    def __init__(self, tp: TpGroup, *, every_step: bool) -> None:
        self._tp = tp
        self._period = 1 if every_step else COMPARE_EVERY

    def check(self, step_id: int, decision: Decision | None) -> None:
        """One small collective where a comparison is due, else nothing. decision: None in a step that samples no row.

        Raises:
            RuntimeError: the ranks decided differently, so their caches differ from here on; on every rank.
        """
        if self._tp.size == 1 or decision is None or step_id % self._period:
            return
        own_1 = torch.tensor([checksum(decision)], device=decision.tokens_SE.device)
        checksums = self._tp.all_gather(own_1, dim=0).tolist()
        if len(set(checksums)) > 1:
            raise RuntimeError(f"the ranks disagree on the tokens of step {step_id}: checksums by rank {checksums}")


def checksum(decision: Decision) -> int:
    """CRC-32 of a step's emitted tokens and its counts; what lies behind the emitted tokens has no part in it."""
    column_E = torch.arange(decision.tokens_SE.shape[1], device=decision.tokens_SE.device)
    kept_SE = decision.tokens_SE.masked_fill(column_E >= decision.num_emitted_S[:, None], -1)
    counts_S2 = torch.stack([decision.num_accepted_S, decision.num_drafted_S], dim=1)
    return zlib.crc32(torch.cat([kept_SE, counts_S2], dim=1).cpu().numpy().tobytes())
