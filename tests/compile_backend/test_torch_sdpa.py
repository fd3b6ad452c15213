"""On a CPU, compiled by Inductor, an SDPA site stays torch's own but where ours is much faster."""

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention as sdpa

from tests.compile_backend import harness
from tests.compile_backend.harness import check, ops, qkv
from torch_fdattn.compile_backend import fdattn, torch_sdpa
from torch_fdattn.ops.attention import cpu
from torch_fdattn.ops.library import launches

OP = "scaled_dot_product_attention"


@pytest.fixture(autouse=True)
def as_inductor_gets_it(monkeypatch):
    """The pass as it is for Inductor, lowered by AOTAutograd alone."""
    launches.clear()
    monkeypatch.setattr(cpu, "REFERENCE_ALONE", False)
    monkeypatch.setattr(
        harness, "rewrite", lambda gm, **options: _rewrite(gm, sdpa_on_cpu=True, **options)
    )


_rewrite = harness.rewrite


def written(q, k, v):
    return (q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5).softmax(-1) @ v


@pytest.mark.parametrize("masked", [False, True])
def test_an_sdpa_site_stays(masked):
    """With a mask of data too, whose hidden rows are torch's own affair."""
    q, k, v = qkv()
    mask = torch.rand(2, 1, 8, 8) < 0.7
    mask[:, :, 3] = False

    def fn(q, k, v, mask):
        return sdpa(q, k, v, attn_mask=mask) if masked else sdpa(q, k, v, is_causal=True)

    found = check(fn, q, k, v, mask, exact=True)
    assert ops(found) == [OP]
    assert not launches
    report = found.report
    assert (report.rewritten, report.left) == ([], [])
    assert str(report).startswith("0 of 1 attention sites rewritten, 1 torch's own, in 1 graph")
    assert "scaled_dot_product_attention -> torch's own" in str(report)
    report.check("options require all, and")  # accepts it


def test_what_is_written_out_is_ours():
    """A query with NaN alone in its scores has NaN, where torch's kernel says 0."""
    q, k, v = qkv(grad=False)
    q[0, 0, 3] = torch.nan
    found = check(written, q, k, v)
    assert ops(found) == ["attention"]


def test_where_ours_is_faster(monkeypatch):
    def banded(q, k, v):
        i = torch.arange(q.shape[2])
        distance = i[:, None] - i
        return sdpa(q, k, v, attn_mask=(distance >= 0) & (distance < 3))

    assert ops(check(banded, *qkv())) == [OP]
    monkeypatch.setattr(torch_sdpa, "WINDOW_KEYS", 8)
    assert ops(check(banded, *qkv())) == ["attention"]
    for dtype, op in ((torch.float32, OP), (torch.bfloat16, "decode")):
        assert ops(check(sdpa, *qkv(1, 64, grad=False, dtype=dtype), rtol=2e-2, atol=2e-2)) == [OP]
        inputs = qkv(1, 512, grad=False, dtype=dtype)
        assert ops(check(lambda q, k, v: sdpa(q, k, v), *inputs, rtol=2e-2, atol=2e-2)) == [op]


def test_who_gets_it(monkeypatch):
    """Inductor alone, and not under TORCH_FDATTN_REFERENCE."""
    args = qkv(grad=False)
    expected = sdpa(*args, is_causal=True)

    def causal(q, k, v):
        return sdpa(q, k, v, is_causal=True)

    def run(**options):
        torch._dynamo.reset()
        launches.clear()
        found = torch.compile(causal, backend=fdattn, options=options)(*args)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
        return dict(launches)

    assert run() == {}
    assert run(lower="aot_eager") == {"attention_forward/cpu": 1}
    monkeypatch.setattr(cpu, "REFERENCE_ALONE", True)
    assert run() == {"attention_forward/cpu": 1}
