"""The draws of Hopper's kernels come to these kernels, and have all that they are for: by the host's code alone, on CPU tensors.

The tests themselves, of `attention`, `varlen_attention` and `attention_fp8`, run on an sm_90. Here their calls are prepared up
to the launches, which nobody makes.
"""

from collections import Counter

import pytest

from tests.ops.attention import test_hopper_drawn as dense
from tests.ops.attention_fp8 import test_fp8_hopper_drawn as fp8
from tests.ops.varlen_attention import test_varlen_hopper_drawn as varlen
from torch_fdattn.launch import launches
from torch_fdattn.ops import library
from torch_fdattn.ops.attention import dispatch
from torch_fdattn.ops.attention.hopper import launch as forward
from torch_fdattn.ops.attention.hopper.backward import launch as backward
from torch_fdattn.ops.attention.hopper.backward import one_gradient_launch
from torch_fdattn.ops.attention_fp8 import op as attention_fp8_op
from torch_fdattn.testing import assert_launched, draw_hopper, draw_hopper_fp8, draw_hopper_varlen
from torch_fdattn.testing.hopper_cases import DESCRIBABLE, FP8_HEAD_DIMS, HEAD_DIMS, PAGES

in_order = dense.in_order
SMS = 132


@pytest.fixture
def launched(monkeypatch):
    """All launches that calls would make, of CPU tensors as if they lay on an sm_90."""
    made, rows = [], dispatch._rows
    monkeypatch.setattr(library, "use_triton", lambda tensor: True)
    monkeypatch.setattr(dispatch, "_rows", lambda way, _, *kind: rows(way, "sm_90", *kind))
    monkeypatch.setattr(attention_fp8_op, "device_capability", lambda device: (9, 0))
    for module in (forward, backward, one_gradient_launch):
        monkeypatch.setattr(module, "num_sms", lambda device: SMS)
    monkeypatch.setattr(launches, "run", made.extend)
    return made


@pytest.mark.usefixtures("in_order")
@pytest.mark.parametrize("seed", dense.SEEDS)
def test_attention(seed, launched):
    with assert_launched(*dense.PATHS):
        dense.run(draw_hopper(seed), "cpu")
    assert len(launched) >= 3


@pytest.mark.parametrize("seed", varlen.SEEDS)
def test_varlen_attention(seed, launched):
    case = draw_hopper_varlen(seed)
    with assert_launched(*varlen.paths(case)):
        varlen.run(case, "cpu")
    assert len(launched) >= (3 if varlen.is_trained(case) else 1)


@pytest.mark.parametrize("seed", fp8.SEEDS)
def test_attention_fp8(seed, launched):
    with assert_launched(*fp8.PATHS):
        fp8.run(draw_hopper_fp8(seed), "cpu")
    assert len(launched) == 2


def counts(cases, of=lambda case: ()):
    return Counter(name for case in cases for name in (*case.features(), *of(case)))


def expect(found, names, least):
    assert not {name: found[name] for name in names if found[name] < least}


SCORES = "softcap", "ALiBi", "sinks"
MASKS = "causal", "window", "kv_lens", "kv_lens with a zero", "kv_lens out of range"
GROUPS = "group 1", "group 2", "group 3", "group 5+"


def pairs(case):
    """What meets in one kernel."""
    scores = [x for x in SCORES if x in case.features()]
    yield from (f"{x}, causal {case.causal}" for x in scores)
    yield from (f"{x}, {case.dtype}" for x in scores)
    yield f"head dim {case.head_dim}"
    yield f"padded to {forward.padded(case.head_dim)}, {case.dtype}"
    yield f"ALiBi by {case.alibi}"
    yield f"softcap {case.softcap:g}"
    if getattr(case, "page", 0):
        yield f"pages of {case.page}"
        # Of whose entries the first may be anything.
        yield f"pages behind a window {any(case._oldest(b) >= case.page for b in range(case.batch))}"


def test_what_draws_of_attention_have():
    found = counts(map(draw_hopper, range(60)), pairs)
    kinds = [f"{x}, causal {y}" for x in SCORES for y in (True, False)]
    kinds += [f"{x}, {y}" for x in (*SCORES, *(f"padded to {d}" for d in forward.HEAD_DIMS)) for y in dispatch._HALF]  # fmt: skip
    expect(found, (*SCORES, *MASKS, *GROUPS, "group 4", "q_start", "kv_start", "own scale"), 4)
    expect(found, kinds, 3)
    expect(found, ("ALiBi by head", "ALiBi by sequence", "several query tiles", "several KV tiles"), 4)  # fmt: skip
    expect(found, [*(f"head dim {d}" for d in HEAD_DIMS), *(f"layout {x}" for x in DESCRIBABLE)], 4)
    expect(found, [f"softcap {x}" for x in (1, 5, 30, 50)], 2)


def test_what_draws_of_varlen_attention_have():
    cases = [draw_hopper_varlen(seed) for seed in range(40)]
    found = counts(cases, pairs)
    expect(found, (*SCORES, "causal", "window", "kv_lens", "positions", "ALiBi by sequence", "grouped heads"), 4)  # fmt: skip
    expect(found, ("an empty sequence", "a sequence without keys", "other lengths of keys", "tokens of no sequence"), 4)  # fmt: skip
    expect(found, [*(f"pages of {x}" for x in PAGES), "pages behind a window True", "pages behind a window False"], 3)  # fmt: skip
    expect(found, [f"head dim {d}" for d in HEAD_DIMS], 2)
    assert sum(map(varlen.is_trained, cases)) >= 10
    shared = [x for x in cases if x.heads // x.kv_heads % 2 == 0 and x.heads * len(x.q_lens) > SMS]
    expect(counts(shared), ("causal", "window"), 2)
    assert sum(case.page > 0 for case in shared) >= 3 <= sum(case.page == 0 for case in shared)
    trained = counts(filter(varlen.is_trained, cases))
    expect(trained, (*SCORES, "causal", "window", "kv_lens", "positions"), 2)


def test_what_draws_of_attention_fp8_have():
    found = counts(map(draw_hopper_fp8, range(24)), pairs)
    expect(found, (*SCORES, *MASKS, "own scale", "several query tiles", "several KV tiles"), 3)
    expect(found, [*GROUPS, *(f"head dim {d}" for d in FP8_HEAD_DIMS)], 2)


def test_a_kernel_that_is_named_must_run():
    """Hopper's; the other name is of either."""
    for asked, ran, passes in (
        ("triton", "hopper", True), ("hopper", "hopper", True), ("triton", "triton", True), ("hopper", "triton", False),
    ):  # fmt: skip
        try:
            with assert_launched(f"some/{asked}"):
                library.launches[f"some/{ran}"] += 1
        except AssertionError:
            assert not passes
        else:
            assert passes
