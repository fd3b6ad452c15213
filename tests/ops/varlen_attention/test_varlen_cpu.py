"""Plain packed sequences on a CPU, which are checked once for all, against each sequence's own call."""

from __future__ import annotations

import pytest
import torch

import torch_fdattn
from torch_fdattn.ops.attention.cpu import REFERENCE_ALONE, TAKES_GROUPS
from torch_fdattn.ops.varlen_attention import op


def both_ways(monkeypatch, *inputs, **options):
    """((out, lse), whether it was the direct way, (out, lse) in the general one)."""
    taken = []

    def direct(*arguments):
        taken.append(attend_packed(*arguments))
        return taken[-1]

    attend_packed = op.attend_packed
    monkeypatch.setattr(op, "attend_packed", direct)
    found = torch_fdattn.varlen_attention(*inputs, **options)
    monkeypatch.setattr(op, "attend_packed", lambda *_: False)
    expected = torch_fdattn.varlen_attention(*inputs, **options)
    return found, taken[0], expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("causal", [False, True])
def test_same_bits(causal, dtype, monkeypatch):
    """Tokens of no sequence, GQA, one token alone; and what is not so plain."""
    q, k, v = (torch.randn(40, h, 16).to(dtype) for h in (4, 2, 2))
    q[30], v[5] = torch.nan, torch.inf
    begins = torch.tensor([3, 20, 21, 37], dtype=torch.int32)
    found, direct, expected = both_ways(monkeypatch, q, k, v, begins, causal=causal)
    assert direct == (not REFERENCE_ALONE and TAKES_GROUPS)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    "change", ["an empty sequence", "other keys", "window", "sinks", "values of fewer dims"]
)  # fmt: skip
def test_what_is_not_so_plain(change, monkeypatch):
    q, k, v = (torch.randn(40, h, 32) for h in (4, 2, 2))
    begins, options = torch.tensor([0, 20, 40], dtype=torch.int32), dict(causal=True)
    match change:
        case "an empty sequence":
            begins = torch.tensor([0, 20, 20, 40], dtype=torch.int32)
        case "other keys":
            options["cu_seqlens_k"] = torch.tensor([0, 10, 40], dtype=torch.int32)
        case "window":
            options["window"] = (3, 0)
        case "sinks":
            options["sinks"] = torch.randn(4)
        case "values of fewer dims":
            v = v[..., :16]
    found, direct, expected = both_ways(monkeypatch, q, k, v, begins, **options)
    assert not direct
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)
