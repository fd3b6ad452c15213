"""The product of a gated linear unit, ``activation(gate) * up`` (arXiv:2002.05202): SwiGLU and GeGLU."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from torch_fdattn.ops.swiglu import silu_mul

#: SiLU, and GELU in its tanh approximation.
ACTIVATIONS = ("silu", "gelu_tanh")


def glu(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """``activation(gate) * up`` for two tensors (…, N) of one shape and dtype; activation is one of `ACTIVATIONS`.

    SwiGLU is one kernel on GPUs and without gradients (`silu_mul`); GeGLU is two of PyTorch's.

    Examples:
        >>> from torch_fdattn.ops.glu import glu
        >>> glu(torch.ones(2), torch.ones(2), "gelu_tanh")
        tensor([0.8412, 0.8412])
    """
    if activation == "silu":
        return silu_mul(gate, up)
    if activation == "gelu_tanh":
        return F.gelu(gate, approximate="tanh") * up
    raise ValueError(f"activation must be one of {', '.join(ACTIVATIONS)}, got {activation!r}")
