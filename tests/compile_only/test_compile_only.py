"""Every kernel in every configuration compiles for every GPU generation, within its limits, without a GPU.

The cases follow the config tables: for each distinct configuration the largest head dim that uses it, and
the largest multiple of 16 that is padded to it. Spills are allowed only where SPILLS says so.
"""

import itertools
import os

import pytest
import torch
import triton

if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("compiles kernels, which the interpreter replaces", allow_module_level=True)

from tests.compile_only.compiled import resources
from tests.compile_only.launches import DTYPES, Case
from tests.compile_only.targets import ARCHS
from torch_fdattn.ops.attention.configs import TileConfig, backward_config, forward_config
from torch_fdattn.ops.decode.configs import decode_config

HEAD_DIMS = range(16, 257, 8)
CONFIGS = {"forward": forward_config, "backward": backward_config}

#: Bytes a thread that a kernel may spill under triton (3.6, later ones), by (kernel, arch, fp32 or half); 0
#: where nothing is said. On sm_90 the spilling configurations are the fastest measured (under 3.6); on the
#: other generations nothing has been measured yet.
SPILLS = {
    ("attention_forward", "sm_80", "half"): (48, 48),
    ("attention_forward", "sm_80", "fp32"): (32, 32),
    ("attention_forward", "sm_90", "half"): (136, 144),
    ("attention_forward", "sm_90", "fp32"): (8, 8),
    ("attention_forward", "sm_100", "half"): (48, 0),
    ("attention_forward", "gfx942", "half"): (24, 0),
    ("decode", "sm_80", "half"): (200, 32),
    ("decode", "sm_80", "fp32"): (32, 32),
    ("decode", "sm_90", "half"): (200, 32),
    ("decode", "sm_100", "half"): (200, 64),
    ("decode", "gfx942", "half"): (200, 200),
    ("decode", "gfx950", "half"): (200, 128),
    ("dkdv", "sm_80", "half"): (64, 128),
    ("dkdv", "sm_80", "fp32"): (8, 8),
    ("dmask", "sm_80", "half"): (16, 8),
    ("dmask", "sm_90", "fp32"): (0, 8),
    ("dkdv", "sm_90", "half"): (216, 232),
    ("dkdv", "sm_90", "fp32"): (216, 208),
    ("dkdv", "sm_100", "half"): (64, 200),
    ("dkdv", "sm_100", "fp32"): (48, 8),
    ("dkdv", "gfx942", "half"): (480, 428),
    ("dkdv", "gfx950", "half"): (396, 288),
    ("dkdv", "gfx942", "fp32"): (640, 800),
    ("dkdv", "gfx950", "fp32"): (644, 800),
    ("dq", "sm_80", "half"): (200, 64),
    ("dq", "sm_80", "fp32"): (16, 16),
    ("dq", "sm_90", "half"): (80, 80),
    ("dq", "sm_90", "fp32"): (0, 16),
    ("dq", "sm_100", "half"): (256, 256),
    ("dq", "sm_100", "fp32"): (16, 8),
    ("dq", "gfx942", "half"): (144, 136),
    ("dq", "gfx950", "half"): (288, 276),
    ("dkdv", "gfx942", "half above 256"): (264, 208),
    ("dkdv", "gfx950", "half above 256"): (184, 176),
    ("attention_forward", "sm_90", "half above 256"): (200, 208),
    ("dkdv", "sm_90", "half above 256"): (424, 424),
    ("dq", "sm_90", "half above 256"): (8, 8),
    ("attention_forward", "sm_90", "fp32 above 256"): (32, 32),
    ("decode", "sm_80", "half above 256"): (8, 8),
    ("decode", "sm_100", "fp32 above 256"): (24, 16),
    ("dkdv", "sm_90", "half packed"): (256, 272),
    ("dq", "sm_90", "half striped"): (168, 168),
    ("dmask", "sm_80", "half packed"): (24, 24),
    ("attention_forward", "sm_100", "half packed"): (48, 16),
    ("attention_forward", "gfx950", "half packed"): (12, 0),
    ("dq", "sm_100", "fp32 packed"): (8, 8),
    ("row_terms", "sm_100", "half"): (32, 0),
    ("row_terms", "sm_100", "fp32"): (32, 0),
}
LATER = not triton.__version__.startswith("3.6.")


def attention_cases():
    for arch in ARCHS.values():
        for op, config_of in CONFIGS.items():
            for dtype in ("bf16", "fp32"):
                groups = {}
                for dim in HEAD_DIMS:
                    groups.setdefault(config_of(dim, DTYPES[dtype], arch.capability), []).append(
                        dim
                    )
                for dims in groups.values():
                    padded = max(dim for dim in dims if dim & (dim - 1) and dim % 16 == 0)
                    yield Case(op, arch.name, dtype, max(dims), "causal")
                    yield Case(op, arch.name, dtype, padded, "all" if dtype == "bf16" else "full")
            yield Case(op, arch.name, "fp16", 128, "window")


def score_cases():
    """What modifies scores, other value head dims, and head dims above 256."""
    for op, dim in itertools.product(CONFIGS, (64, 128, 256)):
        yield Case(op, "sm_90", "bf16", dim, scores="scores")
        yield Case(op, "sm_90", "bf16", dim, scores="bias")
        yield Case(op, "sm_90", "bf16", dim, "full", scores="row")
        yield Case(op, "sm_90", "bf16", dim, scores="own bias")
    for arch, op in itertools.product(ARCHS, CONFIGS):
        yield Case(op, arch, "bf16", 128, "all", scores="scores")
        yield Case(op, arch, "bf16", 128, "all", scores="mask")
        yield Case(op, arch, "bf16", 128, scores="row")
        yield Case(op, arch, "fp16", 192, v_dim=128)
        yield Case(op, arch, "bf16", 512)
        yield Case(op, arch, "bf16", 512, scores="bias")
    for op, scores in itertools.product(CONFIGS, ("", "softcap", "scores", "sinks")):
        yield Case(op, "sm_90", "bf16", 64, "window", scores=scores)
        yield Case(op, "sm_90", "bf16", 128, "window", scores=scores)
    for op, dim in itertools.product(CONFIGS, (64, 128, 256)):
        yield Case(op, "sm_90", "bf16", dim, dropout_p=0.1)
    for op in CONFIGS:
        yield Case(op, "sm_90", "bf16", 64, dropout_p=0.1, first_head=True)
    for arch, op in itertools.product(ARCHS, CONFIGS):
        yield Case(op, arch, "bf16", 128, "all", scores="bias", dropout_p=0.1)
    yield Case("backward", "sm_90", "fp32", 64, dropout_p=0.1)
    # A threshold of 1, which Triton takes into the code.
    yield Case("backward", "sm_90", "bf16", 128, dropout_p=2**-16)
    for dim in (64, 128, 256):
        yield Case("backward", "sm_90", "fp32", dim, scores="alibi")
    for op, scores in itertools.product(CONFIGS, ("softcap", "alibi", "sinks")):
        yield Case(op, "sm_90", "bf16", 128, "full", scores=scores)
    for op, (dim, scores) in itertools.product(
        CONFIGS, ((128, "scores"), (64, "bias"), (512, "scores"))
    ):
        yield Case(op, "sm_90", "fp32", dim, scores=scores)


def varlen_cases():
    """Packed sequences: attention's tiles with a few more registers; keys on pages."""
    for arch, dim in itertools.product(ARCHS, (64, 128, 256)):
        yield Case("varlen_forward", arch, "bf16", dim)
        yield Case("varlen_backward", arch, "bf16", dim)
    for arch in ARCHS:
        yield Case("varlen_forward", arch, "bf16", 128, "all", cache="same-paged", scores="scores")
        yield Case("varlen_forward", arch, "fp16", 96, "window", cache="same-paged", v_dim=64)
        yield Case("varlen_backward", arch, "bf16", 128, "all", scores="scores")
        yield Case("varlen_forward", arch, "bf16", 128, cache="same-paged", scores="bias")
        yield Case("varlen_backward", arch, "bf16", 128, "window", scores="sinks")
        yield Case("varlen_backward", arch, "bf16", 128, scores="bias")
        yield Case("varlen_backward", arch, "bf16", 64, scores="own bias", dropout_p=0.1)
        for op in ("varlen_forward", "varlen_backward"):
            yield Case(op, arch, "fp32", 64, "full")
    for op in ("varlen_forward", "varlen_backward"):
        yield Case(op, "sm_90", "bf16", 128, dropout_p=0.1)


def decode_cases():
    for arch in ARCHS.values():
        # Pages and fp32 change neither tiles nor code between generations as bf16's tensor cores do.
        more = (("bf16", True), ("fp32", False)) if arch.name in ("sm_90", "gfx942") else ()
        for dtype, paged in (("bf16", False), *more):
            configs = {}
            for dim in HEAD_DIMS:
                for rows in (4, 32, 64):
                    for load in (1, 4):
                        config = decode_config(
                            dim, DTYPES[dtype], rows, paged, False, load, arch.capability
                        )
                        configs[config] = (dim, rows, max(2, load * 132 // 8) if rows == 4 else 2)
            for config, (dim, rows, batch) in configs.items():
                cache = "same-paged" if paged else "same"
                yield Case(
                    "decode", arch.name, dtype, dim, "padded", rows, cache, tile=config, batch=batch
                )
        for cache in ("e4m3-paged", "e5m2", "int8"):
            for load in (1, 4):
                tile = decode_config(
                    128, torch.bfloat16, 4, "paged" in cache, True, load, arch.capability
                )
                batch = max(2, load * 132 // 8)
                yield Case(
                    "decode", arch.name, "bf16", 128, "padded", 4, cache, tile=tile, batch=batch
                )
        for cache in ("same", "same-paged", "e4m3-paged"):  # equal lengths have a grid of their own
            yield Case("decode", arch.name, "bf16", 128, "full", 4, cache)
        yield Case("decode", arch.name, "bf16", 96, "all", 4)
    # Head dims above 256: tiles of their own.
    for arch, (rows, cache, mask) in itertools.product(
        ARCHS,
        (
            (4, "same", "padded"),
            (32, "same-paged", "padded"),
            (4, "e4m3", "full"),
            (64, "same", "all"),
        ),
    ):
        yield Case("decode", arch, "bf16", 512, mask, rows, cache)
    for arch, cache in (*((arch, "same") for arch in ARCHS), ("sm_90", "e4m3-paged")):
        yield Case("decode", arch, "fp32", 512, "padded", 4, cache)
    yield Case("decode", "sm_90", "fp16", 512, "padded", 64, "int8", v_dim=64)
    yield Case("decode", "sm_90", "bf16", 320, "window", 4)
    # One byte an element under float32, whose dots take the most registers.
    for dim, rows in itertools.product((64, 128, 256), (4, 32)):
        yield Case("decode", "sm_90", "fp32", dim, "padded", rows, "e4m3-paged")
    yield Case("decode", "sm_90", "fp32", 256, "padded", 4, "int8")
    # Values of other dims than keys: tiles in shared memory that differ in their swizzle.
    for cache, dim, v_dim in (
        ("e5m2", 128, 16), ("e4m3", 96, 32), ("int8", 64, 16), ("e4m3-paged", 128, 32), ("e5m2", 16, 64),
        ("int8", 32, 128), ("e4m3", 256, 32), ("e5m2", 64, 256), ("e4m3", 32, 16), ("same", 128, 16),
    ):  # fmt: skip
        yield Case("decode", "sm_90", "fp16", dim, "padded", 64, cache, v_dim=v_dim)


def append_cases():
    """A decode step and a prefill into each kind of cache. float8 is encoded by our own arithmetic, so that
    no target is left out: Triton's conversion refuses e4m3 on sm_80."""
    for arch in ARCHS:
        for cache in ("same", "same-paged", "e4m3", "e4m3-paged", "e5m2-paged", "int8"):
            yield Case("append", arch, "bf16", 128, "full", 1, cache)
            yield Case("append", arch, "bf16", 200, "full", 4096, cache)
        yield Case("append", arch, "fp32", 256, "full", 4096, "int8-paged")
        yield Case("append", arch, "bf16", 128, "full", 1, "e4m3-paged", batch=2048)
        yield Case("append", arch, "bf16", 32, "full", 64, "same-paged", v_dim=16)


def merge_cases():
    for arch in ARCHS:
        yield Case("merge", arch, "bf16", 128)
        yield Case("merge", arch, "fp32", 200)


def central(case: Case) -> bool:
    """What `make test` compiles: the commonest call of each op on sm_90, of the quickest to compile elsewhere."""
    if (case.dtype, case.head_dim) != ("bf16", 128) or case.rows not in (1, 4) or case.v_dim:
        return False
    if case.op == "varlen_backward" and (case.arch, case.scores) == ("sm_90", "bias"):
        return not case.dropout_p  # with the kernel of a mask's gradient
    if case.scores or case.dropout_p:
        return False
    if case.arch == "sm_90" and (case.mask, case.cache) == ("padded", "same-paged"):
        return True
    # The kernels of packed sequences are attention's.
    quick = ("varlen_forward", "decode", "merge")
    return (case.arch == "sm_90" or case.op in quick) and (case.mask, case.cache) in (
        ("causal", "same"),
        ("full", "same"),
    )


CASES = [
    *attention_cases(),
    *score_cases(),
    *varlen_cases(),
    *decode_cases(),
    *append_cases(),
    *merge_cases(),
]


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=[] if central(case) else pytest.mark.slow, id=str(case))
        for case in CASES
    ],
)
def test_compiles_within_limits(case):
    for kernel in resources(case):
        where = f"{kernel.kernel} of {case}"
        limit = ARCHS[case.arch].shared_limit
        assert kernel.shared <= limit, (
            f"{where} takes {kernel.shared} bytes of shared memory, limit {limit}"
        )
        kind = "fp32" if case.dtype == "fp32" else "half"
        if case.head_dim > 256:
            kind += " above 256"
        allowed = SPILLS.get((kernel.kernel, case.arch, kind), (0, 0))
        if case.op.startswith("varlen"):
            allowed = SPILLS.get((kernel.kernel, case.arch, f"{kind} packed"), allowed)
        if case.mask == "all" and case.scores:  # distances between positions that are dealt out
            allowed = SPILLS.get((kernel.kernel, case.arch, f"{kind} striped"), allowed)
        allowed = allowed[LATER]
        assert kernel.spills <= allowed, (
            f"{where} spills {kernel.spills} bytes a thread, allowed {allowed}"
        )
        assert not kernel.undefined, f"{where} reads registers that nothing wrote"


@pytest.mark.parametrize(
    ("arch", "head_dim", "tile"),
    [
        ("sm_80", 128, TileConfig(128, 128, 4, 2)),
        pytest.param("gfx942", 256, TileConfig(256, 64, 4, 2), marks=pytest.mark.slow),
    ],
)
def test_a_spilling_kernel_is_seen(arch, head_dim, tile):
    """The check itself: a tile far too large for the registers must show spills."""
    (kernel,) = resources(Case("forward", arch, "bf16", head_dim, tile=tile))
    assert kernel.spills > 100
