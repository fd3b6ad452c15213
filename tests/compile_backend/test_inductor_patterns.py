"""The attentions that Inductor's own fusion knows, `_sfdp_pattern_1` and on, as the installed torch has them.

Each is matched, or left for the reason that is listed here, and computes what it did. The cases of torch's suite
where the fusion has to keep its hands off are `FOREIGN`; there ours may know better.
"""

import inspect
import re

import pytest
import torch
from torch._dynamo.utils import counters
from torch._inductor.fx_passes import fuse_attention

from tests.compile_backend.harness import check, ops, qkv

PATTERNS = dict(fuse_attention._get_sfdp_patterns(torch.device("cpu")))
#: By number, of those that are left. (Training drops out, where a pattern has dropout at all.)
LEFT = {
    28: "head-dim",  # 8, here
}
#: float32 tensors whose weights are rounded to float16 before the last product.
ROUNDED = (7, 8, 9, 10)


def drawn(x):
    """Random numbers in place of an example's, of a size that takes no time; scales are numbers, as models have them."""
    if x.dim() == 0:
        return float(x)
    shape = [min(n, 16) for n in x.shape]
    if x.dtype == torch.bool:
        return torch.rand(shape) < 0.7
    if not x.requires_grad:
        return (
            torch.randn(shape).round().to(x.dtype)
        )  # a mask: to be added, or hiding where it is 0
    drawn = torch.randn(shape).to(x.dtype)
    if not x.is_contiguous():
        drawn = drawn.mT.contiguous().mT
    return drawn.requires_grad_()


def reason(number, name):
    if name.endswith("_training") and "dropout_p" in PATTERNS[name]["scalar_workaround"]:
        return "dropout"
    return "dtype" if number in ROUNDED and "_half" not in name else LEFT.get(number)


def quick(name):
    return name.endswith("_inference") and "_half" not in name and "_bs1" not in name


@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=[] if quick(x) else [pytest.mark.slow]) for x in PATTERNS]
)
def test_patterns(name):
    pattern, number = PATTERNS[name], int(re.match(r"_sfdp_pattern_(\d+)", name)[1])
    function = getattr(fuse_attention, f"_sfdp_pattern_{number}")
    args, numbers = [drawn(x) for x in pattern["example_inputs"]], pattern["scalar_workaround"]
    if number in ROUNDED:
        args[2] = args[2].detach().half().requires_grad_()
    if name.endswith("_inference"):
        args = [x.detach() if isinstance(x, torch.Tensor) else x for x in args]
        if "dropout_p" in inspect.signature(function).parameters:
            numbers = {**numbers, "dropout_p": 0.0}
    # Dynamo does not look into Inductor's files by itself.
    function = torch._dynamo.dont_skip_tracing(function)
    close = {"rtol": 2e-2, "atol": 2e-2} if args[0].dtype == torch.half else {}
    found = check(lambda *args: function(*args, **numbers), *args, lower="eager", **close)
    expected = reason(number, name)
    assert len(found.report) == 1, str(found.report)
    assert found.report.reasons == [expected] * bool(expected), str(found.report)


def test_pattern_28_at_a_head_dim_of_16():
    """Visformer's: pattern 4 of q, k and v that lie with the head dim before the sequence."""
    function = torch._dynamo.dont_skip_tracing(fuse_attention._sfdp_pattern_4)
    q, k, v = (x.detach().mT.contiguous().mT.requires_grad_() for x in qkv())
    assert ops(check(lambda q, k, v: function(q, k, v, 0.25, 0.0), q, k, v)) == ["attention"]


def attend(q, k, v, mask=0.0, scale=0.25):
    weights = torch.softmax(q @ k.transpose(-2, -1) * scale + mask, dim=-1)
    return weights @ v


FOREIGN = {
    "weights that are returned": (
        "scores-used",
        lambda q, k, v, x: ((w := (q @ k.mT).softmax(-1)) @ v, w),
    ),
    "a scale from data": (None, lambda q, k, v, x: (q @ k.mT * x).softmax(-1) @ v),
    "a scale for each key": ("scores-unknown", lambda q, k, v, x: attend(q, k, v, scale=v[..., 0].unsqueeze(2))),
    "a mask of integers": ("mask", lambda q, k, v, x: attend(q, k, v, x.int())),
    "a number for a mask": ("scores-unknown", lambda q, k, v, x: attend(q, k, v, 2.0)),
    "a mask of one number": (None, lambda q, k, v, x: attend(q, k, v, x)),
}  # fmt: skip


@pytest.mark.parametrize("name", FOREIGN)
def test_where_the_fusion_must_not(name):
    expected, fn = FOREIGN[name]
    found = check(fn, *qkv(), torch.tensor(1.5), lower="eager")
    assert found.report.reasons == [expected] * bool(expected), str(found.report)
    assert len(ops(found)) == 1


def test_what_is_left_is_inductors_to_fuse():
    """A head dim of 8, which our kernels do not have, and torch's has."""
    q, k, v = qkv(dim=8, grad=False)

    def fn(q, k, v):
        return (q @ k.transpose(-2, -1) / 8**0.5).softmax(-1) @ v

    torch._dynamo.reset()
    counters.clear()
    with torch._inductor.config.patch(force_disable_caches=True), torch.no_grad():
        found = torch.compile(fn, backend="fdattn")(q, k, v)
    torch.testing.assert_close(found, fn(q, k, v))
    assert counters["fdattn"]["left/head-dim"] == 1
    assert counters["inductor"]["fuse_attention"] == 1
