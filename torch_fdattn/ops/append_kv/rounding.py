"""fp32 to the codes of float8_e4m3fn, float8_e5m2 and int8 in integer arithmetic, in Triton.

Round to nearest, ties to even; beyond the largest finite value saturated. Not Triton's own conversion,
because that one does not exist for e4m3 on sm_80, goes through fp16 with a rounding of its own on sm_80 and
sm_89 (triton 3.7: cvt.rz.f16.f32 first), and is wrong in the interpreter. About a dozen integer
instructions an element, which a kernel that waits for memory has to spare.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def encode(x, FORMAT: tl.constexpr):
    """x (fp32) as int8, or as the bits of a float8 in uint8; FORMAT as `kernel.FORMATS` names it."""
    if FORMAT == "int8":
        return _int8(x)
    elif FORMAT == "e4m3fn":
        return _float8(x, 3, 7, 0x7E)
    else:
        return _float8(x, 2, 15, 0x7B)


@triton.jit
def _int8(x):
    within = tl.minimum(tl.maximum(x, -127.0), 127.0)
    # In this binade an fp32's last bit is worth 1: the addition itself rounds to even.
    magic: tl.constexpr = 12582912.0  # 1.5 · 2**23
    # NaN is seen before the bounds, of which a GPU gives one for it.
    return tl.where(x == x, (within + magic) - magic, 0.0).to(tl.int8)


@triton.jit
def _float8(x, MANTISSA: tl.constexpr, BIAS: tl.constexpr, LARGEST: tl.constexpr):
    """Sign, exponent (biased by BIAS) and MANTISSA bits; LARGEST is the largest finite code."""
    bits = x.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    drop: tl.constexpr = 23 - MANTISSA
    # Rounded to even by carrying into the bits that stay, and rebiased. Only where the result is normal.
    odd = (magnitude >> drop) & 1
    normal = (magnitude + odd + ((1 << (drop - 1)) - 1)) >> drop
    normal = tl.minimum(normal - ((127 - BIAS) << MANTISSA), LARGEST)
    # Below: adding a power of two whose last bit is worth the smallest float8 lets the addition round.
    anchor_bits: tl.constexpr = (127 + drop + 1 - BIAS) << 23
    anchor = tl.full(x.shape, anchor_bits, tl.int32).to(tl.float32, bitcast=True)
    subnormal = (tl.abs(x) + anchor).to(tl.int32, bitcast=True) - anchor_bits
    code = tl.where(magnitude < ((128 - BIAS) << 23), subnormal, normal)
    code = tl.where(magnitude > 0x7F800000, 0x7F, code)
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)
