"""The cuts that `gpu_layer.py` tries, tables of them, and layers that take theirs from such a table."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any

from gpu_products import PRODUCTS, Product

import engine.layers.cuda_cuts as cuda_cuts
from engine.kernels.gemm_choice import GemmCut

# Weight rows of a tile, inputs, stages, warps, turned, staggered. The first few are tried at more than 16 rows, too.
TILES = (
    (64, 64, 6, 4, True, False),
    (64, 128, 5, 4, True, False),
    (64, 128, 5, 4, True, True),
    (128, 128, 3, 8, True, False),
    (128, 128, 3, 8, True, True),
    (64, 64, 6, 4, True, True),
    (64, 128, 3, 4, True, False),
    (64, 128, 3, 4, True, True),
    (64, 256, 3, 4, True, False),
    (64, 256, 3, 4, True, True),
    (128, 128, 3, 4, True, False),
    (128, 128, 6, 8, True, False),
    (128, 64, 6, 4, True, False),
)
TALL_TILES = 5
PROGRAMS = (132, 264)  # a sum is shared so that about so many programs run
SMALL_TILES = (
    (16, 64, 4, 4, False, False),
    (16, 64, 8, 4, False, False),
    (16, 128, 4, 4, False, False),
    (32, 64, 4, 4, False, False),
    (64, 64, 6, 4, True, False),
)
SHARED_BYTES = 225 << 10

Key = tuple[int, int, bool]  # K, N, swiglu


@dataclass(frozen=True, kw_only=True)
class Table:
    """Cuts by product; what is missing goes to cuBLAS."""

    cuts: dict[Key, GemmCut]

    def gemm_cut(
        self, *, rows: int, K: int, N: int, swiglu: bool = False, item_bytes: int = 2, shared_bytes: int = 0
    ) -> GemmCut | None:
        return self.cuts.get((K, N, swiglu))


def table_of(record: dict[str, Any], rows: int) -> Table:
    """What a result found for that many rows: among the layers, and alone for products that stand alone."""
    names = {field.name for field in fields(GemmCut)}
    cuts: dict[Key, GemmCut] = {}
    for row in record["products"]:
        if row["rows"] == rows and row["best"] != "cublas":
            cuts[row["K"], row["N"], row["swiglu"]] = GemmCut(**row["fastest_cut"])
    for layer in record["layers"]:
        if layer["rows"] == rows:
            for row in layer["found"]:
                cuts[row["K"], row["N"], row["swiglu"]] = GemmCut(**{k: v for k, v in row.items() if k in names})
    return Table(cuts=cuts)


def key(product: Product) -> Key:
    return product.K, product.N, product.swiglu


@contextlib.contextmanager
def choosing(table: Table | None) -> Iterator[None]:
    """Layers take their cuts from a table of Triton's instead of `gemm_choice`, unless it is None."""
    if table is None:
        yield
        return
    original = cuda_cuts.gemm_cut, cuda_cuts.stream_cut
    cuda_cuts.gemm_cut = table.gemm_cut
    cuda_cuts.stream_cut = lambda **shape: None
    try:
        yield
    finally:
        cuda_cuts.gemm_cut, cuda_cuts.stream_cut = original


def products(model: str) -> list[Product]:
    return [product for product in PRODUCTS if product.name.startswith(model)]


def cuts(product: Product, rows: int) -> Iterator[GemmCut]:
    """Tiles, times shares of the sum that give every SM something and may all run at once."""
    small = product.K * product.N <= 1 << 22
    tall = rows > 16
    tiles = SMALL_TILES if small else TILES[:TALL_TILES] if tall else TILES
    for weight_rows, inputs, stages, warps, turned, staggered in tiles:
        outputs = weight_rows // 2 if product.swiglu else weight_rows
        count, steps = -(-product.N // outputs), -(-product.K // inputs)
        shares = {1, 2, 3} if small else {max(1, most // count) for most in PROGRAMS}
        for splits in sorted(shares):
            shared_bytes = stages * (weight_rows + height(rows)) * inputs * 2
            if shared_bytes > SHARED_BYTES or (splits > 1 and steps < 4 * splits):
                continue
            yield GemmCut(
                outputs=outputs,
                inputs=inputs,
                num_splits=splits,
                num_warps=warps,
                num_stages=stages,
                turned=turned,
                ahead=64 << 10,
                staggered=staggered,
            )


def height(rows: int) -> int:
    """Rows of a tile of x."""
    return min(64, max(16, 1 << (rows - 1).bit_length()))


def name_of(cut: GemmCut | None) -> str:
    if cut is None:
        return "cublas"
    words = [f"{cut.outputs}x{cut.inputs}", f"s{cut.num_splits}", f"w{cut.num_warps}", f"p{cut.num_stages}"]
    words += [name for name in ("turned", "staggered") if getattr(cut, name)]
    return " ".join([*words, f"a{cut.ahead >> 10}"])
