"""The cuts of few-row products fit the GPU they were measured on, whatever the shape."""

import pytest
import torch

import engine.layers.cuda_cuts as cuda_cuts
from engine.kernels.gemm_choice import (
    STREAM_ROWS,
    STREAM_TILE,
    GemmCut,
    PeakCut,
    StreamCut,
    gemm_cut,
    peak_cut,
    stream_cut,
)

SHARED_BYTES = 227 << 10  # that one program may take on SM90
QWEN3_8B = [(4096, 6144, False), (4096, 4096, False), (4096, 12288, True), (12288, 4096, False)]
OTHERS = [
    (4096, 151936, False),
    (20480, 4096, False),
    (4096, 14336, True),
    (3584, 18944, True),
    (18944, 3584, False),
    (2048, 2560, False),
    (5120, 17408, True),
    (8192, 1024, False),
]
SMOLLM2 = [(576, 960, False), (576, 576, False), (576, 1536, True), (1536, 576, False), (2880, 576, False)]


@pytest.mark.parametrize("rows", [1, 16, 17, 64, 65, 256])
@pytest.mark.parametrize("shape", [*QWEN3_8B, *OTHERS, *SMOLLM2])
def test_cuts_fit(rows: int, shape: tuple[int, int, bool]) -> None:
    K, N, swiglu = shape
    cut = gemm_cut(rows=rows, K=K, N=N, swiglu=swiglu)
    if cut is None:
        return
    height = min(64, max(16, 1 << (rows - 1).bit_length()))
    weight_rows = cut.outputs * (2 if swiglu else 1)
    assert cut.num_stages * cut.inputs * (height + weight_rows) * 2 <= SHARED_BYTES
    steps = -(-K // cut.inputs)
    assert (cut.num_splits - 1) * -(-steps // cut.num_splits) < steps  # every program has a step
    assert not cut.turned or weight_rows >= 64


def test_no_split_is_empty() -> None:
    for K in range(2048, 16384, 128):
        for N in range(512, 16384, 448):
            cut = gemm_cut(rows=64, K=K, N=N)
            if cut is not None:
                steps = -(-K // cut.inputs)
                assert (cut.num_splits - 1) * -(-steps // cut.num_splits) < steps, (K, N)


def test_what_does_not_fit_goes_to_cublas() -> None:
    shape = dict(rows=64, K=4096, N=6144)
    assert gemm_cut(**shape) is not None
    assert gemm_cut(**shape, item_bytes=4) is None  # float32
    assert gemm_cut(**shape, shared_bytes=97 << 10) is None  # SM86


def test_which_layers_are_fused() -> None:
    """All products of a layer take the kernel or none: an 8B model's at up to 64 rows, a small one's at any number."""
    for rows in (1, 16, 48, 64):
        assert all(gemm_cut(rows=rows, K=K, N=N, swiglu=swiglu) for K, N, swiglu in QWEN3_8B)
    assert not any(gemm_cut(rows=65, K=K, N=N, swiglu=swiglu) for K, N, swiglu in QWEN3_8B)
    assert all(gemm_cut(rows=256, K=K, N=N, swiglu=swiglu) for K, N, swiglu in SMOLLM2)
    assert gemm_cut(rows=16, K=576, N=1536, swiglu=True) == GemmCut(outputs=16, inputs=64)
    assert gemm_cut(rows=0, K=576, N=576) is None


def test_which_products_the_copy_engine_feeds() -> None:
    """Those of an 8B model's layers at up to 16 rows, as measured; the same at every such number of rows."""
    measured = [
        StreamCut(num_splits=1, units=1, staggered=True),
        StreamCut(num_splits=2, units=1, staggered=True),
        StreamCut(num_splits=1, units=3, num_stages=3),
        StreamCut(num_splits=2, units=1, staggered=True),
    ]
    for rows in (1, 8, 16):
        assert [stream_cut(rows=rows, K=K, N=N, swiglu=swiglu) for K, N, swiglu in QWEN3_8B] == measured
    assert not any(stream_cut(rows=17, K=K, N=N, swiglu=swiglu) for K, N, swiglu in QWEN3_8B)
    assert not any(stream_cut(rows=16, K=K, N=N, swiglu=swiglu) for K, N, swiglu in SMOLLM2)
    assert stream_cut(rows=16, K=4096, N=151936) is None  # more units than one program should take
    assert stream_cut(rows=16, K=3840, N=4096) is None  # 15 steps, which two programs cannot share


def test_stream_cuts_cover_a_product_once() -> None:
    found = 0
    for K in range(2048, 16384, 128):
        for N in range(512, 16384, 224):
            for swiglu in (False, True):
                cut = stream_cut(rows=16, K=K, N=N, swiglu=swiglu)
                if cut is None:
                    continue
                found += 1
                tiles = N * (2 if swiglu else 1) / STREAM_TILE
                programs = tiles * cut.num_splits / cut.units
                assert tiles == int(tiles), (K, N)
                assert programs == int(programs), (K, N)
                assert programs <= 132, (K, N)
                assert K % (cut.inputs * cut.num_splits) == 0, (K, N)
                assert cut.num_stages * cut.inputs * (STREAM_ROWS + STREAM_TILE) * 2 + 8192 <= SHARED_BYTES
    assert found > 100


def test_which_heads_find_their_largest_logits() -> None:
    """An 8B model's at up to 16 rows, as measured, whole or halved."""
    measured = PeakCut(rows=16, outputs=64, inputs=256, num_stages=5, num_programs=132)
    for rows in (1, 8, 16):
        assert peak_cut(rows=rows, K=4096, N=151936) == peak_cut(rows=rows, K=4096, N=151936 // 2) == measured
    assert peak_cut(rows=17, K=4096, N=151936) is None
    assert peak_cut(rows=0, K=4096, N=151936) is None
    assert peak_cut(rows=16, K=576, N=49152) is None
    assert peak_cut(rows=16, K=4100, N=151936) is None
    assert peak_cut(rows=16, K=4096, N=151936 // 8) is None  # a third turn for a quarter of the programs


def test_peak_cuts_fit() -> None:
    found = 0
    for K in range(1024, 16384, 128):
        for N in range(4096, 262144, 8000):
            cut = peak_cut(rows=STREAM_ROWS, K=K, N=N)
            if cut is None:
                continue
            found += 1
            assert K % cut.inputs == 0, (K, N)
            assert cut.num_stages <= K // cut.inputs, (K, N)
            assert cut.rows >= STREAM_ROWS, (K, N)
            assert cut.num_stages * cut.inputs * (cut.rows + cut.outputs) * 2 + 8192 <= SHARED_BYTES
    assert found > 100


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_other_types_and_gpus_take_triton(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = dict(rows=16, K=4096, N=4096)
    monkeypatch.setattr(cuda_cuts, "copy_engine", lambda: True)
    assert cuda_cuts.stream_of(torch.bfloat16, **shape) == StreamCut(num_splits=2, units=1, staggered=True)
    assert cuda_cuts.stream_of(dtype, **shape) is None
    monkeypatch.setattr(cuda_cuts, "copy_engine", lambda: False)
    assert cuda_cuts.stream_of(torch.bfloat16, **shape) is None
