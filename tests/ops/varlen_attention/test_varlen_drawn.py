"""Drawn calls of varlen_attention, forward and backward, against the fp64 oracle under the error rule."""

import dataclasses

import pytest
import torch

import torch_fdattn
from torch_fdattn.ops.library import INTERPRET
from torch_fdattn.testing import (
    assert_launched,
    draw_varlen,
    drawn_seeds,
    expected_path,
    expected_varlen,
)


def run(case, device):
    """(lse, other results by name, heads first) of a call, and of its backward where keys are packed."""
    q, k, v = case.inputs(device)
    cu_seqlens = case.cu_seqlens(device)
    parameters = case.parameters(device)
    if case.page:
        k, v, table = case.paged(k, v)
        out, lse = torch_fdattn.varlen_attention(
            q, k, v, *cu_seqlens, page_table=table, **case.options(device), **parameters
        )
        return lse, {"out": out.transpose(0, 1)}
    trained = {n: x.requires_grad_() for n, x in parameters.items() if x.is_floating_point()}
    leaves = [*(x.requires_grad_() for x in (q, k, v)), *trained.values()]
    out, lse = torch_fdattn.varlen_attention(
        q, k, v, *cu_seqlens, **case.options(device), **parameters
    )
    found = torch.autograd.grad([out, lse], leaves, case.output_gradients(device))
    names = ("out", "dq", "dk", "dv")
    results = {n: x.transpose(0, 1) for n, x in zip(names, (out, *found[:3]), strict=True)}
    of_parameters = zip(trained, found[3:], strict=True)
    return lse, results | {f"d{name}": x for name, x in of_parameters}


def launched(case, device):
    ways = ("forward",) if case.page else ("forward", "backward")
    paths = [expected_path(f"varlen_attention_{way}", device, case.dtype) for way in ways]
    if paths[0].endswith("/cpu"):
        return paths
    if not case.batch:
        return []  # nothing to launch
    return paths if sum(case.q_lens) + case.rest[0] else paths[1:]


@pytest.mark.interpreter
@pytest.mark.parametrize(
    "seed",
    [
        pytest.param(x, marks=[] if x < 4 or not INTERPRET else pytest.mark.slow)
        for x in drawn_seeds(128, "FDATTN_DRAWN")
    ],
)
def test_drawn(seed, device, record_drawn):
    case = draw_varlen(seed, device)
    record_drawn("varlen_attention", case.features())
    with assert_launched(*launched(case, device)):
        lse, results = run(case, device)
    expected_varlen(case, device, backward=not case.page).check(lse, **results)


@pytest.mark.parametrize("seed", range(30))
def test_fp64_agrees_with_the_oracle(seed):
    case = dataclasses.replace(draw_varlen(seed), dtype=torch.float64)
    lse, results = run(case, "cpu")
    expected_varlen(case, "cpu", backward=not case.page).check(lse, **results)


def test_one_query_of_one_key_with_dropout(device):
    """A draw by which the rule was found too narrow: all that is not zero lies in a row of one key."""
    case = draw_varlen(317, "cuda")
    assert (case.q_lens, case.kv_sizes, case.dtype) == ((1,), (1,), torch.bfloat16)
    lse, results = run(case, device)
    expected_varlen(case, device).check(lse, **results)
    results["dq"] = results["dq"] * 1.1
    with pytest.raises(AssertionError, match=r"dq .* error"):
        expected_varlen(case, device).check(lse, **results)
