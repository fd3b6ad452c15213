"""torch.compile: one graph, raw ops in it, no recompile over lengths, gradients and strides as in eager."""

from collections import Counter

import pytest
import torch
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.testing import CompileCounterWithBackend

import torch_fdattn
from tests.pairwise import pairwise
from torch_fdattn.testing import make_tensor

CAUSAL = {"causal": True}
BACKENDS = pytest.mark.parametrize("backend", ["aot_eager", "inductor"])


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def qkv(device, q_len=5, kv_len=11, layout="bshd", requires_grad=True):
    shapes = (2, 4, q_len, 16), (2, 2, kv_len, 16), (2, 2, kv_len, 16)
    return [
        make_tensor(shape, layout, device=device).requires_grad_(requires_grad) for shape in shapes
    ]


def int32(*values, device):
    return torch.tensor(values, dtype=torch.int32, device=device)


def loss_of(out, lse, use):
    """A loss of out only, lse only, or both; nonlinear, so that every gradient differs."""
    parts = {"out": out.square().sum(), "lse": lse.square().sum()}
    return sum(parts[name] for name in use)


USES = pytest.mark.parametrize(
    "use",
    [("out",), pytest.param(("lse",), marks=pytest.mark.slow), ("out", "lse")],
    ids="+".join,
)


@pairwise(
    op=[torch_fdattn.attention, torch_fdattn.decode],
    use=[("out",), ("lse",), ("out", "lse")],
    backend=["aot_eager", "inductor"],
)
def test_training_step(op, use, backend, device):
    """Projection, attention, loss: outputs, gradients and the gradients' strides equal eager's."""
    weight = torch.randn(16, 16, device=device, requires_grad=True)
    inputs = qkv(device)
    lens = int32(11, 7, device=device)

    def step(q, k, v, weight):
        out, lse = op(q @ weight, k, v, lens, causal=True)
        return loss_of(out, lse, use)

    leaves = [*inputs, weight]
    # v has no part in lse
    eager = torch.autograd.grad(step(*leaves), leaves, allow_unused=True)
    compiled = torch.compile(step, backend=backend, fullgraph=True)
    loss = compiled(*leaves)
    found = torch.autograd.grad(loss, leaves, allow_unused=True)
    torch.testing.assert_close(loss, step(*leaves))
    for a, b in zip(found, eager, strict=True):
        b = torch.zeros_like(a) if b is None else b
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
        assert a.stride() == b.stride()


@BACKENDS
@USES
def test_training_step_of_merge(use, backend, device):
    outs, lses = (
        make_tensor((3, 1, 2, 5, 16), device=device),
        torch.randn(3, 1, 2, 5, device=device),
    )
    leaves = [outs.requires_grad_(), lses.requires_grad_()]

    def step(outs, lses):
        return loss_of(*torch_fdattn.merge_states(outs * 2, lses, dtype=torch.bfloat16), use)

    eager = torch.autograd.grad(step(*leaves), leaves)
    found = torch.autograd.grad(
        torch.compile(step, backend=backend, fullgraph=True)(*leaves), leaves
    )
    torch.testing.assert_close(found, eager, rtol=1e-4, atol=1e-5)


def captured(function, *args):
    """The names of fdattn's ops in the forward and backward graphs that AOT hands to a compiler."""
    graphs = {"forward": Counter(), "backward": Counter()}

    def collect(which):
        def compiler(gm, _):
            targets = (str(node.target) for node in gm.graph.nodes if node.op == "call_function")
            graphs[which].update(
                name.split(".")[1] for name in targets if name.startswith("fdattn.")
            )
            return gm.forward

        return compiler

    backend = aot_autograd(fw_compiler=collect("forward"), bw_compiler=collect("backward"))
    function = torch.compile(function, backend=backend, fullgraph=True)
    out = function(*args)
    if out.requires_grad:
        out.backward()
    return {name: dict(ops) for name, ops in graphs.items()}


def test_the_compiled_graph_holds_the_raw_ops(device):
    """attention_forward is saved, not recomputed: the partitioner knows its FLOPs."""
    inputs = qkv(device)
    assert captured(lambda *x: loss_of(*torch_fdattn.attention(*x), ("out",)), *inputs) == {
        "forward": {"attention_forward": 1},
        "backward": {"attention_backward": 1},
    }
    assert captured(lambda *x: loss_of(*torch_fdattn.decode(*x), ("out", "lse")), *inputs) == {
        "forward": {"decode_forward": 1},
        "backward": {"attention_backward": 1},
    }
    merged = [
        torch.randn(3, 1, 2, 5, 16, device=device, requires_grad=True),
        torch.randn(3, 1, 2, 5, device=device),
    ]
    assert captured(lambda *x: loss_of(*torch_fdattn.merge_states(*x), ("out",)), *merged) == {
        "forward": {"merge_states_forward": 1},
        "backward": {"merge_states_backward": 1},
    }


def test_without_gradients_the_graph_holds_the_forward_only(device):
    inputs = qkv(device, requires_grad=False)
    graphs = captured(lambda *x: torch_fdattn.attention(*x)[0].sum(), *inputs)
    assert graphs == {"forward": {"attention_forward": 1}, "backward": {}}


@pytest.mark.parametrize("op", [torch_fdattn.attention, torch_fdattn.decode])
def test_no_recompile_over_length_values(op, device):
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(
        lambda q, k, v, n: op(q, k, v, n, causal=True), backend=counter, fullgraph=True
    )
    inputs = qkv(device, requires_grad=False)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for lens in ((11, 7), (0, 3), (1, 99)):
            lens = int32(*lens, device=device)
            torch.testing.assert_close(compiled(*inputs, lens), op(*inputs, lens, causal=True))
    assert counter.frame_count == 1


@pytest.mark.parametrize("requires_grad", [False, True])
@BACKENDS
def test_no_recompile_over_sequence_lengths(backend, requires_grad, device):
    """With the sequence dims marked dynamic, one compilation serves every length."""
    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(
        lambda *x: torch_fdattn.attention(*x, **CAUSAL), backend=counter, fullgraph=True
    )
    with torch._dynamo.config.patch(error_on_recompile=True):
        for q_len, kv_len in ((5, 11), (64, 64), (17, 130)):
            inputs = qkv(device, q_len, kv_len, requires_grad=requires_grad)
            for x in inputs:
                torch._dynamo.mark_dynamic(x, 2)
            out, lse = compiled(*inputs)
            eager = torch_fdattn.attention(*inputs, **CAUSAL)
            torch.testing.assert_close((out, lse), eager)
            if requires_grad:
                found = torch.autograd.grad(out.sum() + lse.sum(), inputs)
                torch.testing.assert_close(
                    found, torch.autograd.grad(eager[0].sum() + eager[1].sum(), inputs)
                )
    assert counter.frame_count == 1


def test_no_recompile_over_growing_lengths_by_itself(device):
    """As a user calls it: automatic dynamic shapes settle after the second length."""
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(
        lambda *x: torch_fdattn.attention(*x, **CAUSAL)[0], backend=counter, fullgraph=True
    )
    for length in (8, 9, 10, 33, 100):
        compiled(*qkv(device, length, length, requires_grad=False))
    assert counter.frame_count == 2


def test_no_recompile_over_the_parameters_of_a_sharded_cache(device):
    """kv_block and kv_stride are symbolic integers: one compilation for every block size."""
    counter = CompileCounterWithBackend("aot_eager")

    def call(q, k, v, start, block):
        return torch_fdattn.attention(
            q, k, v, q_start=start, kv_block=block, kv_stride=2 * block, **CAUSAL
        )[0]

    compiled = torch.compile(call, backend=counter, fullgraph=True, dynamic=True)
    inputs, start = qkv(device, requires_grad=False), int32(20, 15, device=device)
    for block in (2, 3, 4, 8):
        torch.testing.assert_close(compiled(*inputs, start, block), call(*inputs, start, block))
    assert counter.frame_count == 1


@pytest.mark.parametrize(
    "numbers",
    [(0.3, 20.0, 0.5), (2, 20, 1), pytest.param((2, 20, 0), marks=pytest.mark.slow)],
    ids=str,
)
def test_numbers_that_are_traced(numbers, device):
    """Under dynamic=True a module's floats are inputs of the graph, and so are ints."""
    seed = torch.tensor([3, 4], device=device)

    def call(*inputs):
        scale, softcap, dropout_p = numbers
        return torch_fdattn.attention(
            *inputs, scale=scale, softcap=softcap, dropout_p=dropout_p, dropout_seed=seed
        )[0]

    compiled = torch.compile(call, backend="aot_eager", fullgraph=True, dynamic=True)
    inputs = qkv(device)
    found, expected = (
        (out, *torch.autograd.grad(out.square().sum(), inputs))
        for out in (compiled(*inputs), call(*inputs))
    )
    torch.testing.assert_close(found, expected)


def test_decode_over_capacities(device):
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(lambda *x: torch_fdattn.decode(*x), backend=counter, fullgraph=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for capacity in (16, 33, 64):
            q, k, v = qkv(device, 1, capacity, requires_grad=False)
            for x in (k, v):
                torch._dynamo.mark_dynamic(x, 2)
            torch.testing.assert_close(compiled(q, k, v), torch_fdattn.decode(q, k, v))
    assert counter.frame_count == 1


def test_autocast_inside_a_compiled_function(device):
    q, k, v = qkv(device, requires_grad=False)

    def call(q, k, v):
        with torch.autocast(device, dtype=torch.bfloat16):
            return torch_fdattn.attention(q, k, v, **CAUSAL)

    out, lse = torch.compile(call, backend="aot_eager", fullgraph=True)(q, k, v)
    assert (out.dtype, lse.dtype) == (torch.bfloat16, torch.float32)
    torch.testing.assert_close((out, lse), call(q, k, v))
