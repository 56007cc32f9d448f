"""The one linear layer every model uses."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

_UPCAST_ROWS = 8192  # weight rows widened at a time by the float32-output path on the CPU


class Linear(nn.Module):
    """y = x @ weight.T + bias, weight [out, in]. Weights start at zero and are filled by the loader.

    out_dtype: None keeps the input's dtype; float32 accumulates and returns float32 without rounding to the weight's
        dtype in between (the head needs it: bfloat16 logits tie).
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool = False,
        dtype: torch.dtype,
        device: str = "cpu",
        out_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        assert out_dtype in (None, torch.float32)
        self.weight = nn.Parameter(torch.zeros(out_features, in_features, dtype=dtype, device=device), False)
        self.bias = nn.Parameter(torch.zeros(out_features, dtype=dtype, device=device), False) if bias else None
        self.out_dtype = out_dtype

    def prepare(self) -> None:
        """Called once by the loader when the weights are in place; a faster kernel packs them here."""

    def forward(self, x: Tensor) -> Tensor:
        """[.., in] -> [.., out]."""
        if self.out_dtype is None or self.out_dtype == x.dtype:
            return F.linear(x, self.weight, self.bias)
        if x.is_cuda:
            rows = torch.mm(x.reshape(-1, x.shape[-1]), self.weight.t(), out_dtype=self.out_dtype)
        else:
            wide = x.reshape(-1, x.shape[-1]).to(self.out_dtype)
            rows = torch.cat([wide @ part.to(self.out_dtype).t() for part in self.weight.split(_UPCAST_ROWS)], dim=-1)
        if self.bias is not None:
            rows = rows + self.bias
        return rows.view(*x.shape[:-1], -1)
