"""A softmax between two products is attention, whatever else stands between: what no form matches is reported."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

import torch_fdattn
from tests.compile_backend.harness import check, qkv

HIDDEN = torch.ones(8, 8, dtype=torch.bool).triu(1)


def in_place(change):
    def fn(q, k, v):
        scores = q @ k.mT
        scores = change(scores)
        return F.dropout(scores.softmax(-1), 0.0, training=True).relu() @ v

    return fn


def squared(scores):
    scores **= 2
    return scores


def placed(scores):
    padded = torch.full((2, 4, 8, 8), -math.inf)
    padded[..., :6] = scores[..., :6]
    return padded


#: Scores that no form has, and weights that none has: (the operation that is named, the function).
UNMATCHED = {
    "**=": ("ipow", in_place(squared)),
    "abs_": ("abs_", in_place(lambda s: s.abs_())),
    "clamp_": ("clamp", in_place(lambda s: s.clamp_(-9, 9))),
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

#: How softmax and products may be written, too.
SPELLINGS = {
    "exp, sum": lambda q, k, v: (
        (e := (q @ k.mT).exp()), (e / e.sum(-1, keepdim=True)) @ v
    )[1],
    "less the maximum": lambda q, k, v: (
        (s := q @ k.mT), (e := torch.exp(s - s.amax(-1, keepdim=True))), (e @ v) / e.sum(-1)[..., None]
    )[2],
    "divided in place": lambda q, k, v: (
        (e := (q @ k.mT).exp()), (w := e.clone()), w.div_(e.sum(-1, keepdim=True)), w @ v
    )[3],
    "logsumexp": lambda q, k, v: (
        (s := q @ k.mT), (s - s.logsumexp(-1, keepdim=True)).exp() @ v
    )[1],
    "torch.masked.softmax": lambda q, k, v: (
        torch.masked.softmax(q @ k.mT, -1, mask=~HIDDEN.expand(2, 4, 8, 8)) @ v
    ),
    "torch.masked.log_softmax": lambda q, k, v: (
        torch.masked.log_softmax(q @ k.mT, -1).exp() @ v
    ),
    "aten.bmm": lambda q, k, v: torch.ops.aten.bmm(
        torch.ops.aten.bmm.default(q[0], k[0].mT).clamp(max=4).softmax(-1), v[0]
    ),
    "linalg.matmul": lambda q, k, v: torch.linalg.matmul(
        torch.linalg.matmul(q, k.mT).clamp(max=4).softmax(-1), v
    ),
    "__matmul__": lambda q, k, v: q.__matmul__(k.mT).clamp(max=4).softmax(-1).__matmul__(v),
    "multi_dot": lambda q, k, v: torch.linalg.multi_dot(
        [(q @ k.mT)[0, 0].clamp(max=4).softmax(-1), v[0, 0]]
    ),
    "softmax alone in a checkpoint": lambda q, k, v: (
        checkpoint(lambda s: s.softmax(-1), q @ k.mT, use_reentrant=False) @ v
    ),
    "softmax and product in a checkpoint": lambda q, k, v: checkpoint(
        lambda s, v: s.clamp(max=4).softmax(-1) @ v, q @ k.mT, v, use_reentrant=False
    ),
    "product in a checkpoint": lambda q, k, v: (
        checkpoint(lambda q, k: q @ k.mT, q, k, use_reentrant=False).softmax(-1) @ v
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SPELLINGS)
def test_other_spellings(name):
    found = check(SPELLINGS[name], *qkv(grad=False), lower="eager", exact=True)
    assert len(found.report.left) == 1, str(found.report)


def test_products_that_are_spelled_otherwise_are_rewritten():
    def fn(q, k, v):
        return torch.linalg.matmul(q.__matmul__(k.mT).softmax(-1), v)

    assert [site.op for site in check(fn, *qkv(), lower="eager").report] == ["attention"]


class Learned(torch.nn.Module):
    """What parameters are to attention beside projections of tokens: queries, and mixtures of heads."""

    def __init__(self, form):
        super().__init__()
        self.form, self.heads = form, torch.nn.Linear(4, 4)
        self.latents = torch.nn.Parameter(torch.randn(6, 16))
        self.of_heads = torch.nn.Parameter(torch.randn(4, 16))
        self.split = torch.nn.Parameter(torch.randn(1, 4, 6, 16))
        self.to_q = torch.nn.Linear(16, 64)
        self.mixing = torch.nn.Parameter(torch.randn(4, 4))

    def projected(self, batch):
        return self.to_q(self.latents).view(1, 6, 4, 16).transpose(1, 2).expand(batch, -1, -1, -1)

    def forward(self, q, k, v):
        return getattr(self, self.form)(q, k, v)

    def perceiver(self, q, k, v):
        return (self.projected(2) @ k.mT).clamp(-9, 9).softmax(-1).square() @ v

    def in_place(self, q, k, v):
        scores = self.projected(2) @ k.mT
        scores += 1
        return F.dropout(scores.softmax(-1), 0.0, True).abs() @ v

    def detr(self, q, k, v):
        queries = (torch.zeros(2, 6, 16) + self.latents) @ self.to_q.weight.T
        queries = F.layer_norm(queries, (64,)).view(2, 6, 4, 16).transpose(1, 2)
        return torch.einsum("bhqd,bhkd->bhqk", queries, k).clamp(max=9).softmax(-1).abs() @ v

    def plain(self, q, k, v):
        return (self.latents @ k.mT).clamp(max=9).softmax(-1).abs() @ v

    def of_a_head(self, q, k, v):
        scores = torch.einsum("hd,bhkd->bhk", self.of_heads, k).clamp(max=9)
        return torch.einsum("bhk,bhkd->bhd", scores.softmax(-1).abs(), v)

    def keys_first(self, q, k, v):
        return (k @ self.split.expand(2, -1, -1, -1).mT).clamp(max=9).softmax(-2).mT @ v

    def talking(self, q, k, v):
        scores = self.heads((q @ k.mT).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        weights = self.heads(scores.softmax(-1).permute(0, 2, 3, 1))
        return weights.permute(0, 3, 1, 2) @ v

    def talking_by_convolution(self, q, k, v):
        mixing = self.mixing[:, :, None, None]
        return F.conv2d(F.conv2d(q @ k.mT, mixing).softmax(-1), mixing) @ v

    def talking_by_einsum(self, q, k, v):
        scores = torch.einsum("bhqk,hg->bgqk", q @ k.mT, self.mixing)
        return torch.einsum("bhqk,hg->bgqk", scores.softmax(-1), self.mixing) @ v

    def talking_by_product(self, q, k, v):
        scores = ((q @ k.mT).permute(0, 2, 3, 1) @ self.mixing).permute(0, 3, 1, 2)
        return scores.softmax(-1).abs() @ v


@pytest.mark.parametrize("form", [name for name in vars(Learned) if name not in ("projected", "forward")
                                  and not name.startswith("_")])  # fmt: skip
def test_parameters_as_queries_and_over_heads(form):
    found = check(Learned(form), *qkv(grad=False), lower="eager", exact=True)
    assert len(found.report.left) == 1, str(found.report)


class NoAttention(torch.nn.Module):
    """Softmaxes that are none of scores of queries and keys, each with products about."""

    def __init__(self, form):
        super().__init__()
        self.form, self.gate, self.out = form, torch.nn.Linear(16, 4), torch.nn.Linear(16, 16)
        self.score = torch.nn.Linear(16, 1)
        self.a, self.b = (torch.nn.Parameter(torch.randn(x)) for x in ((16, 2), (2, 4)))
        self.of_heads = torch.nn.Parameter(torch.randn(4, 16, 8))
        self.slots = torch.nn.Parameter(torch.randn(16, 4, 2))
        self.classes = torch.nn.Parameter(torch.randn(10, 16))

    def forward(self, q, k, v):
        return getattr(self, self.form)(q, k, v)

    def router(self, q, k, v):
        return torch.einsum("bse,bsd->bed", self.gate(q[:, 0]).softmax(-1), v[:, 0])

    def router_by_a_product(self, q, k, v):
        return torch.einsum("bse,bsd->bed", (q[:, 0] @ self.a @ self.b).softmax(-1), v[:, 0])

    def router_with_an_adapter(self, q, k, v):
        weight = self.gate.weight.T + self.a @ self.b
        return torch.einsum("bse,bsd->bed", (q[:, 0] @ weight).softmax(-1), v[:, 0])

    def router_with_noise(self, q, k, v):
        logits = self.gate(q[:, 0]) + k[:, 0, :, :4]
        return torch.einsum("bse,bsd->bed", logits.softmax(-1), v[:, 0])

    def routers_of_heads(self, q, k, v):
        weights = torch.einsum("bhsd,hde->bhse", q, self.of_heads).softmax(-1)
        return torch.einsum("bhse,bhsd->bhed", weights, v)

    def experts(self, q, k, v):
        weights = self.gate(q).softmax(-1)
        return (weights.unsqueeze(-2) @ torch.stack([k, v, q, k], -2)).squeeze(-2)

    def soft_moe(self, q, k, v):
        x = self.out(q[:, 0])
        logits = torch.einsum("bnd,des->bnes", x, self.slots)
        slots = torch.einsum("bnes,bnd->besd", logits.softmax(1), x)
        return torch.einsum("bnes,besd->bnd", logits.flatten(2).softmax(-1).view_as(logits), slots)

    def pooling(self, q, k, v):
        x = self.out(F.scaled_dot_product_attention(q, k, v)[:, 0])
        return self.score(x).softmax(1).mT @ x

    def pooling_by_a_product(self, q, k, v):
        return (q[:, 0] @ self.classes[:1].T).softmax(1).mT @ v[:, 0]

    def class_head(self, q, k, v):
        x = self.out(F.scaled_dot_product_attention(q, k, v))
        return (x @ self.classes.T).softmax(-1) @ self.classes

    def contrastive(self, q, k, v):
        similar = F.normalize(self.out(q[0, 0])) @ F.normalize(self.out(k[0, 0])).T
        return (
            F.cross_entropy(similar, torch.arange(len(similar)))
            - similar.log_softmax(0).diag().mean()
        )

    def own_contrastive(self, q, k, v):
        similar = (q[0, 0] @ k[0, 0].T).exp()
        return -(similar.diag() / similar.sum(-1)).log().mean()

    def linear_attention(self, q, k, v):
        q, k = (self.out(x).exp() for x in (q, k))
        return (q @ (k.mT @ v)) / (q @ k.sum(-2, keepdim=True).mT)


@pytest.mark.parametrize("form", [name for name in vars(NoAttention) if name != "forward"
                                  and not name.startswith("_")])  # fmt: skip
def test_what_is_no_attention(form):
    found = check(NoAttention(form), *qkv(grad=False), lower="eager")
    assert not found.report.left, str(found.report)


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
    fn = UNMATCHED["**="][1]
    args = qkv(grad=False)
    report = torch_fdattn.explain(fn)(*args)
    assert str(report).startswith("0 of 1 attention sites rewritten")
    assert "left as it was, unknown-op: ipow (" in str(report)
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
