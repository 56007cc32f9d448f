"""The engine as a library: tokens in, tokens out. Never imports ray or fastapi.

Names are loaded on first use, so that a process which only exchanges messages with an engine does not import torch.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from engine.config.decoding import AdvancedSamplingMode, DFlashDecodingConfig
    from engine.llm import LLM
    from engine.outputs import CompletionOutput, RequestOutput
    from engine.sampling_params import SamplingParams

_HOMES = {
    "AdvancedSamplingMode": "engine.config.decoding",
    "CompletionOutput": "engine.outputs",
    "DFlashDecodingConfig": "engine.config.decoding",
    "LLM": "engine.llm",
    "RequestOutput": "engine.outputs",
    "SamplingParams": "engine.sampling_params",
}

__all__ = [
    "LLM",
    "AdvancedSamplingMode",
    "CompletionOutput",
    "DFlashDecodingConfig",
    "RequestOutput",
    "SamplingParams",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'engine' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)
