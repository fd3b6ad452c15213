"""When a result is right: FlashAttention's error rule, a per-head bound, lse bounds, and launch counters.

    max|x - exact| <= 2 · max|torch - exact| + 2 · max|(exact + 0.3 - 0.3) - exact|

(3 in place of the first 2 with softcap), exact in fp64, torch the textbook formula at the tested dtype, the bracket rounded at that dtype. The
maximum over a whole tensor forgives a small head everything below the error of a large one; therefore
also, for each head,

    ‖x - exact‖ <= max(FROBENIUS[dtype] · ‖exact‖, 2 · ‖torch - exact‖) + ‖(exact + 0.3 - 0.3) - exact‖

In fp16 and bf16 rounding the result outweighs all else, and one sample of torch's error is a fair measure.
In fp32, which FlashAttention's tests do not cover, both sides are the noise of summation orders: there
torch's error is the largest of several samples, in three formulations (`oracle.py`), over redrawn inputs
(`expected.py`). The inequality stays.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from torch_fdattn.ops import launches

#: Relative Frobenius bound of each head; in half precision 16 units of rounding.
FROBENIUS = {
    torch.float64: 1e-12,
    torch.float32: 1e-5,
    torch.float16: 16 * 2.0**-11,
    torch.bfloat16: 16 * 2.0**-8,
}
#: |lse - exact| <= bound · max(1, |exact|). Below fp32 the inputs are exact in fp32 and so are their
#: products; what is left is the order of the sums and the tensor cores' truncation.
LSE_BOUNDS = {
    torch.float64: 1e-12,
    torch.float32: 1e-5,
    torch.float16: 2e-5,
    torch.bfloat16: 2e-5,
}


def check_close(
    name: str, value: Tensor, exact: Tensor, torch_errors: Sequence[Tensor],
    dtype: torch.dtype | None = None, factor: float = 2.0,
) -> None:  # fmt: skip
    """Asserts the error rule for one output or gradient (…, S, D); `factor` of torch's error.

    torch_errors are samples of torch - exact at the tested dtype, which is value's own or given.
    """
    assert value.shape == exact.shape, (
        f"{name}: shape {tuple(value.shape)}, expected {tuple(exact.shape)}"
    )
    if not value.numel():
        return
    exact, dtype = exact.double(), dtype or value.dtype
    error = value.double() - exact
    rounding = (exact.to(dtype) + 0.3 - 0.3).double() - exact
    worst = error.abs().max().item()
    bound = (
        factor * max(x.abs().max().item() for x in torch_errors) + 2 * rounding.abs().max().item()
    )
    if dtype == torch.float64:  # nothing more exact to compare with
        bound = 1e-12 * max(1.0, exact.abs().max().item())
    # Negated, so that NaN fails.
    if not worst <= bound:
        raise AssertionError(
            f"{name} ({dtype}): max error {worst:.3g}, bound {bound:.3g}; {_where(error)}"
        )
    heads, bounds = _norms(error), FROBENIUS[dtype] * _norms(exact)
    for x in torch_errors:
        bounds = torch.maximum(bounds, factor * _norms(x))
    over = heads - bounds - _norms(rounding)
    if not bool((over <= 0).all()):
        index = over.argmax()
        raise AssertionError(
            f"{name} ({dtype}): Frobenius error of head {index} {heads[index]:.3g}, over its bound by "
            f"{over[index]:.3g}; {_where(error)}"
        )


def _norms(x: Tensor) -> Tensor:
    """The Frobenius norm of each head of (…, S, D)."""
    return x.flatten(-2).norm(dim=-1).flatten()


def check_lse(value: Tensor, exact: Tensor, dtype: torch.dtype, name: str = "lse") -> None:
    """Asserts lse's own bound: the same rows empty (-inf), the others within LSE_BOUNDS."""
    assert value.shape == exact.shape, (
        f"{name}: shape {tuple(value.shape)}, expected {tuple(exact.shape)}"
    )
    exact, value = exact.double(), value.double()
    empty = exact == float("-inf")
    assert torch.equal(value == float("-inf"), empty), f"{name}: -inf in the wrong rows"
    exact, value = exact.masked_fill(empty, 0.0), value.masked_fill(empty, 0.0)
    error = (value - exact) / exact.abs().clamp(min=1.0)
    worst = error.abs().max().item() if error.numel() else 0.0
    if not worst <= LSE_BOUNDS[dtype]:
        raise AssertionError(
            f"{name} ({dtype}): relative error {worst:.3g}, bound {LSE_BOUNDS[dtype]:.3g}; {_where(error)}"
        )


@contextlib.contextmanager
def assert_launched(*paths: str) -> Iterator[None]:
    """Asserts that the block runs exactly these launch paths (at least once each) and no others.

    ``/triton`` stands for each kernel that Triton compiles, Hopper's too: which of them runs depends on the call. A path that
    ends in ``/hopper`` is that kernel alone.
    """
    before = Counter(launches)
    yield
    ran = sorted({x if x in paths else x.replace("/hopper", "/triton") for x in launches - before})
    assert ran == sorted(paths), f"expected launches {sorted(paths)}, got {ran}"


def _where(error: Tensor) -> str:
    """The index of the worst element, and how many are NaN."""
    index = error.abs().nan_to_num(float("inf")).argmax()
    place = tuple(int(i) for i in torch.unravel_index(index, error.shape))
    return f"worst at {place}, {int(error.isnan().sum())} NaN of {error.numel()}"
