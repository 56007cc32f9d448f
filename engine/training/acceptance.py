"""How many drafts the target would accept, from texts the target has already written.

Greedy verification never changes the text, and neither does sampling with exact match, so the text is written once; the
drafts of every possible block start are then made in a few passes, and the decode loop is a walk over their accepted
counts: from an anchor it goes accepted + 1 tokens on. The walk gives what a loop that verifies step by step gives.
Shapes as in `program.py`.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.training.corpus import Corpus, PackedRows, pack
from engine.training.program import BlockProgram, anchor_places, blocks_at, sort_anchors


@dataclass(frozen=True, kw_only=True)
class AcceptanceReport:
    """documents, tokens (emitted by steps), steps: sums of the walk. reached, accepted: per draft position, steps whose
    drafts before it were all accepted and that could still emit more, and those where it was accepted too."""

    documents: int
    tokens: int
    steps: int
    reached: tuple[int, ...]
    accepted: tuple[int, ...]

    @property
    def acceptance_length(self) -> float:
        """Tokens committed per verify step, the target's own token included."""
        return self.tokens / max(1, self.steps)

    @property
    def survival(self) -> tuple[float, ...]:
        """P(at least j drafts accepted) for j = 1 .., with hazards taken at the positions that could be reached."""
        product, out = 1.0, []
        for reached, accepted in zip(self.reached, self.accepted, strict=True):
            product *= accepted / reached if reached else 0.0
            out.append(product)
        return tuple(out)

    def expected_tokens(self, draft_len: int) -> float:
        """Tokens per step at a draft length, from the survival."""
        return 1.0 + sum(self.survival[:draft_len])

    def as_dict(self) -> dict[str, object]:
        return {
            "documents": self.documents,
            "tokens": self.tokens,
            "steps": self.steps,
            "acceptance_length": round(self.acceptance_length, 4),
            "survival": [round(p, 4) for p in self.survival],
        }


def walk(matches: list[int], slots: int) -> tuple[int, int, list[int], list[int]]:
    """Decode one document. matches[i]: leading right drafts of a block anchored at response token i (the last token has
    none). Returns tokens emitted, steps, and per draft position how often it was reached and accepted."""
    reached, accepted = [0] * slots, [0] * slots
    at, steps, last = 0, 0, len(matches)
    while at < last:
        possible = min(slots, last - at)  # a draft past the text's end is never verified
        right = min(matches[at], possible)
        for j in range(min(right + 1, possible)):
            reached[j] += 1
            accepted[j] += j < right
        at += min(right + 1, last - at)
        steps += 1
    return last, steps, reached, accepted


class AcceptanceSet:
    """Held-out documents, packed for one batch shape.

    rows_per_pass and anchors_per_row should be training's, so that compiled code is shared.
    """

    def __init__(self, corpus: Corpus, *, row_len: int, rows_per_pass: int, anchors_per_row: int, device: str) -> None:
        self.documents = len(corpus)
        self.rows = pack(corpus, row_len=row_len, seed=0, whole_multiple=rows_per_pass).to(device)
        self.rows_per_pass, self.anchors_per_row = rows_per_pass, anchors_per_row

    def score(self, program: BlockProgram, width: int | None = None) -> AcceptanceReport:
        """Acceptance of the program's drafter; width: of the blocks it is run with, its own by default."""
        width = width or program.block_size
        parts = []
        for first in range(0, len(self.rows), self.rows_per_pass):
            index = torch.arange(first, first + self.rows_per_pass, device=self.rows.tokens_NS.device)
            parts.append(self._matches(self.rows.rows(index), program, width))
        matches_NS = torch.cat(parts)
        slots = width - 1
        tokens = steps = 0
        reached, accepted = [0] * slots, [0] * slots
        for matches in by_document(self.rows, matches_NS):
            emitted, taken, r, a = walk(matches, slots)
            tokens, steps = tokens + emitted, steps + taken
            reached = [x + y for x, y in zip(reached, r, strict=True)]
            accepted = [x + y for x, y in zip(accepted, a, strict=True)]
        return AcceptanceReport(
            documents=self.documents, tokens=tokens, steps=steps, reached=tuple(reached), accepted=tuple(accepted)
        )

    def _matches(self, rows: PackedRows, program: BlockProgram, width: int) -> Tensor:
        """Leading right drafts at every anchor place, [R, S]."""
        R, S = rows.tokens_NS.shape
        places = anchor_places(rows)
        most = int(places.sum(1).max())
        at_RS = torch.arange(S, device=places.device).expand(R, S)
        all_RS, used_RS = sort_anchors(at_RS, places)
        taps = program.taps(rows)
        result = torch.zeros(R, S, dtype=torch.int64, device=places.device)
        A = self.anchors_per_row
        for first in range(0, most, A):
            anchor_RA, used_RA = (_window(t, first, A) for t in (all_RS, used_RS))
            blocks = blocks_at(rows, anchor_RA, used_RA, width)
            hidden = program.hidden(rows, taps, anchor_RA, width).detach()[:, :, 1:]
            for row in range(R):
                right_AJ = program.drafts(hidden[row]) == blocks.label_RAJ[row]
                count_A = (right_AJ & blocks.valid_RAJ[row]).long().cumprod(-1).sum(-1)
                result[row, anchor_RA[row][used_RA[row]]] = count_A[used_RA[row]]
        return result


def _window(values_RS: Tensor, first: int, count: int) -> Tensor:
    """Columns first .. first + count, padded with zeros."""
    part = values_RS[:, first : first + count]
    return torch.nn.functional.pad(part, (0, count - part.shape[1]))


def by_document(rows: PackedRows, values_NS: Tensor) -> list[list[int]]:
    """The values at the anchor places of every document that has any, in order of places."""
    starts, table = rows.doc_start_NS.cpu(), values_NS.cpu()
    found: dict[tuple[int, int], list[int]] = {}
    for row, place in anchor_places(rows).cpu().nonzero().tolist():
        found.setdefault((row, int(starts[row, place])), []).append(int(table[row, place]))
    return list(found.values())
