"""torch's flash ops, which have no CPU kernels, with stand-ins for torch's own on the CPU key (`conftest.active`)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import torch

from torch_fdattn.dropins import flash_impl
from torch_fdattn.ops.library import launches

aten = torch.ops.aten
SDPA, SDPA_BACKWARD = (
    aten._scaled_dot_product_flash_attention, aten._scaled_dot_product_flash_attention_backward,
)  # fmt: skip
FLASH, FLASH_BACKWARD = aten._flash_attention_forward, aten._flash_attention_backward
INTO = "aten::_flash_attention_forward_no_dropout_inplace"
PAGED = hasattr(aten, INTO.removeprefix("aten::"))  # from torch 2.12 on
OPS = [f"aten::{name}" for name in flash_impl._KERNELS if hasattr(aten, name)]


def _answer(name: str, calls: Counter):
    """Tensors of the schema's results, all 7: nothing of ours gives that."""

    def kernel(*args, **kwargs):
        calls[name] += 1
        given = [x for x in args if isinstance(x, torch.Tensor)]
        if name == INTO:
            given[0].fill_(7)
            return torch.full(given[0].shape[:-1], 7.0)
        like = given[1:4] if "backward" in name else given[:1]
        sevens = [torch.full_like(x, 7) for x in like]
        if "backward" in name:
            return tuple(sevens)
        rest = torch.empty(2, dtype=torch.uint64), torch.empty((), dtype=torch.uint64)
        lse = torch.full(given[0].shape[:-1], 7.0)
        if name.startswith("aten::_scaled"):
            return sevens[0], lse, None, None, 7, 7, *rest, torch.empty(0)
        return sevens[0], lse, *rest, torch.empty(0)

    return kernel


def activated() -> Iterator[Counter]:
    """Ours on the CPU key, over kernels of "torch's own" that answer with sevens, and count."""
    calls: Counter = Counter()
    library = torch.library.Library("aten", "IMPL")
    for name in OPS:
        library.impl(name.removeprefix("aten::"), _answer(name, calls), "CPU")
    flash_impl.fallbacks.clear()
    launches.clear()
    handle = flash_impl.activate("CPU")
    yield calls
    handle.remove()
    library._destroy()


def close(found, wanted) -> None:
    torch.testing.assert_close(found.float(), wanted.float(), rtol=5e-3, atol=5e-3)
