"""Values of fewer dims than keys: ptxas left registers undefined in kernels for such."""

import os
from unittest import mock

import pytest
import torch
import triton

if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("compiles kernels, which the interpreter replaces", allow_module_level=True)

from tests.compile_only.compiled import compile_launch
from tests.compile_only.launches import meta, recorded
from tests.compile_only.targets import ARCHS
from tests.compile_only.uniform_registers import disassembled, read_before_written
from torch_fdattn.ops.attention import forward
from torch_fdattn.ops.decode import launch
from torch_fdattn.ops.decode.inputs import Cache, DecodeCall
from torch_fdattn.ops.launch import padded
from torch_fdattn.ops.options import AttentionOptions, DecodeOptions
from torch_fdattn.ops.positions import Mask
from torch_fdattn.ops.scores import Scores

#: What an H100 got wrong: two draws of the serving cases, and keys with gaps between their elements.
CASES = {
    "e5m2": (torch.float16, torch.float8_e5m2, 8, 128, 16, 5.0, False),
    "e4m3": (torch.bfloat16, torch.float8_e4m3fn, 5, 96, 32, 0.0, True),
    "gaps": (torch.bfloat16, torch.bfloat16, 5, 96, 24, 0.0, False),
    "small gaps": (torch.bfloat16, torch.bfloat16, 5, 24, 24, 0.0, False),
}
#: A packed draw that an H100 got wrong; and keys with gaps, values with rows that are not aligned.
IN_ATTENTION = {
    "dims": (meta(2, 4, 300, 40), meta(2, 4, 300, 24), Scores(alibi_slopes=meta(4))),
    "gaps": (meta(2, 4, 24, 512).mT, meta(2, 4, 512, 25)[..., :24], Scores()),
}


#: Of each kind one; the others take long.
QUICK = ("e5m2", "gaps")


def cases(names, quick=QUICK) -> list:
    return [pytest.param(x, marks=() if x in quick else pytest.mark.slow) for x in names]


def unpadded(k: torch.Tensor, v: torch.Tensor) -> tuple[int, int]:
    return padded(k.shape[3]), padded(v.shape[3])


def found(case: str) -> list[str]:
    dtype, cache_dtype, heads, dim, v_dim, softcap, invariant = CASES[case]
    length = 455 if "gaps" in case else 304

    def lens() -> torch.Tensor:
        return meta(1, dtype=torch.int32)

    q, k = meta(1, heads, 16, dim, dtype=dtype), meta(1, 1, length, dim, dtype=cache_dtype)
    v, scales = meta(1, 1, length, v_dim, dtype=cache_dtype), meta(1, 1, length)
    v_scales = scales if invariant else meta().expand(1, 1, length)
    if "gaps" in case:
        k, scales, v_scales = meta(1, 1, dim, length, dtype=dtype).mT, None, None
    mask = Mask(lens(), lens(), None, -1, 0 if invariant else -1, 3, 9)
    scores = Scores(softcap=softcap, sinks=meta(heads) if softcap else None)
    options = DecodeOptions(mask, 0.1, scores, batch_invariant=invariant)
    out, lse = meta(1, heads, 16, v_dim, dtype=dtype), meta(1, heads, 16)
    with recorded() as launches:
        call = DecodeCall(q, Cache(k, v, None, scales, v_scales), options)
        launch.launch_decode(call, out, lse, capability=(9, 0))
    cubin = compile_launch(launches[0], ARCHS["sm_90"]).asm["cubin"]
    return read_before_written(disassembled(cubin))


@pytest.mark.parametrize("case", cases(CASES))
def test_decode_reads_what_was_written(case):
    assert not found(case)


@pytest.mark.skipif(
    not triton.__version__.startswith(("3.6.", "3.7.")), reason="another ptxas may be right"
)
@pytest.mark.parametrize("case", cases(CASES, ["gaps"]))
def test_without_the_padding_it_does_not(case):
    """The check itself: what the padding is for is still there."""
    with mock.patch.object(launch, "tile_dims", unpadded):
        assert found(case)


def in_attention(case: str) -> list[str]:
    k, v, scores = IN_ATTENTION[case]
    k, v = k.half(), v.half()
    q, out = (meta(2, 4, 300, x.shape[-1], dtype=torch.float16) for x in (k, v))
    with (
        mock.patch.object(forward, "device_capability", return_value=(9, 0)),
        recorded() as launches,
    ):
        options = AttentionOptions(Mask(window_right=0), 0.1, scores)
        forward.launch_forward(q, k, v, options, out, meta(2, 4, 300))
    code = compile_launch(launches[0], ARCHS["sm_90"]).asm["cubin"]
    return read_before_written(disassembled(code))


@pytest.mark.parametrize("case", cases(IN_ATTENTION))
def test_attention_reads_what_was_written(case):
    assert not in_attention(case)


@pytest.mark.skipif(not triton.__version__.startswith("3.6."), reason="another ptxas may be right")
@pytest.mark.parametrize("case", cases(IN_ATTENTION))
def test_without_the_padding_attention_does_not(case):
    with mock.patch.object(forward, "tile_dims", unpadded):
        assert in_attention(case)


def test_what_counts_as_read_and_written():
    fine = """
        /*0000*/                   UMOV UR4, 0x400 ;
        /*0010*/                   ULDC.64 UR8, c[0x0][0x208] ;
        /*0020*/                   LDG.E R2, desc[UR8][R2.64] ;
        /*0030*/              @UP0 USHF.L.U32 UR5, UR4, 0x1, URZ ;
        /*0040*/                   UIMAD.WIDE UR6, UR4, UR5, UR8 ;
        /*0050*/                   HGMMA.64x16x16.F32 R56, R24, gdesc[UR4].tnspB, R56 ;
        /*0060*/                   UISETP.GE.AND UP0, UPT, UR4, UR9, UPT ;
    """
    assert not read_before_written(fine)
    for wrong in (
        "UIADD3 UR42, UP0, UR42, 0x20, URZ",
        "STS [R4+UR9], R2",
        "HGMMA.64x64x16.F32 R24, gdesc[UR4], R24",
    ):
        assert len(read_before_written(f"/*0000*/ UMOV UR4, 0x1 ;\n/*0010*/ {wrong} ;")) == 1
