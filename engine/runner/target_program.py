"""T: the target's forward over the decode rows and the prompt chunks of one step. Keeps taps, returns logits."""

from dataclasses import dataclass

import torch

from engine.attention.kv_cache_tensors import KvCache
from engine.layers.upload import upload
from engine.models.target import TargetModel
from engine.runner.batch import ForwardInputs
from engine.step import PrefillChunk


@dataclass(frozen=True, kw_only=True)
class TargetStep:
    """logits_MV: float32, this rank's vocabulary shard; M = R x (K+1) decode rows, then one row per sampling chunk.

    taps_NTH: outputs of the tapped layers for every row of the step, None without a drafter.
    hidden_NH: every row after the final norm, kept only where a prompt chunk is to be scored.
    headless_MH: rows after the final norm whose logits were left to whoever draws from them; logits_MV is None then.
    """

    inputs: ForwardInputs
    logits_MV: torch.Tensor | None
    taps_NTH: torch.Tensor | None
    hidden_NH: torch.Tensor | None = None
    headless_MH: torch.Tensor | None = None


class TargetProgram:
    """The target half of a step. tap_layers: 0-based decoder layers whose outputs the drafter reads."""

    def __init__(self, model: TargetModel, kv: KvCache, tap_layers: tuple[int, ...]) -> None:
        self._model = model
        self._kv = kv
        self._tap_layers = tap_layers

    def run_decode(self, inputs: ForwardInputs) -> TargetStep:
        """Decode rows alone. Without logits where their peaks are found without them: D knows what it needs."""
        output = self._model(inputs.ids_N, inputs.positions_N, inputs.context, self._kv, self._tap_layers)
        if self._model.finds_peaks(output.hidden_NH.shape[0]):
            return TargetStep(inputs=inputs, logits_MV=None, taps_NTH=output.taps_NTH, headless_MH=output.hidden_NH)
        return TargetStep(inputs=inputs, logits_MV=self._model.logits(output.hidden_NH), taps_NTH=output.taps_NTH)

    def logits_of(self, step: TargetStep) -> torch.Tensor:
        """A decode step's logits, made now where they were not."""
        if step.headless_MH is not None:
            return self._model.logits(step.headless_MH)
        assert step.logits_MV is not None
        return step.logits_MV

    def run(self, inputs: ForwardInputs, num_decode_tokens: int, prefill: tuple[PrefillChunk, ...]) -> TargetStep:
        """num_decode_tokens: R x (K+1), the leading rows of `inputs` that all get logits."""
        output = self._model(inputs.ids_N, inputs.positions_N, inputs.context, self._kv, self._tap_layers)
        rows_M = _logit_rows(num_decode_tokens, prefill)
        logits_MV = None
        if rows_M is None:
            logits_MV = self._model.logits(output.hidden_NH)
        elif rows_M:
            logits_MV = self._model.logits(output.hidden_NH[upload(rows_M, inputs.ids_N.device)])
        is_scored = any(chunk.scored_next for chunk in prefill)
        return TargetStep(
            inputs=inputs,
            logits_MV=logits_MV,
            taps_NTH=output.taps_NTH,
            hidden_NH=output.hidden_NH if is_scored else None,
        )

    def run_chunk(self, inputs: ForwardInputs, last_1: torch.Tensor) -> TargetStep:
        """One prompt chunk in a program of fixed shapes. last_1: its row that needs the head, on the device."""
        output = self._model(inputs.ids_N, inputs.positions_N, inputs.context, self._kv, self._tap_layers)
        logits_MV = self._model.logits(output.hidden_NH.index_select(0, last_1))
        return TargetStep(inputs=inputs, logits_MV=logits_MV, taps_NTH=output.taps_NTH)


def _logit_rows(num_decode_tokens: int, prefill: tuple[PrefillChunk, ...]) -> list[int] | None:
    """Rows that need the head: every decode row and the last row of a sampling chunk. None: every row does."""
    if not prefill:
        return None
    rows = list(range(num_decode_tokens))
    end = num_decode_tokens
    for chunk in prefill:
        end += len(chunk.token_ids)
        if chunk.samples:
            rows.append(end - 1)
    return rows
