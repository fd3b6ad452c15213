"""A call with everything in it, for the tests of the framework's side."""

from __future__ import annotations

import torch
from torch import Tensor

import torch_fdattn
from torch_fdattn.testing import make_tensor

OPTIONS = ("new_lens", "k_scale", "v_scale", "q", "cos", "sin", "positions")


def arguments(
    device: str, *, paged: bool = False, layout: str = "bhsd", dtype: torch.dtype = torch.float32,
    cache_dtype: torch.dtype = torch.float32, v_dim: int = 16, options: tuple[str, ...] = OPTIONS,
) -> dict[str, Tensor]:  # fmt: skip
    """Keywords of append_kv (or paged_append_kv): 2 sequences, 2 KV heads, 3 new tokens, 8 positions."""
    rows = (4, 2, 4) if paged else (2, 2, 8)

    def new(heads: int, dim: int) -> Tensor:
        return make_tensor((2, heads, 3, dim), layout, dtype=dtype, device=device)

    def cache(dim: int) -> Tensor:
        return make_tensor((*rows, dim), layout, device=device).to(cache_dtype).fill_(1)

    given = dict(
        k_cache=cache(16), v_cache=cache(v_dim), k=new(2, 16), v=new(2, v_dim),
        kv_lens=torch.tensor([3, 5], dtype=torch.int32, device=device),
    )  # fmt: skip
    if paged:
        table = torch.tensor([[2, 0], [3, 1]], dtype=torch.int32, device=device)
        given["page_table"] = table
    if cache_dtype.itemsize > 1:
        options = tuple(name for name in options if not name.endswith("_scale"))
    angles = torch.rand(9, 6, device=device)
    optional = dict(
        new_lens=torch.tensor([3, 2], dtype=torch.int32, device=device),
        k_scale=torch.tensor(0.1, device=device), v_scale=torch.rand(2, 1, device=device) + 0.1,
        q=new(4, 16), cos=angles.cos(), sin=angles.sin(),
        positions=torch.randint(0, 9, (2, 3), device=device),
    )  # fmt: skip
    return given | {name: optional[name] for name in options}


def positional(given: dict[str, Tensor]) -> tuple[Tensor | None, ...]:
    """Keywords as the arguments of the raw op."""
    required = (
        "k_cache",
        "v_cache",
        *("page_table",) * ("page_table" in given),
        "k",
        "v",
        "kv_lens",
    )
    return tuple(given.get(name) for name in (*required, *OPTIONS))


def append(given: dict[str, Tensor]) -> None:
    op = torch_fdattn.paged_append_kv if "page_table" in given else torch_fdattn.append_kv
    op(**given)


def raw(paged: bool):
    return torch.ops.fdattn.paged_append_kv if paged else torch.ops.fdattn.append_kv
