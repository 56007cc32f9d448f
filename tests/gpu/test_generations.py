"""The few-row product compiles for GPUs from Ampere on, by Triton's own assembler, without such a GPU.

Of the other kernels that need no Hopper this says nothing.
"""

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton", reason="the package triton is not installed")

# In a process of its own: where there is no GPU, this one's kernels are interpreted.
_COMPILES = """
import sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from engine.kernels.row_gemm import _row_gemm_kernel as kernel

capability = int(sys.argv[1])
fixed = dict(
    K=576, BM=16, BN=16, BK=64, PARTS=64, SPLITS=2, WEIGHT_SCALE=False, NORM=True, SWIGLU=False, BIAS=True,
    RESIDUAL=True, SCALED=True, PRECISION="ieee", STAGES=4, TURNED=False, STAGGERED=True, ITEM_BYTES=2,
    PDL=capability >= 90,
)
floats = ("scale_ptr", "squares_ptr", "squares_out_ptr", "part_ptr")
kinds, values, aligned = {}, {}, {}
for place, name in enumerate(kernel.arg_names):
    if name in fixed:
        kinds[name], values[place,] = "constexpr", fixed[name]
    elif name.endswith("_ptr"):
        kinds[name] = "*fp32" if name in floats else "*i32" if name == "count_ptr" else "*bf16"
        aligned[place,] = [["tt.divisibility", 16]]
    else:
        kinds[name] = "fp32" if name == "eps" else "i32"
source = ASTSource(fn=kernel, signature=kinds, constexprs=values, attrs=aligned)
made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": 4})
assert made.asm["cubin"]
print("asks ahead:", "cp.async.bulk.prefetch" in made.asm["ptx"])
"""


@pytest.mark.parametrize("capability", [80, 86, 89, 90, 100, 120])
def test_the_few_row_product_compiles(capability: int) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", _COMPILES, str(capability)], capture_output=True, text=True, env=environment, timeout=120
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split() == ["asks", "ahead:", str(capability >= 90)]
