"""Linear layers of inference forms: of few rows by a kernel of ours where that takes less time than BLAS."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torch_fdattn.ops.attention.configs import device_capability
from torch_fdattn.ops.launch import NUM_SMS
from torch_fdattn.ops.library import INTERPRET, can_bypass_torch

#: Rows of x up to which `ops/gemm/small_m_linear.py` does it; at 128 rows BLAS takes less.
MAX_ROWS = 16
#: The compute capability that was measured.
_MEASURED_ON = (9, 0)
#: (outputs from, to, features from, to) of which the kernel takes less time. One H200, bf16, outputs × features: 4096 × 4096,
#: 6144 × 4096 and 4096 × 12288 of 1 and 16 rows 0.83 to 0.95 of BLAS; 4096 × 1024 and 1024 × 2048 of 16 rows 0.83 and 0.86
#: (docs/notes/serving.md). A program has 64 outputs and all features. BLAS divides the features of few outputs between
#: programs, which wins where there are many of them; with more programs than SMs, the last ones would run alone.
#: Beyond what was measured, more than 6144 outputs and more than 12288 features take the kernel by this reasoning alone.
SIZES = ((1024, 4095, 2048, 2048), (4096, 64 * NUM_SMS, 1024, math.inf))


def is_better_at_small_m(rows: int, outputs: int, features: int, device: torch.device) -> bool:
    """Whether (rows, features) @ (features, outputs) in 16 bits is faster by `ops/gemm/small_m_linear.py` than by BLAS."""
    measured = any(
        narrow <= outputs <= wide and shallow <= features <= deep
        for narrow, wide, shallow, deep in SIZES
    )
    return measured and rows <= MAX_ROWS and device_capability(device) == _MEASURED_ON


def inference_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x @ weight.T + bias``: `torch.nn.functional.linear`, which does it wherever the kernel is not known or expected to take
    less time (`is_better_at_small_m`), or cannot run: on CPUs, with a bias, gradients, torch.compile or autocast, in other
    dtypes than 16-bit ones, of rows or weights with gaps between their elements or at odd addresses.

    By the kernel, a row's bits depend on that row and the weight alone.

    Args:
        x: (…, K).
        weight: (N, K), in x's dtype.
        bias: (N,), or None.

    Returns:
        (…, N) in x's dtype.

    Raises:
        RuntimeError: sizes, dtypes or devices that do not match, by torch.

    Examples:
        >>> inference_linear(torch.ones(2, 3, 8), torch.ones(12, 8)).shape
        torch.Size([2, 3, 12])
    """
    may_be_ours = bias is None and (x.is_cuda or INTERPRET) and not torch.compiler.is_compiling()
    # Before the device is asked, which of a fake tensor is none.
    if may_be_ours and can_bypass_torch(x, weight):
        sizes = x.shape[:-1].numel(), len(weight), x.shape[-1]
        if is_better_at_small_m(*sizes, x.device):
            from torch_fdattn.ops.gemm import small_m_linear  # imports triton

            rows = x.reshape(-1, x.shape[-1])
            if small_m_linear.fits(rows, weight):
                y = small_m_linear.small_m_linear(rows, weight)
                return y.view(*x.shape[:-1], y.shape[-1])
    return F.linear(x, weight, bias)


class InferenceLinear(nn.Linear):
    """`nn.Linear` by `inference_linear`: forward(x (…, K)) -> (…, N).

    Examples:
        >>> InferenceLinear(8, 12)(torch.ones(2, 3, 8)).shape
        torch.Size([2, 3, 12])
    """

    def forward(self, x: Tensor) -> Tensor:
        return inference_linear(x, self.weight, self.bias)
