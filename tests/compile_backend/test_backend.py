"""The backend as a user has it: options, lowering, training, dynamic shapes, checkpoints, caches, its entry point."""

import logging
import math
import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

from tests.compile_backend.harness import Recorder, qkv
from torch_fdattn.compile_backend import fdattn
from torch_fdattn.compile_backend.rewrite import rewrite
from torch_fdattn.ops.attention import cpu
from torch_fdattn.ops.library import launches

ROOT = Path(__file__).parents[2]


sdpa = F.scaled_dot_product_attention


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()
    counters.clear()
    launches.clear()
    yield
    torch._dynamo.reset()


def layer(x, w):
    q, k, v = F.linear(x, w).unflatten(-1, (3, 2, 16)).permute(2, 0, 3, 1, 4)
    return sdpa(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


def attend(q, k, v):
    return sdpa(q, k, v, is_causal=True)


def inputs(length=8, grad=True):
    x, w = torch.randn(2, length, 32), torch.randn(96, 32) / 32**0.5
    return x.requires_grad_(grad), w.requires_grad_(grad)


def agree(fn, compiled, args):
    expected, found = fn(*args), compiled(*args)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    if expected.requires_grad:
        leaves = [x for x in args if x.requires_grad]
        grads = [torch.autograd.grad(x.sin().sum(), leaves) for x in (found, expected)]
        torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "fn", [attend, pytest.param(layer, marks=pytest.mark.slow)], ids=["attention", "layer"]
)
def test_inductor_trains(fn, monkeypatch):
    """(Inductor writes and builds no C++ for attention alone.)"""
    monkeypatch.setattr(cpu, "REFERENCE_ALONE", False)
    args = qkv() if fn is attend else inputs()
    agree(fn, torch.compile(fn, backend=fdattn, fullgraph=True), args)
    assert not launches  # torch's own op, which ours would call
    assert counters["fdattn"] == {"rewritten": 0, "left": 0, "kept": 1}


def test_inductor_with_mode_and_options(monkeypatch):
    monkeypatch.setattr(cpu, "REFERENCE_ALONE", False)
    args = qkv(grad=False)
    for options in ({"mode": "max-autotune-no-cudagraphs"}, {"options": {"max_fusion_size": 3}}):
        torch._dynamo.reset()
        agree(attend, torch.compile(attend, backend=fdattn, **options), args)
    assert counters["fdattn"]["kept"] == 2


@pytest.mark.parametrize("lower", ["aot_eager", "eager"])
def test_lower(lower):
    compiled = torch.compile(layer, backend=fdattn, options={"lower": lower}, fullgraph=True)
    agree(layer, compiled, inputs())
    assert launches["attention_forward/cpu"] == 1


@pytest.mark.parametrize("strict", [False, True])
def test_an_exported_model(strict):
    """It was exported as it is; compiled, it is rewritten like others."""

    class Model(torch.nn.Module):
        def forward(self, x, w):
            return layer(x, w)

    program = torch.export.export(Model(), inputs(grad=False), strict=strict).module()
    options = {"lower": "eager", "require_all": True}
    agree(layer, torch.compile(program, backend=fdattn, options=options), inputs())
    assert launches["attention_forward/cpu"] == 1


def test_dryrun_changes_nothing():
    options = {"dryrun": True, "lower": "aot_eager"}
    agree(layer, torch.compile(layer, backend=fdattn, options=options), inputs())
    assert not launches
    assert counters["fdattn"]["op/attention"] == 1  # what would have been


def test_require_all():
    def fn(q, k, v):
        return sdpa(q, k, v, dropout_p=0.5)

    options = {"require_all": True, "lower": "eager"}
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="left as it was, dropout"):
        torch.compile(fn, backend=fdattn, options=options)(*qkv())
    torch.compile(layer, backend=fdattn, options=options)(*inputs())


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"lower": "tvm"}, r"options\[\"lower\"\] must be one of .*, got 'tvm'"),
        ({"dryrun": 1}, r"options\[\"dryrun\"\] must be a bool, got 1"),
        ({"no_such": 1}, r"of backend=\"fdattn\" \(dryrun, require_all, no_fully_masked_rows, lower, context_parallel, tensor_parallel\)"
                         r" or of Inductor \(torch._inductor.list_options\(\) lists them\), got 'no_such'\.\n"),
        ({"require-al": True}, "got 'require-al'. Did you mean 'require_all'?"),
        ({"lower": "eager", "no_such": 1}, "got 'no_such'"),
        ({"lower": "eager", "max_fusion_size": 1}, 'must be "inductor" where mode or Inductor\'s'),
    ],
)  # fmt: skip
def test_bad_options(options, text):
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match=text) as raised:
        torch.compile(layer, backend=fdattn, options=options)(*inputs())
    assert len(str(raised.value)) < 1000


def test_inductors_options_may_be_spelt_with_hyphens():
    options = {"max-fusion-size": 1, "triton.cudagraphs": False}
    agree(attend, torch.compile(attend, backend=fdattn, options=options), qkv(24))


def test_dynamic_lengths_do_not_recompile():
    counter = CompileCounterWithBackend("eager")

    def backend(gm, x):
        counter.frame_count += 1
        return fdattn(gm, x, options={"lower": "aot_eager"})

    compiled = torch.compile(layer, backend=backend, fullgraph=True, dynamic=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for length in (8, 9, 33, 100):
            agree(layer, compiled, inputs(length))
    assert counter.frame_count == 1
    assert launches["attention_forward/cpu"] == 4


def test_dynamic_batches_and_both_lengths():
    """Which of queries and keys are more is not known: top-left by q_start, of a symbolic batch."""

    def fn(q, k, v):
        return sdpa(q, k, v, is_causal=True)

    compiled = torch.compile(fn, backend=fdattn, options={"lower": "aot_eager"})
    with torch._dynamo.config.patch(error_on_recompile=True):
        for batch, q_len, kv_len in ((2, 8, 12), (3, 30, 20), (5, 20, 20)):
            args = qkv(q_len, kv_len, batch=batch)
            for x in args:
                torch._dynamo.mark_dynamic(x, 0)
                torch._dynamo.mark_dynamic(x, 2)
            agree(fn, compiled, args)
    assert launches["attention_forward/cpu"] == 3


@pytest.mark.parametrize("additive", [False, True])
def test_a_masks_content_does_not_recompile(additive):
    """Padding to the left, to the right, none, holes: one graph, which reads its mask when it runs."""

    def fn(q, k, v, mask):
        return sdpa(q, k, v, attn_mask=mask)

    compiled = torch.compile(fn, backend=fdattn, fullgraph=True, options={"lower": "aot_eager"})
    index = torch.arange(20)
    rows = index < 13, index >= 6, index >= 0, index % 3 > 0
    with torch._dynamo.config.patch(error_on_recompile=True):
        for row in rows:
            shown = torch.stack([row, row.flip(0)])[:, None, None]
            mask = torch.where(shown, 0.0, float("-inf")) if additive else shown
            agree(fn, compiled, (*qkv(20, 20), mask))
    assert counters["fdattn"]["op/attention"] == 1
    assert launches["attention_forward/cpu"] == len(rows)


def test_a_growing_cache_is_one_decode():
    def fn(q, k, v):
        return sdpa(q, k, v, enable_gqa=True)

    compiled = torch.compile(fn, backend=fdattn, options={"lower": "aot_eager"})
    frames = []
    for length in (20, 21, 22, 50):
        args = qkv(1, length, kv_heads=2, grad=False)
        agree(fn, compiled, args)
        frames.append(counters["fdattn"]["op/decode"])
    assert frames == [1, 2, 2, 2]  # static, then dynamic
    assert launches["decode_forward/cpu"] == 4


def test_no_guards_of_ours():
    """Guards on sizes with the rewrite are those without it, but that K's sizes and V's are equal."""

    def guards(backend):
        found = []

        def count(gm, x):
            env = next(s.node.shape_env for s in x if isinstance(s, torch.SymInt))
            out = backend(gm, x)
            found.extend(str(guard.expr) for guard in env.guards)
            return out

        torch._dynamo.reset()
        inputs = qkv(8, 12, grad=False)
        for x in inputs:
            for dim in (0, 1, 2):
                torch._dynamo.maybe_mark_dynamic(x, dim)
        torch.compile(lambda q, k, v: sdpa(q, k, v, is_causal=True), backend=count)(*inputs)
        return {*found}

    from torch._dynamo.backends.debugging import aot_eager

    with_it = guards(lambda gm, x: fdattn(gm, x, options={"lower": "aot_eager"}))
    without = guards(aot_eager)
    assert without <= with_it
    assert len(with_it - without) <= 1
    assert all(re.fullmatch(r"Eq\(s\d+, s\d+\)", x) for x in with_it - without)


HEAD_DIMS = {
    "SDPA": lambda q, k, v: sdpa(q, k, v, is_causal=True),
    "over math.sqrt": lambda q, k, v: (q @ k.mT / math.sqrt(q.size(-1))).softmax(-1) @ v,
    "a power": lambda q, k, v: (q @ k.mT * q.shape[-1] ** -0.5).softmax(-1) @ v,
    "a power, into q": lambda q, k, v: (q * q.shape[-1] ** -0.5 @ k.mT).softmax(-1) @ v,
}


@pytest.mark.parametrize("name", HEAD_DIMS)
def test_a_second_head_dim(name):
    """Dynamo makes it a symbol, and the pass a number again: a graph for each."""
    fn, reports = HEAD_DIMS[name], []

    def backend(gm, x):
        recorder = Recorder(head_dims=2 if reports else 0)
        compiled = recorder(gm, x)
        reports.append(recorder.found.report)
        return compiled

    compiled = torch.compile(fn, backend=backend, fullgraph=True)
    for dim in (16, 32, 24, 32, 16):
        agree(fn, compiled, qkv(dim=dim))
    assert [len(report.rewritten) for report in reports] == [1, 1, 1]


def test_head_dims_that_kernels_do_not_have_stay_symbols():
    counts = CompileCounterWithBackend("aot_eager")

    def backend(gm, x):
        assert not rewrite(gm).rewritten
        return counts(gm, x)

    compiled = torch.compile(HEAD_DIMS["SDPA"], backend=backend, fullgraph=True)
    for dim in (12, 20, 28, 4):
        agree(HEAD_DIMS["SDPA"], compiled, qkv(dim=dim))
    assert counts.frame_count == 2


def test_activation_checkpointing():
    """The attention stands in a child graph, and is computed again in the backward."""

    def fn(x, w):
        return checkpoint(layer, x, w, use_reentrant=False)

    compiled = torch.compile(
        fn, backend=fdattn, options={"lower": "aot_eager", "require_all": True}, fullgraph=True
    )
    agree(fn, compiled, inputs())
    assert counters["fdattn"]["op/attention"] == 1
    assert launches["attention_forward/cpu"] >= 1


@pytest.mark.slow
def test_autocast_trains_through_inductor():
    def fn(x, w):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return layer(x, w)

    args = inputs()
    expected = fn(*args)
    found = torch.compile(fn, backend=fdattn, fullgraph=True)(*args)
    assert found.dtype == expected.dtype == torch.bfloat16
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)
    for loss in (found, expected):
        loss.float().sin().sum().backward()
    assert counters["fdattn"]["kept"] == 1


def test_autocast_around_the_call():
    """Ambient autocast is in no graph; the metadata shows it."""
    q, k, v = qkv()

    def fn(q, k, v):
        return sdpa(q, k, v)

    with torch.autocast("cpu", dtype=torch.bfloat16):
        compiled = torch.compile(fn, backend=fdattn, options={"lower": "aot_eager"})
        found, expected = compiled(q, k, v), fn(q, k, v)
    assert found.dtype == expected.dtype == torch.bfloat16
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)


def test_inference_mode():
    compiled = torch.compile(attend, backend=fdattn, options={"lower": "aot_eager"})
    with torch.inference_mode():
        agree(attend, compiled, qkv(grad=False))
    assert launches["attention_forward/cpu"] == 1


def test_a_default_device_of_another_kind():
    """Masks are looked at on the CPU, wherever new tensors go by default."""

    def fn(q, k, v):
        return sdpa(q, k, v, torch.ones(8, 8, device="cpu").tril() > 0)

    with torch.device("meta"):
        assert torch.ones(1).is_meta
        compiled = torch.compile(
            fn, backend=fdattn, options={"lower": "aot_eager", "require_all": True}
        )
        with torch.device("cpu"):
            args = qkv()
        agree(fn, compiled, args)


def test_logs(caplog):
    with caplog.at_level(logging.DEBUG, logger="torch_fdattn"):
        torch.compile(layer, backend=fdattn, options={"lower": "eager"})(*inputs())
    assert "scaled_dot_product_attention -> fdattn.attention" in caplog.text
    assert "test_backend.py" in caplog.text
