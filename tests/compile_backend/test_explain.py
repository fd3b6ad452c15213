"""The report, and `torch_fdattn.explain`."""

import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline

import torch_fdattn
from tests.compile_backend.harness import qkv
from torch_fdattn.compile_backend.report import (
    MASK_REASONS,
    MATMUL_REASONS,
    REASONS,
    Report,
    Site,
    Unsupported,
)

sdpa = F.scaled_dot_product_attention


def two_sites(q, k, v):
    first = sdpa(q, k, v, is_causal=True)
    return (q @ k.mT).softmax(-2) @ first


def test_explain():
    report = torch_fdattn.explain(two_sites)(*qkv())
    text = re.sub(r"\S*test_explain.py:\d+", "FILE:LINE", str(report))
    assert_expected_inline(
        text,
        """\
1 of 2 attention sites rewritten, in 1 graph
  FILE:LINE: scaled_dot_product_attention -> fdattn.attention
  FILE:LINE: matmul, softmax, matmul: left as it was, softmax-dim: the softmax is over dimension -2 of 4""",
    )
    first, second = report
    source = Path(__file__).read_text().splitlines()
    lines = [source[int(site.where.rsplit(":", 1)[1]) - 1] for site in (first, second)]
    assert "sdpa(" in lines[0]
    assert "softmax(-2)" in lines[1]
    assert report.rewritten == [first]
    assert report.left == [second]


def test_it_stays_a_function():
    """A submodule of its name would take its place in the package when it is first imported."""
    torch_fdattn.explain(torch.sin)(torch.ones(3))
    assert torch_fdattn.compile_backend.explain is torch_fdattn.explain


def test_graphs_are_counted_over_breaks():
    def fn(q, k, v):
        out = sdpa(q, k, v)
        torch._dynamo.graph_break()
        return sdpa(out, k, v)

    report = torch_fdattn.explain(fn)(*qkv())
    assert report.graphs == 2
    assert [site.op for site in report] == ["attention", "attention"]


def test_explain_leaves_nothing_compiled():
    """Any number of times: what one call compiled counts against no limit of the next."""
    args = qkv(grad=False)
    for _ in range(torch._dynamo.config.recompile_limit + 1):
        assert len(torch_fdattn.explain(two_sites)(*args)) == 2


def test_arguments_beside_the_function_are_refused():
    with pytest.raises(TypeError, match=r"function alone, got 1 more: explain\(fn\)\(\*args\)"):
        torch_fdattn.explain(torch.sin, torch.ones(3))


def test_a_function_without_attention():
    report = torch_fdattn.explain(torch.sin)(torch.ones(3))
    assert str(report) == "no attention found in 1 graph"


def test_calls_of_our_own_ops_are_counted():
    """A model that was moved to our ops is not told that it has no attention."""

    def fn(q, k, v):
        out, _ = torch_fdattn.attention(q, k, v, causal=True)
        torch._dynamo.graph_break()
        out, lse = torch.ops.fdattn.attention.default(out, k, v)
        out = sdpa(out, k, v)
        return torch_fdattn.merge_states(out[None], lse[None])

    report = torch_fdattn.explain(fn)(*qkv())
    assert report.fdattn_calls == {"attention": 2, "merge_states": 1}  # what SDPA became is none
    assert str(report).splitlines()[0] == (
        "1 of 1 attention sites rewritten, in 2 graphs; it calls ops of torch_fdattn itself, which stay: "
        "2 of fdattn.attention, 1 of fdattn.merge_states"
    )


def test_every_reason_in_the_sources_is_listed():
    """A code that the table lacks would be a KeyError where it is raised without a detail."""
    root = Path(torch_fdattn.__file__).parent / "compile_backend"
    tensor_parallel = root / "tensor_parallel"
    files = [path for path in root.rglob("*.py") if path.parent != tensor_parallel]
    text = "\n".join(path.read_text() for path in files)
    raised = set(re.findall(r'Unsupported\(\s*"([a-z0-9-]+)"', text))
    raised |= set(re.findall(r'_unsupported_if\([^"]*"([a-z0-9-]+)"', text))
    raised |= {"scores-used", "weights-unknown", "token-mixing"}
    assert raised == set(REASONS)
    text = "\n".join(path.read_text() for path in tensor_parallel.glob("*.py"))
    assert set(re.findall(r'Unsupported\(\s*"([a-z0-9-]+)"', text)) == set(MATMUL_REASONS)


def test_every_reason_why_masks_stay_is_listed():
    root = Path(torch_fdattn.__file__).parent / "compile_backend"
    used = set(re.findall(r'"(mask-[a-z]+)"', (root / "masks" / "recovery.py").read_text()))
    assert used - {"mask-value"} == set(MASK_REASONS)


def test_a_site_without_a_stack_trace():
    site = Site(form="x", node="n", op=None, reason="mask", detail=Unsupported("mask").detail)
    assert str(site).startswith("node n: x: left as it was, mask: a mask that is no")
    assert Report([site]).reasons == ["mask"]
