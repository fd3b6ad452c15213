"""Gathered rows' products with SwiGLU: behind them by every strategy, and in them where rows are many."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from tests.dist.dense_layers import HIDDEN, config, dense_mlp
from tests.dist.one_sided_matmuls import STRATEGIES, check_sum, draw, of_rank
from tests.dist.test_tp_linear import leaf
from torch_fdattn.dist import TPMLP, all_gather_matmul
from torch_fdattn.dist.tensor_parallel.layers import TokenRows
from torch_fdattn.ops import swiglu
from torch_fdattn.ops.gemm import persistent_swiglu_gemm, swiglu_gemm
from torch_fdattn.ops.library import INTERPRET, launches

COUNTER = "gemm/persistent_swiglu"


def halves(y: Tensor) -> Tensor:
    gate, up = y.chunk(2, -1)
    return F.silu(gate) * up


def kernels(device: torch.device) -> None:
    if device.type == "cpu" and not INTERPRET:
        pytest.skip("tests a kernel: needs a CUDA device or TRITON_INTERPRET=1")
    x = draw(2, 64, device=device, dtype=torch.float16)
    if not swiglu_gemm.fits(x, x) or not persistent_swiglu_gemm.fits(
        x, draw(32, 64, device=device)
    ):
        pytest.skip("needs tensor descriptors")
    if dist.get_world_size() == 1:
        pytest.skip("needs 2 ranks")


@pytest.fixture
def many(rank_device, monkeypatch) -> None:
    """Few rows, as if they were many."""
    kernels(rank_device)
    monkeypatch.setattr(swiglu, "is_better_by_tiles", lambda *_: True)
    monkeypatch.setattr(swiglu_gemm, "MAX_ROWS", 0)


@pytest.mark.parametrize("strategy", ["collective", *STRATEGIES])
@pytest.mark.parametrize("biased", [False, True])
def test_behind_the_products(group, rank_device, strategy: str, biased: bool) -> None:
    """The same bits and gradients as PyTorch's two passes over what is returned without it."""
    if strategy != "collective" and rank_device.type == "cpu" and not INTERPRET:
        pytest.skip("tests a kernel: needs a CUDA device or TRITON_INTERPRET=1")
    x = draw(dist.get_world_size() * 5, 24, device=rank_device)[of_rank(5)]
    weights = [draw(n, 24, device=rank_device) for n in (12, 6)]
    biases = [draw(12, device=rank_device) if biased else None, None]
    found = []
    for activation in ("swiglu", None):
        given, ws = leaf(x), [leaf(w) for w in weights]
        ys = all_gather_matmul(given, ws, group, biases, strategy=strategy, activation=activation)
        ys = ys if activation else [halves(y) for y in ys]
        torch.autograd.backward(ys, [torch.ones_like(y) for y in ys])
        found.append((*ys, given.grad, *(w.grad for w in ws)))
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
    with torch.no_grad():
        ys = all_gather_matmul(x, weights, group, biases, strategy=strategy, activation="swiglu")
    for y, expected in zip(ys, found[1], strict=False):
        torch.testing.assert_close(y, expected)


@pytest.mark.parametrize(("inner", "features"), [(24, 40), (136, 72)])
def test_in_the_products(group, rank_device, many, inner: int, features: int) -> None:
    """Each rank's rows, of which they have different numbers, one none."""
    world, rank = dist.get_world_size(), dist.get_rank()
    rows = [0, *(130 + 7 * r for r in range(1, world))]
    x = draw(sum(rows), features, device=rank_device, dtype=torch.float16)
    weights = [draw(2 * n, features, device=rank_device, dtype=torch.float16) for n in (inner, 8)]
    own = x[sum(rows[:rank]) : sum(rows[: rank + 1])]
    how = dict(rows=rows, strategy="copy_engine", activation="swiglu")
    before = launches[COUNTER]
    with torch.no_grad():
        ys = all_gather_matmul(own, weights, group, **how)
        again = all_gather_matmul(own, weights, group, **how)
    assert (launches[COUNTER] > before) == (
        len(own) > 0
    )  # the rank without rows has nothing that fits
    for y, other, w in zip(ys, again, weights, strict=True):
        check_sum(y, halves(x.double() @ w.double().t()), halves(x @ w.t()))
        assert torch.equal(y, other)


def test_where_it_is_not_in_them(group, rank_device, many) -> None:
    x, weight = (draw(n, 16, device=rank_device, dtype=torch.float16) for n in (8, 16))
    bias, before = draw(16, device=rank_device, dtype=torch.float16), launches[COUNTER]
    how = dict(strategy="copy_engine", activation="swiglu")
    with torch.no_grad():
        all_gather_matmul(x, [weight], group, [bias], **how)
        all_gather_matmul(x, [weight[:6]], group, **how)  # results' rows of no whole 16 bytes
        all_gather_matmul(x, [weight], group, strategy="fused", activation="swiglu")
        all_gather_matmul(x.float(), [weight.float()], group, **how)
        wide = draw(16, 32, device=rank_device, dtype=torch.float16)[:, :20]
        all_gather_matmul(wide, [wide], group, **how)  # rows that are gathered to no whole 16 bytes
    all_gather_matmul(leaf(x), [leaf(weight)], group, **how)
    assert launches[COUNTER] == before
    with torch.no_grad():
        all_gather_matmul(x, [weight], group, **how)
    assert launches[COUNTER] > before


def test_is_seen(group, rank_device, many) -> None:
    """By profilers, as one op."""
    x, weight = (draw(n, 16, device=rank_device, dtype=torch.float16) for n in (8, 16))
    with torch.no_grad(), torch.profiler.profile() as profile:
        all_gather_matmul(x, [weight], group, strategy="copy_engine", activation="swiglu")
    assert "fdattn::tp_all_gather_swiglu" in {event.key for event in profile.key_averages()}


def test_own_rows_are_few(group, rank_device, monkeypatch) -> None:
    """A rank of few rows multiplies others' by tiles, and must not where those do not fit."""
    kernels(rank_device)
    monkeypatch.setattr(swiglu, "is_better_by_tiles", lambda *_: True)
    rank, rows = dist.get_rank(), [100] + [200] * (dist.get_world_size() - 1)
    x = draw(sum(rows), 16, device=rank_device, dtype=torch.float16)
    own = x[sum(rows[:rank]) : sum(rows[: rank + 1])]
    for columns, taken in ((24, False), (32, True)):  # results' rows of 24 and of 32 bytes
        weight = draw(columns, 16, device=rank_device, dtype=torch.float16)
        before = launches[COUNTER]
        with torch.no_grad():
            (y,) = all_gather_matmul(own, [weight], group, rows=rows, strategy="copy_engine", activation="swiglu")  # fmt: skip
        assert (launches[COUNTER] > before) == taken
        check_sum(y, halves(x.double() @ weight.double().t()), halves(x @ weight.t()))


@pytest.mark.parametrize("form", ["ag_rs", "all_reduce"])
def test_layers(group, rank_device, many, form: str) -> None:
    torch.manual_seed(0)
    dense = dense_mlp(config(inner=64), "ours").to(rank_device, torch.float16)
    tokens = TokenRows()
    mlp = TPMLP.from_module(dense, group, form, "low_latency", tokens, "copy_engine" if form == "ag_rs" else "auto").for_inference()  # fmt: skip
    world, rank = dist.get_world_size(), dist.get_rank()
    rows = [9 + r for r in range(world)]
    x = draw(sum(rows), HIDDEN, device=rank_device, dtype=torch.float16)
    own = slice(sum(rows[:rank]), sum(rows[: rank + 1])) if form == "ag_rs" else slice(None)
    tokens.rows = rows if form == "ag_rs" else None
    before = launches[COUNTER]
    with torch.no_grad():
        found, expected = mlp(x[own]), dense(x)[own]
        exact = dense.double()(x.double())[own]
    assert launches[COUNTER] == before + (world if form == "ag_rs" else 1)
    # Parts of sums are rounded where they are sent.
    bound = 4 * (expected.double() - exact).abs().max() + 2**-9 * exact.abs().max()
    assert (found.double() - exact).abs().max() <= bound


def test_wrong_calls(group, rank_device) -> None:
    x, weight = draw(2, 8, device=rank_device), draw(4, 8, device=rank_device)
    with pytest.raises(ValueError, match="activation must be None or 'swiglu', got 'gelu'"):
        all_gather_matmul(x, [weight], group, activation="gelu")
    with pytest.raises(TypeError, match="activation must be a str or None, got list"):
        all_gather_matmul(x, [weight], group, activation=["swiglu"])
    with pytest.raises(ValueError, match=r"weights\[1\] must have an even number of rows.*got 3"):
        all_gather_matmul(x, [weight, weight[:3]], group, activation="swiglu")
