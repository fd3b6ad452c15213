"""Hopper's attention in Gluon: every configuration compiles for sm_90 without a GPU, its products on the tensor cores."""

import os
import re
from itertools import product

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("compiles kernels, which the interpreter replaces", allow_module_level=True)

from tests.compile_only.compiled import compile_launch, nvidia_usage
from tests.compile_only.launches import Launch, meta
from tests.compile_only.loops import spilled, step_loops
from tests.compile_only.targets import ARCHS
from tests.compile_only.uniform_registers import disassembled
from tests.compile_only.wgmma_registers import early_writes
from torch_fdattn.launch.device import num_sms
from torch_fdattn.ops.attention.hopper.fp8 import fp8_launches
from torch_fdattn.ops.attention.hopper.launch import (
    HEAD_DIMS,
    forward_launch,
    keys_of_a_block,
    padded,
    takes,
    takes_fp8,
)
from torch_fdattn.ops.options import AttentionOptions
from torch_fdattn.ops.packed import Packed
from torch_fdattn.ops.positions import Mask
from torch_fdattn.ops.scores import NO_SCORES, Scores

INT = dict(dtype=torch.int32)
#: Masks, with as many queries and keys.
MASKS = {
    "full": (Mask(), 4096, 4096),
    "causal": (Mask(window_right=0), 4096, 4096),
    "causal, ragged": (Mask(window_right=0), 1000, 1300),
    "narrow window": (Mask(window_left=512, window_right=0), 4096, 4096),
    "window": (Mask(window_left=1500, window_right=0), 4096, 4096),
    "window of earlier keys": (Mask(window_left=512), 4096, 4096),
    "lengths": (Mask(meta(2, **INT), window_right=0), 4096, 4096),
    "positions": (Mask(*(meta(2, **INT) for _ in range(3)), window_right=0), 256, 4096),
}
PACKED_MASKS = {
    "full": Mask(),
    "causal": Mask(window_right=0),
    "window": Mask(window_left=512, window_right=0),
    "lengths": Mask(meta(4, **INT), meta(4, **INT), window_right=0),
}
#: What changes scores: without a softcap ALiBi's bias of a causal mask comes first.
CHANGES = ("none", "ALiBi and sinks", "softcap, ALiBi and sinks")
#: What `make test` compiles: each takes some seconds.
QUICK = (64, "causal"), (128, "causal"), (256, "lengths")
#: Bytes a thread that may spill, outside of the loops: numbers of tiles. Of plain calls, and of those with features.
PLAIN_SPILLS = {64: 0, 128: 0, 192: 0, 256: 16}
SPILLS = {64: 0, 128: 32, 192: 16, 256: 48}
#: With pages of so many keys.
PAGE_SPILLS = {16: 80, 32: 24}


def changed(changes: str, sequences: int = 2, sinks: torch.dtype = torch.bfloat16) -> Scores:
    if changes == "none":
        return NO_SCORES
    softcap = 30.0 if "softcap" in changes else 0.0
    return Scores(softcap, meta(sequences, 8), meta(8, dtype=sinks))


def dtype_name(x) -> str | None:
    """In the names of tests, where pytest numbers dtypes."""
    return str(x).removeprefix("torch.") if isinstance(x, torch.dtype) else None


def slow_but(quick: tuple, *cases: tuple) -> list:
    return [pytest.param(*case, marks=() if case == quick else pytest.mark.slow) for case in cases]


def launch_of(
    head_dim: int, mask: str, dtype: torch.dtype = torch.bfloat16, scores: Scores = NO_SCORES
) -> Launch:
    positions, queries, keys = MASKS[mask]
    q, k, v = (
        meta(2, h, n, head_dim, dtype=dtype) for h, n in ((8, queries), (2, keys), (2, keys))
    )
    options = AttentionOptions(positions, head_dim**-0.5, scores)
    assert takes(q, k, v, options)
    made = forward_launch(q, k, v, options, q, meta(2, 8, queries), meta(1, **INT))
    return Launch(made.kernel, made.arguments, made.options)


@pytest.mark.parametrize(
    ("head_dim", "mask"),
    [
        pytest.param(head_dim, mask, marks=() if (head_dim, mask) in QUICK else pytest.mark.slow)
        for head_dim in HEAD_DIMS
        for mask in MASKS
    ],
)
def test_compiles(head_dim, mask):
    checked(launch_of(head_dim, mask), head_dim, PLAIN_SPILLS[head_dim])


def checked(
    launch: Launch, head_dim: int, most: int | None = None, instruction: str = "HGMMA"
) -> str:
    """The machine code of a launch: on the tensor cores, with at most so many bytes that spill, and none in a step.

    most: None: as many as `SPILLS` has.

    A step's loop, one of each warp group, is looked at from its first instruction to its branch backward.
    """
    compiled = compile_launch(launch, ARCHS["sm_90"])
    assert compiled.metadata.shared <= ARCHS["sm_90"].shared_size
    assert nvidia_usage(compiled)[1] <= (SPILLS[head_dim] if most is None else most)
    sass = disassembled(compiled.asm["cubin"])
    assert not early_writes(sass)
    # The products of a block of keys, 64 rows by 32 bytes of the summed dim each; its values are in parts at 192.
    summed, parts = {"HGMMA": 16, "QGMMA": 32}[instruction], 3 if head_dim == 192 else 1
    steps, keys = step_loops(sass), keys_of_a_block(head_dim)
    assert [x.count(instruction) for x in steps] == [(head_dim + parts * keys) // summed] * 2
    assert all(x.count("MUFU.EX2") >= keys // 2 for x in steps)  # 64 rows by keys, in 128 threads
    assert not any(spilled(x) for x in steps)
    return sass


@pytest.mark.slow
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("mask", ["causal", "lengths", "window"])
@pytest.mark.parametrize("changes", CHANGES[1:])
def test_compiles_with_changed_scores(changes, mask, head_dim):
    checked(launch_of(head_dim, mask, scores=changed(changes)), head_dim)


def test_a_bias_of_earlier_keys_is_one_instruction_a_score():
    """A multiplication and an addition, where two sides of a row want a distance first."""
    slopes = Scores(0.0, meta(2, 8))
    steps = {}
    for name, scores in (("plain", NO_SCORES), ("ALiBi", slopes)):
        sass = checked(launch_of(128, "causal", scores=scores), 128)
        steps[name] = max(step_loops(sass), key=len)
    more = {x: steps["ALiBi"].count(x) - steps["plain"].count(x) for x in ("FFMA", "FADD", "FMUL")}
    assert more["FFMA"] == 64  # scores of a thread: 64 rows by 128 keys in 128 threads
    assert more["FADD"] + more["FMUL"] <= 4


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    ("heads", "even"), [(2, False), (4, True), (6, False), (8, True), (12, True)]
)
@pytest.mark.parametrize(("batch", "queries"), [(1, 1), (1, 64), (100, 1), (100, 64), (100, 65), (100, 128), (33, 64), (1, 20_000)])  # fmt: skip
def test_heads_share_a_tile(batch, queries, heads, even, packed):
    """Of two KV heads, where tiles are more than SMs and a head's queries fill at most half of one: packed, the device sees to that."""
    shape = (1, heads, batch * queries) if packed else (batch, heads, queries)
    q = meta(*shape, 128, dtype=torch.bfloat16)
    k = meta(shape[0], 2, 128, 128, dtype=torch.bfloat16)
    ends = Packed(meta(batch + 1, **INT), meta(batch + 1, **INT)) if packed else None
    made = forward_launch(q, k, k, AttentionOptions(), q, meta(*shape), meta(1, **INT), ends)
    given = dict(zip(made.kernel.arg_names, made.arguments, strict=False))
    tiles = -(-queries // 128) * batch * heads
    assert given["pairs"] == (even and tiles > num_sms(q.device) and (packed or queries <= 64))
    if not packed:
        assert made.grid[0] == min(tiles // (1 + given["pairs"]), num_sms(q.device))


@pytest.mark.parametrize(
    ("changes", "mask", "head_dim"),
    slow_but(("none", "window", 128), *product(CHANGES, PACKED_MASKS, HEAD_DIMS)),
)
def test_compiles_for_packed_sequences(changes, mask, head_dim):
    q, k = (meta(1, h, 5000, head_dim, dtype=torch.bfloat16) for h in (8, 2))
    options = AttentionOptions(PACKED_MASKS[mask], 1.0, changed(changes, 4, torch.float32))
    packed = Packed(meta(5, **INT), meta(5, **INT))
    made = forward_launch(q, k, k, options, q, meta(8, 5000), meta(1, **INT), packed)
    most = 72 if (mask, head_dim) == ("full", 256) else None
    checked(Launch(made.kernel, made.arguments, made.options), head_dim, most)


@pytest.mark.parametrize(
    ("mask", "changes", "page", "head_dim"),
    slow_but(
        ("window", "none", 16, 128),
        *(
            (*kind, page, dim)
            for page in (16, 32, 64, 128, 256, 4096)
            for dim in HEAD_DIMS
            for kind in (("causal", "none"), *(product(("window",), CHANGES) if page == 16 else ()))
        ),
    ),
)
def test_compiles_for_pages(mask, changes, page, head_dim):
    """The loading warp has 24 registers a thread."""
    q, k = meta(1, 8, 5000, head_dim, dtype=torch.bfloat16), meta(300, 2, page, head_dim, dtype=torch.bfloat16)  # fmt: skip
    mask = PACKED_MASKS[mask]._replace(kv_lens=meta(4, **INT))
    options = AttentionOptions(mask, 1.0, changed(changes, 4))
    packed = Packed(meta(5, **INT), None, meta(4, 100, **INT))
    made = forward_launch(q, k, k, options, q, meta(8, 5000), meta(1, **INT), packed)
    checked(Launch(made.kernel, made.arguments, made.options), head_dim, PAGE_SPILLS.get(page, 16))


def test_rows_that_results_cannot_have():
    """Of 36 columns 40 apart: results, which have no gaps, would lie as no descriptor can."""
    q = meta(2, 8, 300, 40, dtype=torch.bfloat16)
    options = AttentionOptions(Mask(), 1.0)
    assert takes(q, q, q, options)
    q = q[..., :36]
    assert not takes(q, q, q, options)


@pytest.mark.slow
@pytest.mark.parametrize("head_dim", [40, 96, 160])
def test_compiles_with_padded_heads(head_dim):
    checked(launch_of(head_dim, "causal"), padded(head_dim), PLAIN_SPILLS[padded(head_dim)])


@pytest.mark.parametrize(
    ("dtype", "changes", "mask", "head_dim"),
    slow_but(
        (torch.bfloat16, "none", "full", 128),
        *product((torch.bfloat16,), ("none",), ("full", "causal", "window", "lengths"), HEAD_DIMS),
        *product((torch.float16,), CHANGES, ("causal", "lengths"), HEAD_DIMS),
    ),
    ids=dtype_name,
)
def test_compiles_for_fp8(dtype, changes, mask, head_dim):
    """Its weights are packed by one instruction for two and one for four, and not unpacked between steps."""
    positions, queries, keys = MASKS[mask]
    q, k = (meta(2, h, n, head_dim, dtype=torch.float8_e4m3fn) for h, n in ((8, queries), (2, keys)))  # fmt: skip
    scales = meta(2, 8), meta(2, 2), meta(2, 2)
    out = meta(2, 8, queries, head_dim, dtype=dtype)
    options = AttentionOptions(positions, head_dim**-0.5, changed(changes), dtype=dtype)
    assert takes_fp8(q, k, k, options)
    given = q, k, k, *scales, options, out, meta(2, 8, queries), meta(1, **INT)
    transposing, attention = (
        Launch(x.kernel, x.arguments, x.options) for x in fp8_launches(*given)
    )
    compile_launch(transposing, ARCHS["sm_90"])
    sass = checked(attention, head_dim, 8, "QGMMA")
    step = max(
        re.findall(r"gsb0, 0x[13] ;(.*?)gsb0, 0x0 ;", sass, re.DOTALL), key=lambda x: x.count("EX2")
    )
    assert step.count("PRMT") <= keys_of_a_block(head_dim) // 4


def test_writes_to_registers_of_a_product_are_found():
    product = "/*0010*/ HGMMA.64x128x16.F32.BF16 R24, R100, gdesc[UR4], R24, gsb0 ;"
    wait = "/*0030*/ WARPGROUP.DEPBAR.LE gsb0, 0x0 ;"
    for written, is_early in (
        ("R103", True),
        ("R104", False),
        ("R99.64", True),
        ("R99", False),
        ("R87", True),
        ("R88", False),
    ):
        register, _, wide = written.partition(".")
        move = f"/*0020*/ LDS{'.64' if wide else ''} {register}, [R1] ;"
        assert bool(early_writes("\n".join((product, move, wait)))) == is_early
        assert not early_writes("\n".join((product, wait, move)))


@pytest.mark.parametrize(
    ("changes", "mask", "head_dim"),
    slow_but(
        (CHANGES[2], "causal", 256),
        *product(CHANGES, ("causal", "positions"), HEAD_DIMS),
    ),
)
def test_compiles_with_results_in_float32(changes, mask, head_dim):
    """What ring attention asks for."""
    positions, queries, keys = MASKS[mask]
    q, k = (meta(2, h, n, head_dim, dtype=torch.bfloat16) for h, n in ((8, queries), (2, keys)))
    options = AttentionOptions(positions, 1.0, changed(changes), dtype=torch.float32)
    assert takes(q, k, k, options)
    out = meta(2, 8, queries, head_dim)
    made = forward_launch(q, k, k, options, out, meta(2, 8, queries), meta(1, **INT))
    checked(Launch(made.kernel, made.arguments, made.options), head_dim)


@pytest.mark.slow
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("mask", ["causal", "lengths"])
def test_compiles_in_float16(mask, head_dim):
    checked(launch_of(head_dim, mask, torch.float16), head_dim, PLAIN_SPILLS[head_dim])


@pytest.mark.parametrize(
    "wrong",
    [
        dict(q=torch.float32), dict(head_dim=32), dict(mask=Mask(kv_block=4, kv_stride=8)), dict(stride=12),
        dict(expanded=True), dict(scale=0.0), dict(scale=-1.0), dict(out=torch.float64),
    ],
    ids=lambda x: next(iter(x)),
)  # fmt: skip
def test_what_it_leaves_to_the_portable_kernel(wrong):
    head_dim, dtype = wrong.get("head_dim", 128), wrong.get("q", torch.bfloat16)
    q = meta(2, 8, 128, head_dim, dtype=dtype)
    k = meta(2, 8, 128, head_dim + wrong.get("stride", 0), dtype=dtype)[..., :head_dim]
    if wrong.get("expanded"):
        k = k[:, :1].expand(-1, 8, -1, -1)
    options = AttentionOptions(
        wrong.get("mask", Mask()), wrong.get("scale", 1.0), dtype=wrong.get("out")
    )
    assert not takes(q, k, k, options)
