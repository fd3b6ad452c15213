"""Near-misses that are told by sizes, gradients, dtypes and writes: they stay as they are, for a named reason."""

import pytest
import torch

from tests.compile_backend.harness import Recorder, check, ops, qkv
from tests.compile_backend.test_near_misses import left, sdpa, weights
from torch_fdattn.compile_backend.rewrite import rewrite


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
