"""What every implementation that is compared offers."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..decode_inputs import DecodeInputs
from ..shapes import AttentionCase, DecodeCase

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
#: A decode call with its inputs bound; its result is out, or a tuple that begins with out.
DecodeCall = Callable[[], object]


class Implementation:
    """One way to compute attention."""

    name = ""
    memory = "BHSD"  # or BSHD: the order of dimensions in memory that it is meant for
    differentiable = True
    # Time forward with gradients on even alone: for those that would compile a second time without.
    forward_with_grad = False

    def available(self, device: torch.device) -> str | None:
        """Why it cannot run on `device`, or None."""
        return None if device.type == "cuda" else "needs a CUDA device"

    def session(self) -> contextlib.AbstractContextManager:
        """State that its calls need; entered around timing, so no part of host time."""
        return contextlib.nullcontext()

    def attention(self, case: AttentionCase, device: torch.device) -> Attention:
        raise NotImplementedError(f"{self.name} has no prefill adapter")

    def decode(self, case: DecodeCase, copies: Sequence[DecodeInputs]) -> list[DecodeCall]:
        """One call for each copy of the inputs, which lie in the memory order of `memory`.

        Plans, compiled functions, masks and views are made here, before anything is timed.
        """
        raise NotImplementedError(f"{self.name} has no decode adapter")

    def refuse(
        self, case: DecodeCase, *, paged: bool = False, ragged: bool = False, cache: bool = False
    ) -> None:
        """Raise for what the case needs and this implementation has no form for."""
        for needed, text in (
            (paged and case.page is not None, "paged caches"),
            (ragged and case.ragged is not None, "sequences of different lengths"),
            (cache and case.cache is not None, f"{case.cache} caches with queries of {case.dtype}"),
        ):
            if needed:
                raise NotImplementedError(f"{self.name} has no form for {text}")


def missing(module: str) -> str | None:
    """Why a peer's module cannot be imported, or None."""
    found = importlib.util.find_spec(module) is not None
    return None if found else f"{module} is not installed"


def first(out: object) -> Tensor:
    """The output of functions that return (out, lse, …) in some versions and out alone in others."""
    return out[0] if isinstance(out, tuple) else out
