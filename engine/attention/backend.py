"""Which attention backend a device gets."""

from engine.attention.context import Attention
from engine.attention.cpu_paged import cpu_paged_attention
from engine.attention.cuda_paged import cuda_paged_attention


def attention_of(device: str) -> Attention:
    """The backend of "cpu", "cuda" or "cuda:N". Each falls back to the torch reference where it cannot run."""
    return cuda_paged_attention if device.startswith("cuda") else cpu_paged_attention
