"""A softmax between two products is attention, whatever else stands between: what no form matches is reported."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.utils import counters

import torch_fdattn
from tests.compile_backend.harness import check, qkv

HIDDEN = torch.ones(8, 8, dtype=torch.bool).triu(1)


def in_place(change):
    def fn(q, k, v):
        scores = q @ k.mT
        scores = change(scores)
        return F.dropout(scores.softmax(-1), 0.0, training=True).relu() @ v

    return fn


def added(scores):
    scores += torch.full((8, 8), -math.inf).triu(1)
    return scores


def divided(scores):
    scores /= 4
    return scores


def placed(scores):
    padded = torch.full((2, 4, 8, 8), -math.inf)
    padded[..., :6] = scores[..., :6]
    return padded


#: Scores that no form has, and weights that none has: (the operation that is named, the function).
UNMATCHED = {
    "+=": ("iadd", in_place(added)),
    "/=": ("itruediv", in_place(divided)),
    "masked_fill_": ("masked_fill_", in_place(lambda s: s.masked_fill_(HIDDEN, -math.inf))),
    "clamp": ("clamp", in_place(lambda s: s.clamp(-9, 9))),
    "into another tensor": ("setitem", in_place(placed)),
    "log_softmax, exp": ("log_softmax", lambda q, k, v: (q @ k.mT).log_softmax(-1).exp() @ v),
    "F.log_softmax, exp": ("log_softmax", lambda q, k, v: F.log_softmax(q @ k.mT, -1).exp() @ v),
    "softmin": ("softmin", lambda q, k, v: F.softmin(q @ k.mT, -1) @ v),
    "nn.Softmin": ("softmin", lambda q, k, v: torch.nn.Softmin(-1)(q @ k.mT) @ v),
    "torch._softmax": ("_softmax", lambda q, k, v: torch._softmax(q @ k.mT, -1, False) @ v),
    "aten._softmax": ("_softmax", lambda q, k, v: torch.ops.aten._softmax(q @ k.mT, -1, False) @ v),
    "gumbel_softmax": ("gumbel_softmax", lambda q, k, v: F.gumbel_softmax(q @ k.mT, dim=-1) @ v),
    "products by einsum": (
        "clamp",
        lambda q, k, v: torch.einsum(
            "bhqk,bhkd->bhqd",
            torch.einsum("bhqd,bhkd->bhqk", q, k).clamp(max=5).softmax(-1).square(),
            v,
        ),
    ),
    "bmm and baddbmm": (
        "clamp",
        lambda q, k, v: torch.baddbmm(
            v[0], torch.bmm(q[0], k[0].mT).clamp(max=5).softmax(-1).sqrt(), v[0]
        ),
    ),
    "weights in a buffer": (
        "clamp",
        lambda q, k, v: (w := q.new_zeros(2, 4, 8, 8), w.copy_((q @ k.mT).clamp(max=5).softmax(-1)),
                         w @ v)[-1],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", UNMATCHED)
def test_it_is_left_and_named(name):
    operation, fn = UNMATCHED[name]
    found = check(fn, *qkv(grad=name == "clamp"), lower="eager", exact=True)
    assert found.report.reasons == ["unknown-op"], str(found.report)
    (site,) = found.report
    assert site.detail.startswith(f"{operation} ("), site.detail
    assert "test_unmatched_sites.py:" in site.detail


def test_where_it_is_counted():
    """In counters and in `explain`, and `require_all` fails."""
    fn = UNMATCHED["+="][1]
    args = qkv(grad=False)
    report = torch_fdattn.explain(fn)(*args)
    assert str(report).startswith("0 of 1 attention sites rewritten")
    assert "left as it was, unknown-op: iadd (" in str(report)
    torch._dynamo.reset()
    counters.clear()
    torch.compile(fn, backend="fdattn", options={"lower": "eager"})(*args)
    assert counters["fdattn"]["left/unknown-op"] == counters["fdattn"]["left"] == 1
    torch._dynamo.reset()
    options = {"lower": "eager", "require_all": True}
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="unknown-op"):
        torch.compile(fn, backend="fdattn", options=options)(*args)


def test_mpnet_in_training():
    """Its position bias is added in place, and dropout is on: two sites that nobody saw."""
    transformers = pytest.importorskip("transformers")
    config = transformers.MPNetConfig(
        vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, attn_implementation="eager",
    )  # fmt: skip
    model = transformers.MPNetModel(config).train()
    report = torch_fdattn.explain(lambda x: model(x).last_hidden_state)(torch.arange(3, 19)[None])
    assert len(report.left) == 2, str(report)


class Router(torch.nn.Module):
    """Experts' outputs, weighed by a softmax of a product with a parameter."""

    def __init__(self, kind):
        super().__init__()
        self.kind, self.gate = kind, torch.nn.Linear(16, 4, bias=False)
        self.vectors = torch.nn.Parameter(torch.randn(4, 16))

    def forward(self, x, experts):
        if self.kind == "linear":
            logits = self.gate(x)
        elif self.kind == "matmul":
            logits = x @ self.gate.weight.T.float().contiguous()
        else:
            logits = x @ x.mT  # activations, but what the weights go into is a parameter
            return logits.softmax(-1)[..., :4] @ self.vectors
        weights = logits.softmax(-1)
        return (weights.unsqueeze(-2) @ experts).squeeze(-2)


@pytest.mark.parametrize("kind", ["linear", "matmul", "embeddings"])
def test_a_product_with_a_parameter_is_no_attentions(kind):
    x, experts = torch.randn(2, 8, 16), torch.randn(2, 8, 4, 16)
    found = check(Router(kind), x, experts, lower="eager", exact=True)
    known = kind == "embeddings"  # its scores are attention's, so that it was always reported
    assert len(found.report) == known, str(found.report)


def test_classifiers_behind_attention_are_none():
    """The way from a product to a softmax ends at the next projection."""
    head = torch.nn.Linear(16, 8)

    def fn(q, k, v):
        out = F.scaled_dot_product_attention(q, k, v)
        return F.log_softmax(head(out @ (out.mT @ out)), -1)

    found = check(fn, *qkv(grad=False), lower="eager")
    assert [site.op for site in found.report] == ["attention"]
