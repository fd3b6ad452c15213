"""Elements of one byte in the products of 16 bits: caches in float8 or int8, of which a product takes float16.

One byte becomes float16 by one instruction for two, bfloat16 only by a conversion at a quarter of the rate.
"""

from __future__ import annotations

import triton
import triton.language as tl

#: Two pairs of bytes to the float16 numbers of their first bytes and of their second ones.
_E4M3 = tl.constexpr("""{
    .reg .b32 sorted; .reg .b16 firsts, seconds;
    prmt.b32 sorted, $2, 0, 0x3120;
    mov.b32 {firsts, seconds}, sorted;
    cvt.rn.f16x2.e4m3x2 $0, firsts;
    cvt.rn.f16x2.e4m3x2 $1, seconds;
}""")
_E5M2 = tl.constexpr("prmt.b32 $0, $2, 0, 0x2404; and.b32 $1, $2, 0xFF00FF00;")
#: 1024 + n + 128, whose bits are 0x6400 + n + 128, less 1152.
_INT8 = tl.constexpr("""{
    .reg .b32 bytes, offset, first, second;
    xor.b32 bytes, $2, 0x80808080;
    mov.b32 offset, 0x64806480;
    prmt.b32 first, bytes, 0x64646464, 0x4240;
    prmt.b32 second, bytes, 0x64646464, 0x4341;
    sub.f16x2 $0, first, offset;
    sub.f16x2 $1, second, offset;
}""")


@triton.jit
def load_queries(ptrs, mask, TO_HALF: tl.constexpr):
    """(q (M, D), factors (M,)); TO_HALF: rows scaled to below 2 in float16, the powers of two taken out."""
    q = tl.load(ptrs, mask=mask, other=0.0)
    factor = tl.zeros([q.shape[0]], tl.float32)
    if TO_HALF:
        q = q.to(tl.float32)
        factor = power_of_two(tl.max(tl.abs(q), 1))
        q = (q * (1.0 / factor)[:, None]).to(tl.float16)
    return q, factor


@triton.jit
def both(pairs, element: tl.constexpr, dtype: tl.constexpr, PTX: tl.constexpr):
    """The first and the second elements of pairs (int16), in dtype; PTX, for float16: by instructions that take two at once,
    which sm_89 and later have."""
    if PTX:
        eight_bits: tl.constexpr = _INT8 if element == tl.int8 else _E5M2
        code: tl.constexpr = _E4M3 if element == tl.float8e4nv else eight_bits
        return tl.inline_asm_elementwise(
            code, "=r,=r,r", [pairs], (tl.float16, tl.float16), True, 2
        )
    first, second = (pairs & 0xFF).to(tl.uint8), (pairs >> 8).to(tl.uint8)
    if element != tl.uint8:
        first, second = first.to(element, bitcast=True), second.to(element, bitcast=True)
    return unquantised(first, dtype), unquantised(second, dtype)


@triton.jit
def unquantised(x, dtype: tl.constexpr):
    """A tile of a cache in the dtype of the dots; uint8 are the bytes of float8_e4m3fn."""
    if x.dtype == tl.uint8:
        # Its exponent and mantissa at float16's place are its value, subnormals included, times 2**-8.
        wide = x.to(tl.uint16)
        bits = ((wide & 0x80) << 8) | ((wide & 0x7F) << 7)
        value = bits.to(tl.float16, bitcast=True) * 256.0
        return tl.where((wide & 0x7F) == 0x7F, float("nan"), value).to(dtype)
    elif x.dtype == tl.int8 and dtype == tl.float16:
        # 1024 + n is float16's bits 0x6400 + n for n below 1024: no conversion, which is slow for integers.
        bits = (x.to(tl.uint8, bitcast=True) ^ 0x80).to(tl.uint16) | 0x6400
        return bits.to(tl.float16, bitcast=True) - 1152.0
    elif x.dtype == tl.float8e5 and dtype == tl.float16:
        # Its bits are float16's upper ones. (The interpreter's own conversion loses subnormals.)
        return (x.to(tl.uint8, bitcast=True).to(tl.uint16) << 8).to(tl.float16, bitcast=True)
    else:
        return x.to(dtype)


@triton.jit
def power_of_two(x):
    """The power of two below x >= 0, kept within 2**±100 so that it and what it divides stay finite."""
    exponent = tl.floor(tl.log2(tl.maximum(x, 1.1754944e-38)))
    return tl.exp2(tl.minimum(tl.maximum(exponent, -100.0), 100.0))
