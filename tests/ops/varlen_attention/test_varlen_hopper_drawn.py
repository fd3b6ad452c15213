"""Drawn calls of varlen_attention that Hopper's kernels take, packed keys and pages, against the fp64 oracle, on an sm_90.

`tests/ops/test_hopper_draws.py` shows without a GPU that these kernels are what the draws come to.
"""

import os

import pytest
import torch

import torch_fdattn
from torch_fdattn.testing import assert_launched, draw_hopper_varlen, expected_varlen

SEEDS = range(int(os.environ.get("FDATTN_DRAWN", "40")))


def is_trained(case):
    """Whether a case has gradients, and Hopper's backward computes them."""
    return not case.page and case.head_dim <= 128


def paths(case):
    ways = ("forward", "backward") if is_trained(case) else ("forward",)
    return [f"varlen_attention_{way}/hopper" for way in ways]


def run(case, device):
    """(lse, other results by name, heads first) of a call, and of its backward where it is trained."""
    q, k, v = case.inputs(device)
    parameters, options = case.parameters(device), case.options(device)
    where = dict(zip(("cu_seqlens_q", "cu_seqlens_k"), case.cu_seqlens(device), strict=True))
    if case.page:
        k, v, where["page_table"] = case.paged(k, v)
    # Slopes' gradients of packed sequences are the portable kernels'.
    trained = {n: x for n, x in parameters.items() if n == "sinks"} if is_trained(case) else {}
    leaves = [q, k, v, *trained.values()] if is_trained(case) else []
    for x in leaves:
        x.requires_grad_()
    out, lse = torch_fdattn.varlen_attention(q, k, v, **where, **options, **parameters)
    if not leaves:
        return lse, {"out": out.transpose(0, 1)}
    found = torch.autograd.grad([out, lse], leaves, case.output_gradients(device))
    names = ("out", "dq", "dk", "dv")
    results = {n: x.transpose(0, 1) for n, x in zip(names, (out, *found[:3]), strict=True)}
    return lse, results | {f"d{n}": x for n, x in zip(trained, found[3:], strict=True)}


@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
    reason="needs a CUDA device of sm_90",
)
@pytest.mark.parametrize("seed", SEEDS)
def test_drawn(seed, device, record_drawn):
    case = draw_hopper_varlen(seed)
    record_drawn("varlen_attention on Hopper", case.features())
    with assert_launched(*paths(case)):
        lse, results = run(case, device)
    expected_varlen(case, device, backward=is_trained(case)).check(lse, **results)
