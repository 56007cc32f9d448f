"""Which attention backend a device and a config get."""

from engine.attention.context import Attention
from engine.attention.cpu_paged import cpu_paged_attention
from engine.attention.cuda_paged import cuda_paged_attention
from engine.config.attention_backend import AttentionBackend


def attention_of(device: str, backend: AttentionBackend = "VANILLA") -> Attention:
    """The kernels of "cpu", "cuda" or "cuda:N". VANILLA falls back to the torch reference where it cannot run; TRTLLM
    was checked by `check_attention_backend`."""
    if backend == "TRTLLM":
        from engine.attention.trtllm import TrtllmAttention

        return TrtllmAttention(device)
    return cuda_paged_attention if device.startswith("cuda") else cpu_paged_attention
