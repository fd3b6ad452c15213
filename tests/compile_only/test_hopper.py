"""Hopper's attention in Gluon: every configuration compiles for sm_90 without a GPU, its products on the tensor cores."""

import os

import pytest
import torch
import triton

if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("compiles kernels, which the interpreter replaces", allow_module_level=True)

from tests.compile_only.compiled import compile_launch, nvidia_usage
from tests.compile_only.launches import Launch, meta
from tests.compile_only.targets import ARCHS
from tests.compile_only.uniform_registers import disassembled
from torch_fdattn.ops.attention.hopper.launch import (
    HEAD_DIMS,
    forward_launch,
    keys_of_a_block,
    takes,
)
from torch_fdattn.ops.options import AttentionOptions
from torch_fdattn.ops.positions import Mask

INT = dict(dtype=torch.int32)
#: Masks, with as many queries and keys.
MASKS = {
    "full": (Mask(), 4096, 4096),
    "causal": (Mask(window_right=0), 4096, 4096),
    "causal, ragged": (Mask(window_right=0), 1000, 1300),
    "window": (Mask(window_left=512, window_right=0), 4096, 4096),
    "lengths": (Mask(meta(2, **INT), window_right=0), 4096, 4096),
    "positions": (Mask(*(meta(2, **INT) for _ in range(3)), window_right=0), 256, 4096),
}
#: What `make test` compiles: each takes some seconds.
QUICK = (64, "causal"), (128, "causal"), (256, "lengths")
#: Bytes a thread that may spill outside of the loops under triton 3.6 and later ones.
SPILLS = {256: (64, 16)}


def launch_of(head_dim: int, mask: str, dtype: torch.dtype = torch.bfloat16) -> Launch:
    positions, queries, keys = MASKS[mask]
    q, k, v = (
        meta(2, h, n, head_dim, dtype=dtype) for h, n in ((8, queries), (2, keys), (2, keys))
    )
    options = AttentionOptions(positions, head_dim**-0.5)
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
    compiled = compile_launch(launch_of(head_dim, mask), ARCHS["sm_90"])
    assert compiled.metadata.shared <= ARCHS["sm_90"].shared_size
    _, spills = nvidia_usage(compiled)
    assert spills <= SPILLS.get(head_dim, (0, 0))[not triton.__version__.startswith("3.6.")]
    # The products of a block of keys, 64 rows by 16 of the summed dim each, in each of two warp groups.
    keys = keys_of_a_block(head_dim)
    assert disassembled(compiled.asm["cubin"]).count("HGMMA") >= 2 * (head_dim + keys) // 16


@pytest.mark.slow
def test_compiles_in_float16():
    compile_launch(launch_of(128, "causal", torch.float16), ARCHS["sm_90"])


@pytest.mark.parametrize(
    "wrong",
    [
        dict(q=torch.float32), dict(head_dim=96), dict(mask=Mask(kv_block=4, kv_stride=8)), dict(stride=12),
        dict(expanded=True), dict(scale=0.0), dict(scale=-1.0), dict(out=torch.float32),
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
