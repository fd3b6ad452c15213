"""What the files of calls share."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor

from tests.golden.device import H100, WORLD, Device


@dataclass
class Call:
    """One call, to be made once.

    Attributes:
        op: returns nothing, tensors, or tensors by name.
        arguments: by name, from which launches' tensors have theirs; new in each `Call`.
        results: names of the tensors that op returns.
        setting: opened around the call.
        world: ranks of the process group.
    """

    name: str
    op: Callable[..., object]
    arguments: dict[str, object]
    results: tuple[str, ...] = ("out", "lse")
    device: Device = H100
    setting: Callable[[], AbstractContextManager] = contextlib.nullcontext
    world: int = WORLD


def new(*shape: int, dtype: torch.dtype = torch.bfloat16, device: str = "cpu") -> Tensor:
    """Unwritten, and by the operating system not even provided as long as nobody writes to it."""
    return torch.empty(shape, dtype=dtype, device=device)


def fp32(*shape: int) -> Tensor:
    return new(*shape, dtype=torch.float32)


def lengths(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.int32)


def far(*shape: int, step: int) -> Tensor:
    """Of this shape, the elements of the dimension before the last so far apart."""
    span = (shape[-2] - 1) * step + shape[-1]
    outer = new(*shape[:-2], 1).stride()[:-1]
    return new(span * shape[0]).as_strided(shape, (*(span * (x > 0) for x in outer), step, 1))


@contextlib.contextmanager
def tf32():
    """torch's own setting for float32 matmuls."""
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    try:
        yield
    finally:
        torch.backends.cuda.matmul.fp32_precision = before


def trained(op: Callable[..., object], names: tuple[str, ...]) -> Callable[..., dict[str, object]]:
    """The op with its backward: gradients of these arguments, which are given, for gradients of out and, where it is
    among the arguments, lse (dlse)."""

    def run(dout: Tensor, dlse: Tensor | None = None, **arguments):
        wanted = [arguments[name] for name in names]
        for x in wanted:
            x.requires_grad_()
        out, lse = op(**arguments)
        results, given = ((out,), (dout,)) if dlse is None else ((out, lse), (dout, dlse))
        gradients = torch.autograd.grad(results, wanted, given)
        found = {f"d{name}": x for name, x in zip(names, gradients, strict=True)}
        return {"out": out.detach(), "lse": lse.detach(), **found}

    return run
