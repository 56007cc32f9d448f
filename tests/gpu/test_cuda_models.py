"""Target and drafter on the CUDA kernels equal the same models on the CPU in float32, whichever way their rows take."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from engine.attention.cuda_paged import cuda_paged_attention
from engine.kernels.available import copy_engine
from engine.kernels.gemm_choice import GemmCut
from engine.kernels.wide_choice import WideCut
from engine.layers import cuda_cuts, linear, rms_norm, rotary
from engine.layers import cuda_rows as cuda_rows_module
from engine.layers.cuda_rows import CudaRows
from engine.layers.linear import Linear
from engine.models import decoder, dflash, target
from engine.models.decoder import DecoderLayer
from tests.gpu.places import places
from tests.reference.paged import PagedModels, Piece, engine_config
from tests.reference.toy import make_drafter, make_target

KINDS = [("llama", 32), ("qwen2", 32), ("qwen3", 32), ("qwen3", 16)]


def _checkpoints(directory: Path, kind: str, head_dim: int) -> tuple[Path, Path]:
    shape = {"num_attention_heads": 6, "num_key_value_heads": 2, "hidden_size": 96, "num_hidden_layers": 4}
    if kind != "qwen2":
        shape["head_dim"] = head_dim
    else:
        shape |= {"hidden_size": 192}
    target = make_target(directory / "target", kind, **shape)
    make_drafter(directory / "drafter", target, head_dim=head_dim)
    return directory / "target", directory / "drafter"


def _interpret(models: PagedModels, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets these CPU models take the way of CUDA ones."""
    kernels = CudaRows(pdl=False)
    for module in (decoder, dflash, linear, rms_norm, rotary, target):
        monkeypatch.setattr(module, "cuda_rows", lambda x: kernels)
    assert models.drafter is not None
    for layer in (*models.target.layers, *models.drafter.layers):
        assert isinstance(layer, DecoderLayer)
        layer.attention = cuda_paged_attention


def _outputs(models: PagedModels, num_rows: int) -> list[Tensor]:
    """Everything two steps and a block leave: hidden states, logits, taps, the block's states, both caches."""
    generator = torch.Generator().manual_seed(3)
    texts = [torch.randint(4, 131, (n,), generator=generator).tolist() for n in (num_rows - 4, 4, 11)]
    first = models.forward([[Piece(seq=s, start=0, ids=text) for s, text in enumerate(texts[:2])]])
    more = [Piece(seq=0, start=len(texts[0]), ids=texts[2][:3]), Piece(seq=1, start=4, ids=texts[2][3:6])]
    second = models.forward([more, [Piece(seq=2, start=0, ids=texts[2])]], slack=5)
    block = models.draft_hidden({0: (len(texts[0]) + 3, 7), 2: (11, 9)})
    outputs = [block]
    for out in (first, second):
        assert out.taps_NTH is not None
        outputs += [out.hidden_NH, out.taps_NTH, models.full_logits(out.hidden_NH)]
    outputs += [cache[1:] for layer in (*models.kv.target_kv, *models.kv.drafter_kv) for cache in layer]
    return [x.float().cpu() for x in outputs]


@pytest.mark.parametrize(
    ("case", "device"),
    places([(*kind, rows) for kind in KINDS for rows in (20, 100)], [("qwen3", 32, 9)]),
)
@pytest.mark.parametrize("way", ["few rows", "cuBLAS", "many rows"])
@torch.inference_mode()
def test_models(
    case: tuple[str, int, int], device: str, way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton", reason="the package triton is not installed")
    kind, head_dim, rows = case
    target_dir, drafter_dir = _checkpoints(tmp_path, kind, head_dim)
    settings = {"block_size": 16, "num_blocks": 31}
    want = _outputs(PagedModels.load(engine_config(target_dir, drafter_dir, **settings), num_seqs=3), rows)
    rough = want
    if device == "cuda":
        narrow = engine_config(target_dir, drafter_dir, **settings, dtype="bfloat16")
        rough = _outputs(PagedModels.load(narrow, num_seqs=3), rows)
    else:
        monkeypatch.setattr(linear, "unavailable_reason", lambda: "weights stay as they are")
    if way != "few rows":
        monkeypatch.setattr(cuda_cuts, "gemm_cut", lambda **shape: None)
        monkeypatch.setattr(cuda_rows_module, "head_cut", lambda **shape: None)
    if way == "many rows":
        cut = WideCut(rows=64, outputs=32, inputs=32, num_programs=5, num_warps=4)
        widths = (2, 4) if device == "cpu" else (2,)  # the interpreter's dot knows float32 alone
        for choice in ("argmax_cut", "swiglu_cut"):
            monkeypatch.setattr(
                cuda_rows_module,
                choice,
                lambda *, K, item_bytes, **_: cut if K % 32 == 0 and item_bytes in widths else None,
            )
        monkeypatch.setattr(cuda_rows_module, "copy_engine", lambda: device == "cpu" or copy_engine())
    for dtype in ("float32", "bfloat16"):
        config = engine_config(target_dir, drafter_dir, **settings, device=device, dtype=dtype)
        models = PagedModels.load(config, num_seqs=3)
        if device == "cpu":
            _interpret(models, monkeypatch)
        for index, (got, exact) in enumerate(zip(_outputs(models, rows), want, strict=True)):
            # In bfloat16 the CPU's torch path says how far rounding alone leads.
            bound = 2e-4 * exact.norm() if dtype == "float32" else 1.5 * (rough[index] - exact).norm()
            assert (got - exact).norm() <= bound
        if device == "cpu":
            break  # the interpreter's dot does not know bfloat16


@torch.inference_mode()
def test_every_matrix_owns_its_counters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two engines of a process share nothing that their kernels write, and products leave zeros behind."""
    pytest.importorskip("triton", reason="the package triton is not installed")
    if torch.cuda.is_available():
        pytest.skip("the interpreter runs in processes without a GPU")
    monkeypatch.setattr(linear, "unavailable_reason", lambda: "weights stay as they are")
    monkeypatch.setattr(cuda_cuts, "gemm_cut", lambda **shape: GemmCut(outputs=16, inputs=32, num_splits=3))
    target_dir, drafter_dir = _checkpoints(tmp_path, "qwen3", 16)
    config = engine_config(target_dir, drafter_dir, block_size=16, num_blocks=31)
    both = [PagedModels.load(config, num_seqs=3) for _ in range(2)]
    for models in both:
        _interpret(models, monkeypatch)
    first, second = (_outputs(models, 9) for models in both)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    counts = [module.split_count for models in both for module in models.target.modules() if isinstance(module, Linear)]
    assert len({count.data_ptr() for count in counts}) == len(counts) > 8
    assert not any(count.any() for count in counts)
