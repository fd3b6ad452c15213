"""deterministic=True: the backward of that call, and of no other, is asked for one order of sums; and compiled calls."""

from __future__ import annotations

import pytest
import torch

from tests.dropins.flash_attn.formula import CLOSE, attend_batch, made
from torch_fdattn.dropins.flash_attn import (
    flash_attn_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
)
from torch_fdattn.ops import determinism
from torch_fdattn.ops.attention import derivative_op
from torch_fdattn.ops.varlen_attention import op as varlen_op

BEGINS = torch.tensor([0, 4, 9], dtype=torch.int32)


@pytest.fixture
def asked(monkeypatch) -> list[bool]:
    """What each backward heard when it asked whether it must be deterministic."""
    heard: list[bool] = []

    def answer() -> bool:
        heard.append(determinism.is_deterministic())
        return heard[-1]

    for module in (derivative_op, varlen_op):
        monkeypatch.setattr(module, "is_deterministic", answer)
    return heard


def dense(q, **options):
    return flash_attn_func(q, q, q, **options)


def packed(q, **options):
    return flash_attn_varlen_func(*3 * [q[0]], BEGINS, BEGINS, 5, 5, **options)


@pytest.mark.parametrize("call", [dense, packed])
def test_each_backward_is_asked_as_its_forward_was(call, asked: list[bool]) -> None:
    q = made(1, 9, 2, 16).requires_grad_()
    outs = [call(q, deterministic=x) for x in (True, False, True)]
    for out in outs:  # run after all forwards
        asked.clear()
        out.sum().backward()
        assert asked == [out is not outs[1]]
    assert not determinism.is_deterministic()


def test_set_deterministic_holds_for_all(asked: list[bool]) -> None:
    q = made(1, 9, 2, 16).requires_grad_()
    out = dense(q)
    determinism.set_deterministic(True)
    try:
        out.sum().backward()
    finally:
        determinism.set_deterministic(False)
    assert asked == [True]


def test_an_error_in_a_backward_leaves_nothing_behind(monkeypatch) -> None:
    def broken() -> bool:
        raise RuntimeError("broken")

    monkeypatch.setattr(derivative_op, "is_deterministic", broken)
    q = made(1, 9, 2, 16).requires_grad_()
    with pytest.raises(RuntimeError, match="broken"):
        dense(q, deterministic=True).sum().backward()
    assert not determinism.is_deterministic()


def compiled(function):
    torch.compiler.reset()
    return torch.compile(function, backend="aot_eager", fullgraph=True)


def test_compiled_calls_are_one_graph() -> None:
    q, k = made(2, 6, 4, 16).requires_grad_(), made(2, 9, 2, 16).requires_grad_()
    options = dict(causal=True, window_size=(4, 0))
    out = compiled(lambda q, k: flash_attn_func(q, k, k, **options))(q, k)
    expected, _ = attend_batch(q, k, k, causal=True, window=(4, 0))
    torch.testing.assert_close(out, expected, **CLOSE)
    ours, theirs = (torch.autograd.grad(x.square().sum(), (q, k)) for x in (out, expected))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, **CLOSE)


def test_compiled_steps_over_a_cache() -> None:
    q, kv, cache = made(2, 1, 4, 16), made(2, 1, 2, 16), made(2, 9, 2, 16)
    lens, copy = torch.tensor([3, 5], dtype=torch.int32), cache.clone()

    def step(q, kv, cache, lens):
        return flash_attn_with_kvcache(q, cache, cache, kv, kv, cache_seqlens=lens, causal=True)

    out = compiled(step)(q, kv, cache, lens)
    torch.testing.assert_close(out, step(q, kv, copy, lens), **CLOSE)
    assert torch.equal(cache, copy)


def test_a_compiled_graph_refuses_deterministic() -> None:
    q = made(1, 9, 2, 16).requires_grad_()
    with pytest.raises(Exception, match=r"deterministic must be False in a compiled graph, got True"):  # fmt: skip
        compiled(dense)(q, deterministic=True)
    determinism.set_deterministic(True)
    try:
        compiled(dense)(q, deterministic=True).sum().backward()
    finally:
        determinism.set_deterministic(False)
