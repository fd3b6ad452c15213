"""Ways into code that stays as it is: SDPA's flash kernels (`flash_impl`), transformers' attention (`transformers`),
FlashAttention's Python interface (`flash_attn`), and vLLM's attention backends (`vllm`).

Nothing here acts by itself. `import torch_fdattn` only makes the name FDATTN known to torch, and each way is
taken by a call: `torch.nn.attention.activate_flash_attention_impl("FDATTN")`,
`torch_fdattn.dropins.transformers.register()`, `torch_fdattn.dropins.flash_attn.install()`.
"""

from __future__ import annotations

import importlib
import types
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch_fdattn.dropins import flash_attn, flash_impl, transformers, vllm

__all__ = ["flash_attn", "flash_impl", "register_flash_impl", "transformers", "vllm"]


def __getattr__(name: str) -> types.ModuleType:
    """The modules, loaded by the first use of their names."""
    if name in ("flash_attn", "flash_impl", "transformers", "vllm"):
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _activate() -> flash_impl.Handle:
    from torch_fdattn.dropins.flash_impl import activate

    return activate()


def register_flash_impl() -> bool:
    """Makes FDATTN known to torch.nn.attention, where this torch has such names; says whether it has.

    Examples:
        >>> known = torch_fdattn.dropins.register_flash_impl()  # `import torch_fdattn` has done so
        >>> known == hasattr(torch.nn.attention, "register_flash_attention_impl")
        True
    """
    register = getattr(torch.nn.attention, "register_flash_attention_impl", None)
    if register is None:
        return False
    register("FDATTN", register_fn=_activate)
    return True
