"""Law: on the CPU kernels a token's logits do not depend, bit for bit, on how its step was batched; bfloat16 too.

Where torch multiplies many rows (`max_kernel_rows`) the law holds for steps of few rows.
"""

from itertools import pairwise
from pathlib import Path

import pytest
import torch

from engine.layers import cpu_jit
from engine.layers.cpu_jit import max_kernel_rows, unavailable_reason
from tests.reference.paged import PagedModels, Piece, engine_config
from tests.reference.toy import make_drafter, make_target

SHAPE = {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 16}

pytestmark = pytest.mark.skipif(unavailable_reason() is not None, reason=f"torch's kernels: {unavailable_reason()}")


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def directories(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    target, drafter = (tmp_path_factory.mktemp(name) for name in ("target", "drafter"))
    make_drafter(drafter, make_target(target, request.param, **SHAPE), head_dim=16)
    return target, drafter


def _ids(count: int, seed: int) -> list[int]:
    return torch.randint(4, 131, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.mark.parametrize("has_instructions", [False, True])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@torch.inference_mode()
def test_one_row_at_a_time_equals_chunks_and_company(
    directories: tuple[Path, Path], dtype: str, has_instructions: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_jit, "has_bfloat16_instructions", lambda: has_instructions)
    # Steps of up to 16 rows, and where nothing is limited of 20.
    cuts = (0, 13, 14, 21, 30) if max_kernel_rows(getattr(torch, dtype)) else (0, 17, 18, 25, 30)
    config = engine_config(directories[0], dtype=dtype)
    alone, crowded = (PagedModels.load(config, num_seqs=3, shuffle=shuffle) for shuffle in (False, True))
    ids, others = _ids(30, 1), _ids(30, 2)
    single = torch.cat(
        [alone.full_logits(alone.forward([[Piece(seq=0, start=i, ids=[t])]]).hidden_NH) for i, t in enumerate(ids)]
    )
    rows = []
    for start, end in pairwise(cuts):
        mine = Piece(seq=2, start=start, ids=ids[start:end])
        company = [Piece(seq=0, start=start, ids=others[start : start + 3]), mine]
        out = crowded.forward([company], slack=11)
        rows.append(crowded.full_logits(out.hidden_NH)[3:])
    assert torch.equal(torch.cat(rows), single)


@torch.inference_mode()
def test_bfloat16_drafts_change_no_token(directories: tuple[Path, Path]) -> None:
    config = engine_config(*directories, dtype="bfloat16")
    for seed in range(4):
        models = PagedModels.load(config, num_seqs=2)
        plain, _ = models.generate(_ids(9, seed), seq=0, max_new_tokens=24, draft_len=0)
        drafted, accepted = models.generate(_ids(9, seed), seq=1, max_new_tokens=24, draft_len=5)
        assert drafted == plain
        assert len(accepted) <= 23
