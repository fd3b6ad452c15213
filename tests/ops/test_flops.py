"""FLOP counts: torch.utils.flop_counter sees our ops, with torch's own convention."""

import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode, flop_registry

import torch_fdattn

BATCH, HEADS, KV_HEADS, Q_LEN, KV_LEN, DIM = 2, 4, 2, 6, 10, 16
MATMUL = 2 * BATCH * HEADS * Q_LEN * KV_LEN * DIM


def qkv(device="cpu"):
    q = torch.randn(BATCH, HEADS, Q_LEN, DIM, device=device, requires_grad=True)
    k, v = (
        torch.randn(BATCH, KV_HEADS, KV_LEN, DIM, device=device, requires_grad=True)
        for _ in range(2)
    )
    return q, k, v


def counts(function):
    with FlopCounterMode(display=False) as counter:
        function()
    return {str(op): flops for op, flops in counter.get_flop_counts()["Global"].items()}


def test_attention(device):
    q, k, v = qkv(device)
    assert counts(lambda: torch_fdattn.attention(q, k, v)[0].sum().backward()) == {
        "fdattn.attention_forward": 2 * MATMUL,
        "fdattn.attention_backward": 5 * MATMUL,
    }


def test_decode(device):
    q, k, v = qkv(device)
    lens = torch.ones(BATCH, dtype=torch.int32, device=device)
    assert counts(lambda: torch_fdattn.decode(q, k, v, lens)) == {
        "fdattn.decode_forward": 2 * MATMUL
    }


def test_varlen_attention(device):
    """Lengths are on the device: the bound is all tokens in one sequence, or in one row of pages."""
    q, k, v = (torch.randn(n, h, DIM, device=device) for n, h in ((6, HEADS), (10, 2), (10, 2)))
    begins = torch.tensor([0, 3, 6], dtype=torch.int32, device=device)
    one = 2 * HEADS * 6 * 10 * DIM
    q.requires_grad_()
    assert counts(
        lambda: torch_fdattn.varlen_attention(q, k, v, begins, begins)[0].sum().backward()
    ) == {"fdattn.varlen_attention_forward": 2 * one, "fdattn.varlen_attention_backward": 5 * one}
    pages = torch.randn(7, 2, 4, DIM, device=device)
    table = torch.zeros(2, 3, dtype=torch.int32, device=device)
    with torch.no_grad():
        found = counts(
            lambda: torch_fdattn.varlen_attention(q, pages, pages, begins, page_table=table)
        )
    assert found == {"fdattn.varlen_attention_forward": 2 * 2 * HEADS * 6 * 12 * DIM}


def test_merge_states(device):
    outs = torch.randn(3, BATCH, HEADS, Q_LEN, DIM, device=device, requires_grad=True)
    lses = torch.randn(3, BATCH, HEADS, Q_LEN, device=device)
    assert counts(lambda: torch_fdattn.merge_states(outs, lses)[0].sum().backward()) == {
        "fdattn.merge_states_forward": 2 * outs.numel(),
        "fdattn.merge_states_backward": 4 * outs.numel(),
    }


def test_the_same_count_as_torchs_own_attention():
    q, k, v = (x.detach().to("meta") for x in qkv())
    k, v = (x.repeat_interleave(HEADS // KV_HEADS, 1) for x in (k, v))
    with FlopCounterMode(display=False) as counter:
        F.scaled_dot_product_attention(q, k, v)
    expected = counter.get_total_flops()
    assert counts(lambda: torch_fdattn.attention(q, k, v)) == {"fdattn.attention_forward": expected}


def test_every_raw_op_has_a_formula():
    for name in (
        "attention_forward", "attention_backward", "attention_backward_all", "decode_forward", "paged_decode_forward", "decode_out",
        "paged_decode_out", "merge_states_forward",
        "merge_states_backward", "varlen_attention_forward", "varlen_attention_backward",
        "varlen_attention_backward_all",
    ):  # fmt: skip
        assert getattr(torch.ops.fdattn, name) in flop_registry, name


@pytest.mark.parametrize(
    "order",
    [("torch_fdattn", "torch.utils.flop_counter"), ("torch.utils.flop_counter", "torch_fdattn")],
)
def test_registered_in_either_order_of_imports(order):
    code = (
        f"import {order[0]}, {order[1]}, torch; "
        "print(torch.ops.fdattn.attention_forward in torch.utils.flop_counter.flop_registry)"
    )
    command = [sys.executable, "-c", code]
    assert (
        subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip() == "True"
    )
