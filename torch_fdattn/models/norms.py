"""RMSNorm in the two forms that checkpoints have."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torch_fdattn.models.config import ModelConfig


class OffsetRMSNorm(nn.Module):
    """RMSNorm that multiplies by 1 + weight, as Gemma's: computed in fp32 (or wider) and rounded once.

    Examples:
        >>> from torch_fdattn.models.norms import OffsetRMSNorm
        >>> OffsetRMSNorm(8, 1e-6)(torch.ones(1, 8))[0, 0].item()
        0.9999995231628418
    """

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.zeros(size))

    def forward(self, x: Tensor) -> Tensor:
        """x (…, size) -> (…, size) in x's dtype."""
        wide = torch.promote_types(x.dtype, torch.float32)
        weight = 1 + self.weight.to(wide)
        return F.rms_norm(x.to(wide), weight.shape, weight, self.eps).to(x.dtype)

    def extra_repr(self) -> str:
        return f"{tuple(self.weight.shape)}, eps={self.eps}"


def norm_of(config: ModelConfig, size: int) -> nn.Module:
    """The family's RMSNorm over `size` elements."""
    kind = OffsetRMSNorm if config.family.norm_offset else nn.RMSNorm
    return kind(size, config.norm_eps)
