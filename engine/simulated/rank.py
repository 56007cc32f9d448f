"""`SimulatedRank`: a rank without a device. Takes the place of `engine.rank.EngineRank`; imports no torch."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt

from engine.config.engine import EngineConfig
from engine.parallel.plan_channel import follow_plans
from engine.parallel.plan_ring import PlanReader
from engine.simulated.runner import SimulatedRunner

_WORD = re.compile("[\u0120\u2581][A-Za-z]+")  # behind a byte-level or a sentencepiece blank


class SimulatedRank:
    """One rank. Ranks 1.. take the plans as real ones do and have nothing to compute.

    progress: called with a short phase name.
    """

    def __init__(self, config: EngineConfig, *, progress: Callable[[str], None] | None = None) -> None:
        self.config = config
        if progress is not None:
            progress("simulating the device")
        self.runner = SimulatedRunner(config, token_ids=output_token_ids(config))

    def follow(self, reader: PlanReader) -> None:
        """Take plans until rank 0 closes the ring.

        Raises:
            PlanRingError: rank 0 died.
        """
        follow_plans(reader, self.runner)

    def close(self) -> None:
        """Nothing is held."""


def output_token_ids(config: EngineConfig) -> npt.NDArray[np.int64]:
    """Ids that a simulated request may emit, ascending: whole words, so that every token adds to the text, and never
    end-of-sequence. Without a tokenizer.json that has some: the whole vocabulary."""
    vocab_size = config.target.vocab_size
    ids: set[int] = set()
    file = Path(config.model_dir) / "tokenizer.json"
    if file.is_file():
        vocab = json.loads(file.read_text(encoding="utf-8")).get("model", {}).get("vocab", {})
        if isinstance(vocab, dict):
            ids = {token_id for token, token_id in vocab.items() if _WORD.fullmatch(token)}
    ids = {token_id for token_id in ids if token_id < vocab_size} - set(config.target.eos_token_ids)
    if len(ids) < 2:
        ids = set(range(vocab_size)) - set(config.target.eos_token_ids)
    return np.array(sorted(ids), dtype=np.int64)
