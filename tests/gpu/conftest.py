"""Triton's interpreter stands in for the GPU where there is none: see `tests.gpu.places`."""

import os

import torch

# Read when a kernel is decorated, so set before any kernel module is imported.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
