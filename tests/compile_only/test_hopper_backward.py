"""Hopper's backward in Gluon: every configuration compiles for sm_90 without a GPU, its products on the tensor cores."""

import os
import re

import pytest
import torch
import triton

if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("compiles kernels, which the interpreter replaces", allow_module_level=True)

from tests.compile_only.compiled import compile_launch, nvidia_usage
from tests.compile_only.launches import Launch, meta
from tests.compile_only.loops import innermost_loops, spilled, step_loops
from tests.compile_only.targets import ARCHS
from tests.compile_only.test_hopper import INT, MASKS, dtype_name
from tests.compile_only.uniform_registers import disassembled
from tests.compile_only.wgmma_registers import early_writes
from torch_fdattn.ops.attention.backward import empty_rows
from torch_fdattn.ops.attention.hopper.backward.launch import (
    HEAD_DIMS,
    hopper_backward_launches,
    subs_of,
    takes,
    zero_sums,
)
from torch_fdattn.ops.options import AttentionOptions
from torch_fdattn.ops.packed import Packed, by_heads
from torch_fdattn.ops.positions import Mask
from torch_fdattn.ops.scores import NO_SCORES, Scores

QUICK = (128, "causal")
#: Bytes a thread that may spill, and how many numbers of these a step reads or writes.
SPILLS = {64: (72, 7), 128: (32, 0)}
OLD = triton.__version__.startswith("3.6")


def compiled_launches(
    head_dim: int, mask: str, scores: Scores = NO_SCORES, ordered: bool = False,
    dtype: torch.dtype = torch.bfloat16, score_grads: Scores = NO_SCORES, grad_dtype: torch.dtype | None = None,
) -> list:  # fmt: skip
    """grad_dtype: of dQ, dK and dV; None: the inputs'."""
    positions, queries, keys = MASKS[mask]
    q, k, v = (
        meta(2, h, n, head_dim, dtype=dtype) for h, n in ((8, queries), (2, keys), (2, keys))
    )  # fmt: skip
    options = AttentionOptions(positions, head_dim**-0.5, scores, dtype=grad_dtype)
    assert takes(q, k, v, options)
    rows = (meta(2, 8, -(-queries // 128) * 128),) * 2
    state, scratch = (
        (q, None, q, k, v, q, meta(2, 8, queries)),
        (rows, None if ordered else zero_sums(q, rows[0].shape[2])),
    )
    grads = (torch.empty_like(x, dtype=grad_dtype) for x in (q, k, v))
    made = hopper_backward_launches(
        *state, options, *grads, *scratch, meta(1, **INT), score_grads=score_grads
    )
    return [compile_launch(Launch(x.kernel, x.arguments, x.options), ARCHS["sm_90"]) for x in made]


@pytest.mark.parametrize(
    ("head_dim", "mask"),
    [
        pytest.param(head_dim, mask, marks=() if (head_dim, mask) == QUICK else pytest.mark.slow)
        for head_dim in HEAD_DIMS
        for mask in MASKS
    ],
)
def test_compiles(head_dim, mask):
    terms, sweep, sums = compiled_launches(head_dim, mask)
    assert nvidia_usage(terms)[1] == nvidia_usage(sums)[1] == 0
    check_sweep(sweep, head_dim, *SPILLS[head_dim], MASKS[mask][0])
    assert disassembled(sweep.asm["cubin"]).count("UTMAREDG") == 2


@pytest.mark.parametrize(
    ("head_dim", "mask"),
    [
        pytest.param(head_dim, mask, marks=() if (head_dim, mask) == QUICK else pytest.mark.slow)
        for head_dim in HEAD_DIMS
        for mask in MASKS
    ],
)
def test_compiles_in_order(head_dim, mask):
    """Nothing adds to memory that others add to."""
    terms, sweep, gradient = compiled_launches(head_dim, mask, ordered=True)
    assert nvidia_usage(terms)[1] == 0
    check_sweep_without_dq(sweep, head_dim, *SPILLS[head_dim], mask=MASKS[mask][0])
    check_gradient(gradient, 0, 0, head_dim)
    assert not any("UTMAREDG" in disassembled(x.asm["cubin"]) for x in (sweep, gradient))


@pytest.mark.slow
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("mask", ["full", "causal"])
def test_compiles_in_float16(mask, head_dim):
    *_, sweep, _ = compiled_launches(head_dim, mask, dtype=torch.float16)
    check_sweep(sweep, head_dim, *SPILLS[head_dim])


@pytest.mark.slow
def test_compiles_with_padded_heads():
    *_, sweep, _ = compiled_launches(96, "causal")
    check_sweep(sweep, 128, *SPILLS[128])


@pytest.mark.slow
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("mask", ["causal", "lengths"])
@pytest.mark.parametrize("feature", ["softcap", "ALiBi"])
def test_compiles_with_changed_scores(feature, mask, head_dim):
    scores = Scores(30.0) if feature == "softcap" else Scores(0.0, meta(2, 8))
    _, sweep, _ = compiled_launches(head_dim, mask, scores)
    # triton 3.6's most at head dim 128, where 3.7 has 40 bytes and 2 reloads.
    check_sweep(sweep, head_dim, *{64: (128, 33), 128: (88, 11) if OLD else (40, 2)}[head_dim])
    _, sweep, gradient = compiled_launches(head_dim, mask, scores, ordered=True)
    # A softcap's, under 3.7; with slopes products at head dim 64 wait for those before.
    waits = "00000" if feature == "ALiBi" and head_dim == 64 else None
    check_sweep_without_dq(sweep, head_dim, *{64: (112, 49), 128: (80, 22)}[head_dim], waits)
    check_gradient(gradient, 32, 2, head_dim)


@pytest.mark.slow
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("mask", ["causal", "lengths"])
def test_compiles_with_a_softcap_and_slopes(mask, head_dim):
    scores = Scores(30.0, meta(2, 8))
    _, sweep, _ = compiled_launches(head_dim, mask, scores)
    most = {64: (288, 148), 128: (136, 27)} if OLD else {64: (264, 132), 128: (96, 17)}
    check_sweep(sweep, head_dim, *most[head_dim])
    _, sweep, gradient = compiled_launches(head_dim, mask, scores, ordered=True)
    waits = "00000" if head_dim == 64 else None
    check_sweep_without_dq(sweep, head_dim, *{64: (264, 146), 128: (112, 34)}[head_dim], waits)
    check_gradient(gradient, *{64: (32, 4), 128: (0, 0)}[head_dim], head_dim)


@pytest.mark.parametrize(
    ("head_dim", "mask"),
    [
        pytest.param(head_dim, mask, marks=() if (head_dim, mask) == QUICK else pytest.mark.slow)
        for head_dim in HEAD_DIMS
        for mask in ("full", "causal", "window", "lengths")
    ],
)
def test_compiles_with_the_gradient_of_slopes(head_dim, mask):
    slopes = Scores(alibi_slopes=meta(2, 8))
    _, sweep, _ = compiled_launches(head_dim, mask, slopes, score_grads=slopes)
    check_sweep(sweep, head_dim, *{64: (200, 52), 128: (56, 3)}[head_dim])
    _, sweep, _ = compiled_launches(head_dim, mask, slopes, ordered=True, score_grads=slopes)
    waits = "00000" if head_dim == 64 else None
    check_sweep_without_dq(sweep, head_dim, *{64: (168, 23), 128: (56, 1)}[head_dim], waits)


@pytest.mark.parametrize(
    ("mask", "dtype"),
    [
        pytest.param(*case, marks=() if case == ("causal", torch.bfloat16) else pytest.mark.slow)
        for case in (
            *((mask, torch.bfloat16) for mask in MASKS),
            *((mask, torch.float16) for mask in ("causal", "window", "lengths")),
        )
    ],
    ids=dtype_name,
)
def test_compiles_wide_heads(mask, dtype):
    terms, *gradients = compiled_launches(256, mask, dtype=dtype)
    assert nvidia_usage(terms)[1] == 0
    # Zeros beyond lengths are written in a branch, which spills.
    has_lengths = mask in ("lengths", "positions")
    limits = (8, 0), (56, 2), (184, 41) if has_lengths else (32, 2)
    for made, most in zip(gradients, limits, strict=True):
        check_gradient(made, *most)


@pytest.mark.slow
@pytest.mark.parametrize("mask", ["full", "causal", "window", "lengths"])
def test_compiles_wide_heads_with_the_gradient_of_slopes(mask):
    """Which dQ's launch makes: 16 to 48 bytes more than without, 0 to 4 reloads."""
    slopes = Scores(alibi_slopes=meta(2, 8))
    *_, of_queries = compiled_launches(256, mask, slopes, score_grads=slopes)
    most = {"full": (48, 2), "causal": (64, 4), "window": (104, 9), "lengths": (240, 49)}[mask]
    check_gradient(of_queries, *most)


@pytest.mark.slow
@pytest.mark.parametrize("mask", ["causal", "lengths"])
@pytest.mark.parametrize("feature", ["softcap", "ALiBi", "both"])
def test_compiles_wide_heads_with_changed_scores(feature, mask):
    slopes = None if feature == "softcap" else meta(2, 8)
    scores = Scores(0.0 if feature == "ALiBi" else 30.0, slopes)
    limits = ((8, 0), (224, 52), (240, 89)) if feature == "both" else ((216, 46),) * 3
    for made, most in zip(compiled_launches(256, mask, scores)[1:], limits, strict=True):
        check_gradient(made, *most)


def check_gradient(made, most: int, reloads: int, head_dim: int = 256) -> None:
    """As `check_sweep`; of each warp group the first scores, dP but for dV, the gradient, and the next scores."""
    assert nvidia_usage(made)[1] <= most
    assert made.metadata.shared <= ARCHS["sm_90"].shared_size
    sass = disassembled(made.asm["cubin"])
    assert not early_writes(sass)
    # Of 64 columns, or at head dim 64 of 128: products of rows and columns sum over the head dim, the gradient's over columns.
    scores, added = head_dim // 16, 8 if head_dim == 64 else 4
    products = sass.count("HGMMA")
    assert products in (2 * (2 * scores + added), 2 * (3 * scores + added))
    is_dv = products == 2 * (2 * scores + added)
    assert sass.count("WARPGROUP.DEPBAR") == (6 if is_dv else 8)
    check_steps(sass, products // 2 - scores, "10" if is_dv else "010", reloads)


def packed_launches(
    head_dim: int, mask: Mask, scores: Scores = NO_SCORES, ordered: bool = False,
    dtype: torch.dtype = torch.bfloat16, grad_dtype: torch.dtype | None = None,
):  # fmt: skip
    """The sweep, and what makes dQ of its sums, or dQ."""
    q, k = (by_heads(meta(5000, h, head_dim, dtype=dtype)) for h in (8, 2))
    packed = Packed(meta(5, **INT), meta(5, **INT))
    options = AttentionOptions(mask, 1.0, scores, dtype=grad_dtype)
    assert takes(q, k, k, options, packed)
    rows = empty_rows(q, packed)
    padded_len = rows[0].shape[2]
    scratch = rows, None if ordered else zero_sums(q, padded_len), meta(1, **INT)
    state = q, None, q, k, k, q, meta(8, 5000)
    grads = [by_heads(meta(5000, h, head_dim, dtype=grad_dtype or dtype)) for h in (8, 2, 2)]
    terms, sweep, last = (
        compile_launch(Launch(x.kernel, x.arguments, {**x.options, **x.also}), ARCHS["sm_90"])
        for x in hopper_backward_launches(*state, options, *grads, *scratch, packed)
    )
    assert nvidia_usage(terms)[1] == 0
    assert ordered or nvidia_usage(last)[1] == 0
    return sweep, last


@pytest.mark.parametrize(
    ("head_dim", "mask", "dtype"),
    [
        pytest.param(
            head_dim, mask, dtype,
            marks=() if (head_dim, mask.window_right, dtype) == (128, 0, torch.bfloat16) else pytest.mark.slow,
        )
        for head_dim in HEAD_DIMS
        for mask in (Mask(), Mask(window_right=0), Mask(window_left=1500, window_right=100))
        for dtype in ((torch.bfloat16, torch.float16) if mask.window_right >= 0 else (torch.bfloat16,))
    ],
    ids=dtype_name,
)  # fmt: skip
def test_compiles_for_packed_sequences(dtype, mask, head_dim):
    """What spills are numbers of tiles, and at head dim 64 addresses of rows that become zeros."""
    sweep, _ = packed_launches(head_dim, mask, dtype=dtype)
    check_sweep(sweep, head_dim, *{64: (320, 39), 128: (96, 0)}[head_dim])
    sweep, gradient = packed_launches(head_dim, mask, ordered=True, dtype=dtype)
    check_sweep_without_dq(sweep, head_dim, *{64: (184, 15), 128: (96, 0)}[head_dim])
    check_gradient(gradient, 0, 0, head_dim)


@pytest.mark.slow
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_compiles_for_packed_sequences_with_everything(head_dim):
    mask = Mask(*(meta(4, **INT) for _ in range(3)), window_left=1500, window_right=0)
    given = head_dim, mask, Scores(30.0, meta(4, 8))
    sweep, _ = packed_launches(*given)
    check_sweep(sweep, head_dim, *{64: (432, 235), 128: (224, 51)}[head_dim])
    sweep, gradient = packed_launches(*given, ordered=True)
    waits = "00000" if head_dim == 64 else None
    check_sweep_without_dq(sweep, head_dim, *{64: (360, 227), 128: (208, 82)}[head_dim], waits)
    check_gradient(gradient, *{64: (184, 96), 128: (0, 0)}[head_dim], head_dim)


def check_sweep(sweep, head_dim: int, most: int, reloads: int, mask: Mask = Mask()) -> None:  # noqa: B008
    """Bytes that spill at most, how many numbers of these a step reads or writes, and no product that waits for the one before."""
    assert nvidia_usage(sweep)[1] <= most
    assert sweep.metadata.shared <= ARCHS["sm_90"].shared_size
    sass = disassembled(sweep.asm["cubin"])
    assert not early_writes(sass)
    products = sass.count("HGMMA")
    assert products >= 2 * 5 * head_dim // 16
    assert sass.count("WARPGROUP.DEPBAR") < products / 4
    # Scores, dP, dV and dK of a warp group's keys; and its half of dQ's columns, of all keys. A step waits for dP, at head dim
    # 64 for the second keys' scores and dP too, for dV and dK beside dQ's products, for dQ, and for the next scores.
    subs = subs_of(head_dim, mask)
    products = subs * (2 * head_dim // 16 + 2 * 4) + 2 * subs * 4
    check_steps(sass, products, "0210" if subs == 1 else "000410", reloads)


def check_sweep_without_dq(
    sweep, head_dim: int, most: int, reloads: int, waits: str | None = None, mask: Mask = Mask(),  # noqa: B008
) -> None:  # fmt: skip
    """As `check_sweep`. A step waits for dP, for dV and dK beside the next scores, and for these."""
    assert nvidia_usage(sweep)[1] <= most
    assert sweep.metadata.shared <= ARCHS["sm_90"].shared_size
    sass = disassembled(sweep.asm["cubin"])
    assert not early_writes(sass)
    subs = subs_of(head_dim, mask)
    expected = waits or ("010" if subs == 1 else "00010")
    check_steps(sass, subs * (2 * head_dim // 16 + 2 * 4), expected, reloads)


def test_loops_are_found():
    """The innermost ones that multiply, and what they spill."""
    multiplies = "/*0010*/ HGMMA.64x64x16.F32.BF16 R24, gdesc[UR4], R24, gsb0 ;"
    waits = [".L_x_2:", "SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR4], R2 ;", "@!P0 BRA `(.L_x_2) ;"]
    inner = [".L_x_3:", multiplies, "LDL R2, [R1] ;", "@P0 BRA `(.L_x_3) ;"]
    lines = [".L_x_1:", multiplies, *waits, *inner, "STL [R1], R2 ;", "@P0 BRA `(.L_x_1) ;", "BRA `(.L_x_4) ;", ".L_x_4:"]  # fmt: skip
    assert innermost_loops("\n".join(lines)) == ["\n".join(waits), "\n".join(inner)]
    assert step_loops("\n".join(lines)) == ["\n".join(inner)]
    assert [spilled("\n".join(x)) for x in (waits, inner, lines)] == [0, 1, 2]


def check_steps(sass: str, products: int, waits: str, reloads: int) -> None:
    """That both warp groups' loops have so many products, wait until so many groups of these are left, and read or write at
    most so many spilled numbers a step."""
    steps = step_loops(sass)
    assert [x.count("HGMMA") for x in steps] == [products] * 2
    for step in steps:
        assert "".join(re.findall(r"WARPGROUP\.DEPBAR\.LE gsb0, 0x(\d) ;", step)) == waits
        assert spilled(step) <= reloads
