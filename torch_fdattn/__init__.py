"""torch_fdattn: flash attention and flash decode for PyTorch, on one device and over many.

Importing registers the ops under ``torch.ops.fdattn``; it needs no GPU and compiles nothing.
`torch_fdattn.models` and `torch_fdattn.engine` are imported by the first use of their names.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch_fdattn import checkout, compile_backend, dist, dropins, ops
from torch_fdattn.compile_backend import explain
from torch_fdattn.decode_plan import plan_decode, plan_paged_decode
from torch_fdattn.functional import (
    append_kv,
    attention,
    attention_fp8,
    decode,
    decode_workspace,
    merge_states,
    paged_append_kv,
    paged_decode,
    quantise_per_head,
    varlen_attention,
)
from torch_fdattn.ops.attention.tuning import autotune, tiles
from torch_fdattn.ops.determinism import set_deterministic
from torch_fdattn.version import __version__

if TYPE_CHECKING:
    from torch_fdattn import engine, models

_LAZY = ("engine", "models")

__all__ = [
    "__version__",
    "append_kv",
    "attention",
    "attention_fp8",
    "autotune",
    "compile_backend",
    "decode",
    "decode_workspace",
    "dist",
    "dropins",
    "engine",
    "explain",
    "merge_states",
    "models",
    "ops",
    "paged_append_kv",
    "paged_decode",
    "plan_decode",
    "plan_paged_decode",
    "quantise_per_head",
    "set_deterministic",
    "tiles",
    "varlen_attention",
]

dropins.register_flash_impl()
checkout.announce()


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        import importlib

        return importlib.import_module(f"torch_fdattn.{name}")
    raise AttributeError(f"module 'torch_fdattn' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
