"""Near-misses: they look like attention that we have, and are not. They stay as they are, for a named reason.

Each is run against eager too, bit for bit: nothing of it may have been changed.
"""

import pytest
import torch
import torch.nn.functional as F

from tests.compile_backend.harness import Recorder, check, ops, qkv
from torch_fdattn.compile_backend.rewrite import rewrite

sdpa = F.scaled_dot_product_attention


def weights(q, k, scale=0.25):
    return (q @ k.transpose(-2, -1) * scale).softmax(-1)


def left(reason, fn, *args, **options):
    """fn has exactly one attention, and it is left for this reason."""
    torch.manual_seed(0)
    found = check(fn, *args, lower="eager", exact=True, **options)
    assert found.report.reasons == [reason], str(found.report)
    assert not found.report.rewritten
    assert "fdattn" not in found.graph
    return found


def test_sdpa_with_dropout():
    left("dropout", lambda q, k, v: sdpa(q, k, v, dropout_p=0.5), *qkv())


UNFUSED = {
    "softmax over queries": (
        "softmax-dim",
        lambda q, k, v: (q @ k.transpose(-2, -1)).softmax(-2) @ v,
    ),
    "weights returned": ("scores-used", lambda q, k, v: ((w := weights(q, k)) @ v, w)),
    "scores returned": (
        "scores-used",
        lambda q, k, v: ((s := q @ k.transpose(-2, -1)).softmax(-1) @ v, s),
    ),
    "scores summed": (
        "scores-used",
        lambda q, k, v: (s := q @ k.transpose(-2, -1)).softmax(-1) @ v + s.sum(),
    ),
    "weights used twice": ("scores-used", lambda q, k, v: (w := weights(q, k)) @ v + w @ (2 * v)),
    "dropout in training": (
        "dropout",
        lambda q, k, v: F.dropout(weights(q, k), 0.5, training=True) @ v,
    ),
    "a head mask": (
        "weights-unknown",
        lambda q, k, v: (weights(q, k) * torch.arange(4)[:, None, None]) @ v,
    ),
    "weights transposed": (
        "weights-unknown",
        lambda q, k, v: weights(q, k).transpose(-2, -1) @ v,
    ),
    "weights on the right": (
        "product",
        lambda q, k, v: v.transpose(-2, -1) @ weights(q, k),
    ),
    "a negative scale": ("scale", lambda q, k, v: weights(q, k, -0.25) @ v),
    "a scale from data": (
        "scores-unknown",
        lambda q, k, v: (q @ k.transpose(-2, -1) * q.sum()).softmax(-1) @ v,
    ),
    "a scale for each head": (
        "scores-unknown",
        lambda q, k, v: (
            (q @ k.transpose(-2, -1) * torch.arange(4.0)[:, None, None]).softmax(-1) @ v
        ),
    ),
    "filled with -100": (
        "mask-value",
        lambda q, k, v: (
            (q @ k.transpose(-2, -1)).masked_fill(torch.ones(8, 8).triu(1) > 0, -100.0).softmax(-1)
            @ v
        ),
    ),
    "scores written in place": (
        "in-place",
        lambda q, k, v: (s := q @ k.transpose(-2, -1), s.mul_(2), s.softmax(-1) @ v)[2],
    ),
    "k broadcast over the batch": (
        "batch-broadcast",
        lambda q, k, v: weights(q, k[:1]) @ v,
    ),
    "v broadcast over the batch": (
        "batch-broadcast",
        lambda q, k, v: weights(q, k) @ v[:1],
    ),
    "q broadcast over the heads": ("batch-broadcast", lambda q, k, v: weights(q[:, :1], k) @ v),
    "heads summed": (
        "product",
        lambda q, k, v: torch.einsum("bhqd,bgkd->bhqk", q, k).softmax(-1) @ v,
    ),
    "values summed over heads": (
        "product",
        lambda q, k, v: torch.einsum("bhqk,bhkd->bqd", weights(q, k), v),
    ),
    "a negative cap": (
        "scores-unknown",
        lambda q, k, v: (-20 * torch.tanh(q @ k.transpose(-2, -1) / 20)).softmax(-1) @ v,
    ),
    "capped twice": (
        "scores-unknown",
        lambda q, k, v: (q @ k.transpose(-2, -1)).tanh().mul(2).tanh().softmax(-1) @ v,
    ),
    "masked, then capped": (
        "scores-unknown",
        lambda q, k, v: (q @ k.transpose(-2, -1) + q[..., :8]).tanh().softmax(-1) @ v,
    ),
    "a cap from data": (
        "scores-unknown",
        lambda q, k, v: ((q @ k.transpose(-2, -1)).tanh() * q.sum()).softmax(-1) @ v,
    ),
    "filled with -1e9": (
        "mask-value",
        lambda q, k, v: (
            (q @ k.transpose(-2, -1)).masked_fill(torch.ones(8, 8).triu(1) > 0, -1e9).softmax(-1)
            @ v
        ),
    ),
    "filled with data": (
        "mask",
        lambda q, k, v: (
            torch.where(torch.ones(8, 8).tril() > 0, q @ k.transpose(-2, -1), q[..., :8]).softmax(
                -1
            )
            @ v
        ),
    ),
    "a mask of integers": (
        "mask",
        lambda q, k, v: (q @ k.transpose(-2, -1) - torch.arange(8)).softmax(-1) @ v,
    ),
    "a bias subtracted from": (
        "scores-unknown",
        lambda q, k, v: (q[..., :8] - q @ k.transpose(-2, -1)).softmax(-1) @ v,
    ),
    "a bias that is added twofold": (
        "scores-unknown",
        lambda q, k, v: torch.add(q @ k.transpose(-2, -1), q[..., :8], alpha=2).softmax(-1) @ v,
    ),
    "heads apart from the batch only for the mask": (
        "scores-unknown",
        lambda q, k, v: (
            torch.bmm(q.flatten(0, 1), k.flatten(0, 1).mT)
            .view(2, 4, 8, 8)
            .softmax(-1)
            .view(8, 8, 8)
            @ v.flatten(0, 1)
        ),
    ),
    "a bias by baddbmm": (
        "mask",
        lambda q, k, v: torch.bmm(torch.baddbmm(q[0] @ k[0].mT, q[0], k[0].mT).softmax(-1), v[0]),
    ),
}


@pytest.mark.parametrize("name", UNFUSED)
def test_unfused_attention(name):
    reason, fn = UNFUSED[name]
    left(reason, fn, *qkv())


# Square tensors, so that the wrong product has a valid shape.
_SQUARE = {
    "k in place of kᵀ": lambda q, k, v: (q @ k).softmax(-1) @ v,
    "weights times vᵀ": lambda q, k, v: weights(q, k) @ v.transpose(-2, -1),
}


@pytest.mark.parametrize("name", _SQUARE)
def test_products_without_transposition_keep_their_meaning(name):
    """(q k) is q times the transposed of kᵀ: another attention, over the columns of k, and still one of ours."""
    found = check(_SQUARE[name], *qkv(16), lower="eager")
    assert ops(found) == ["attention"]
    assert "transpose" in found.graph


NOT_ATTENTION = {
    "a classifier": lambda x, w: F.softmax(F.linear(x, w), dim=-1),
    "a router": lambda x, w: (x[:, 0, 0] @ w.T).softmax(-1),
    "pooling by a parameter": lambda x, w: x.sum(-1).softmax(-1),
}


@pytest.mark.parametrize("name", NOT_ATTENTION)
def test_other_softmaxes_are_no_sites(name):
    x, w = torch.randn(2, 4, 8, 16), torch.randn(32, 16)
    found = check(NOT_ATTENTION[name], x, w, lower="eager", exact=True)
    assert len(found.report) == 0


def test_a_function_of_the_users_named_softmax():
    """Functions are known by identity."""

    @torch._dynamo.allow_in_graph
    def softmax(x, dim):
        return x.relu()

    left_over = check(
        lambda q, k, v: softmax(q @ k.transpose(-2, -1), dim=-1) @ v,
        *qkv(),
        lower="eager",
        exact=True,
    )
    assert len(left_over.report) == 0


@pytest.mark.parametrize("dim", [8, 12, 20, 264])
def test_head_dims(dim):
    left("head-dim", lambda q, k, v: sdpa(q, k, v), *qkv(dim=dim))


def test_five_dimensions():
    left("rank", lambda q, k, v: sdpa(q, k, v), *(torch.randn(1, 2, 4, 8, 16) for _ in range(3)))


def test_batches_of_keys_that_are_broadcast():
    q, k, v = qkv()
    left("batch-broadcast", lambda q, k, v: sdpa(q, k[:1], v[:1]), q, k, v)


def test_heads_that_repeat_in_another_order():
    """k.repeat gives head h the source's head h % H_kv, and grouped heads h // n: the copies stay."""
    found = check(
        lambda q, k, v: sdpa(q, k.repeat(1, 2, 1, 1), v.repeat(1, 2, 1, 1)), *qkv(kv_heads=2)
    )
    assert ops(found) == ["attention"]
    assert found.graph.count(".repeat(") == 2


def test_heads_that_expand_in_another_order():
    def tiled(x):
        return x[:, None].expand(2, 2, 2, 8, 16).reshape(2, 4, 8, 16)

    found = check(lambda q, k, v: sdpa(q, tiled(k), tiled(v)), *qkv(kv_heads=2))
    assert ops(found) == ["attention"]
    assert found.graph.count(".expand(") == 2


def test_an_interleaved_sequence_is_not_interleaved_heads():
    found = check(
        lambda q, k, v: sdpa(q, k.repeat_interleave(2, 2), v.repeat_interleave(2, 2)), *qkv()
    )
    assert ops(found) == ["attention"]
    assert found.graph.count(".repeat_interleave(") == 2


def test_only_k_is_repeated():
    """Its copies are needed: v has as many heads as q."""
    q, k, _ = qkv(kv_heads=2)
    found = check(
        lambda q, k, v: sdpa(q, k.repeat_interleave(2, 1), v), q, k, qkv()[2], lower="eager"
    )
    assert ops(found) == ["attention"]
    assert found.graph.count(".repeat_interleave(") == 1
    assert not found.report.sites[0].notes


def test_scores_without_gradients():
    """q and k get none, and would from an attention."""

    def fn(q, k, v):
        with torch.no_grad():
            w = weights(q, k)
        return w @ v

    left("gradient", fn, *qkv())


def test_scores_without_gradients_and_values_that_want_none():
    def fn(q, k, v):
        with torch.no_grad():
            w = weights(q, k)
        return w @ v, q * 2

    q, k, v = qkv()
    left("gradient", fn, q, k, v.detach())


def test_copies_without_gradients():
    def fn(q, k, v):
        with torch.no_grad():
            keys = k.repeat_interleave(2, 1)
        return sdpa(q, keys, v.repeat_interleave(2, 1))

    left("gradient", fn, *qkv(kv_heads=2))


def test_all_of_it_without_gradients():
    def fn(q, k, v):
        with torch.no_grad():
            return weights(q, k) @ v

    assert ops(check(fn, *qkv(24), lower="eager")) == ["attention"]


def test_modules_of_torch_that_are_one_call():
    """Dynamo does not open nn.MultiheadAttention."""
    layer = torch.nn.MultiheadAttention(64, 4, batch_first=True)
    left("opaque", lambda x: layer(x, x, x, need_weights=False)[0], torch.randn(2, 8, 64))


@pytest.mark.slow
def test_flex_attention_is_reported():
    from torch.nn.attention.flex_attention import flex_attention

    found = check(lambda q, k, v: flex_attention(q, k, v), *qkv(128, grad=False), lower="eager")
    assert found.report.reasons == ["opaque"]


def test_a_call_in_an_unknown_form():
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    out = graph.call_function(sdpa, (x, x, x), {"no_such": 1})
    x.meta["example_value"] = out.meta["example_value"] = torch.empty(2)
    graph.output(out)
    assert rewrite(torch.fx.GraphModule({}, graph)).reasons == ["unexpected"]


def test_a_cache_written_to_after_it_was_copied():
    """What the heads' copy holds is not what the cache holds when attention runs."""

    def fn(q, k, v):
        keys = k.repeat_interleave(2, 1)
        k.mul_(0)
        return sdpa(q, keys, v.repeat_interleave(2, 1))

    q, k, v = qkv(kv_heads=2, grad=False)
    torch._dynamo.reset()
    backend = Recorder("eager")
    found = torch.compile(fn, backend=backend, fullgraph=True)(q, k.clone(), v)
    torch.testing.assert_close(found, fn(q, k.clone(), v), rtol=0, atol=0)
    assert backend.found.report.reasons == ["in-place"]


def test_mixed_dtypes_of_scores_and_values():
    q, k, _ = qkv(dtype=torch.bfloat16, grad=False)
    v = torch.randn(2, 4, 8, 16)
    left("dtype", lambda q, k, v: weights(q, k).float() @ v, q, k, v)


def test_functorch():
    def fn(q, k, v):
        return torch.func.vmap(lambda q, k, v: sdpa(q, k, v))(q[None], k[None], v[None])

    found = check(fn, *qkv(grad=False), lower="eager", exact=True)
    assert found.report.reasons == ["functorch"]


def test_a_nested_tensor():
    """By hand: Dynamo itself has none on the CPU."""
    parts = [torch.randn(n, 4, 16) for n in (3, 5)]
    nested = torch.nested.nested_tensor(parts, layout=torch.jagged).transpose(1, 2)
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    out = graph.call_function(sdpa, (x, x, x))
    x.meta["example_value"] = out.meta["example_value"] = nested
    graph.output(out)
    report = rewrite(torch.fx.GraphModule({}, graph))
    assert report.reasons == ["nested"]


def test_a_graph_without_metadata():
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    graph.output(graph.call_function(sdpa, (x, x, x)))
    gm = torch.fx.GraphModule({}, graph)
    code = gm.code
    assert rewrite(gm).reasons == ["metadata"]
    assert gm.code == code


def test_float64_on_a_gpu():
    """By hand, with fake tensors."""
    with torch._subclasses.FakeTensorMode():
        fake = torch.empty(2, 4, 8, 16, dtype=torch.float64, device="cuda")
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    out = graph.call_function(sdpa, (x, x, x))
    x.meta["example_value"] = out.meta["example_value"] = fake
    graph.output(out)
    assert rewrite(torch.fx.GraphModule({}, graph)).reasons == ["float64"]


def test_a_float64_mask_on_a_gpu():
    graph, mode = torch.fx.Graph(), torch._subclasses.FakeTensorMode()

    def call(target, *args):
        node = graph.call_function(target, args)
        with mode:
            fakes = torch.fx.node.map_arg(args, lambda x: x.meta["example_value"])
            node.meta["example_value"] = target(*fakes)
        return node

    q, k, v, mask = (graph.placeholder(name) for name in "qkvm")
    with mode:
        for x in (q, k, v):
            x.meta["example_value"] = torch.empty(2, 4, 8, 16, dtype=torch.half, device="cuda")
        mask.meta["example_value"] = torch.empty(8, 8, dtype=torch.float64, device="cuda")
    scores = call(torch.add, call(torch.matmul, q, call(torch.transpose, k, 2, 3)), mask)
    weights = call(torch.softmax, scores, -1)
    node = graph.call_method("half", (weights,))
    node.meta["example_value"] = weights.meta["example_value"].half()
    graph.output(call(torch.matmul, node, v))
    assert rewrite(torch.fx.GraphModule({}, graph)).reasons == ["float64"]


@torch.library.custom_op("near_misses::store", mutates_args={"cache"})
def store(cache: torch.Tensor, x: torch.Tensor) -> None:
    cache.copy_(x)


@torch.compiler.allow_in_graph
def stored(cache, x):
    cache.copy_(x)
    return x + 0


WRITERS = {
    "an op whose name does not say so": lambda k, x: torch.ops.near_misses.store(k, x),
    "a function of the user's": stored,
    "an operator by its method": lambda k, x: k.__imul__(x),
}


@pytest.mark.parametrize("name", WRITERS)
def test_a_cache_written_to_by(name):
    def fn(q, k, v, x):
        k = k.clone()
        keys = k.repeat_interleave(2, 1)
        WRITERS[name](k, x)
        return sdpa(q, keys, v.repeat_interleave(2, 1))

    q, k, v = qkv(kv_heads=2, grad=False)
    left("in-place", fn, q, k, v, torch.randn_like(k))
