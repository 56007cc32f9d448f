"""Where kernel tests run: all cases on the GPU (marker `gpu`), the toy ones also in Triton's interpreter on the CPU."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch


def places(cases: Sequence[Any], toys: Sequence[Any]) -> list[Any]:
    """Parameters (case, device): every case on "cuda", the toys on "cpu", which is skipped where a GPU was found."""
    found = torch.cuda.is_available()
    skip = pytest.mark.skipif(found, reason="the interpreter runs in processes without a GPU")
    on_gpu = [pytest.param(case, "cuda", marks=pytest.mark.gpu) for case in cases]
    return on_gpu + [pytest.param(case, "cpu", marks=skip, id=f"interpreter-{i}") for i, case in enumerate(toys)]


def dtypes(device: str) -> list[torch.dtype]:
    """What a case runs in: the interpreter's dot does not know bfloat16."""
    return [torch.float32, torch.float16 if device == "cpu" else torch.bfloat16]
