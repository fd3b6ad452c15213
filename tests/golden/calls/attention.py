"""`attention`: forward and backward."""

from __future__ import annotations

from collections.abc import Iterator

import torch

import torch_fdattn
from tests.golden.calls.common import Call, far, fp32, lengths, new, tf32, trained
from tests.golden.device import A100, B200, H200, MI300
from torch_fdattn.ops.determinism import ordered

B, H, KV, S, D = 2, 8, 2, 1024, 128
_FP16, _FP32 = torch.float16, torch.float32


def qkv(
    s: int = S, s_kv: int | None = None, d: int = D, dv: int | None = None, h: int = H, kv: int = KV,
    dtype: torch.dtype = torch.bfloat16,
) -> dict[str, object]:  # fmt: skip
    s_kv = s if s_kv is None else s_kv
    k = new(B, kv, s_kv, d, dtype=dtype)
    return dict(q=new(B, h, s, d, dtype=dtype), k=k, v=new(B, kv, s_kv, dv or d, dtype=dtype))


def forward(name: str, given: dict, **options) -> Call:
    return Call(f"attention/{name}", torch_fdattn.attention, given, **options)


def training(name: str, given: dict, *wanted: str, **options) -> Call:
    """Forward and backward; wanted: what wants gradients besides q, k and v."""
    q, v = given["q"], given["v"]
    dout = dict(dout=new(*q.shape[:3], v.shape[3], dtype=q.dtype))
    op = trained(torch_fdattn.attention, ("q", "k", "v", *wanted))
    return Call(f"attention/{name}/backward", op, dout | given, **options)


def bounds() -> dict[str, object]:
    """Everything about positions."""
    return dict(
        kv_lens=lengths(B), q_start=lengths(B), kv_start=lengths(B), kv_block=16, kv_stride=64
    )


def calls() -> Iterator[Call]:
    yield from masks()
    yield from scores()
    yield from dropout()
    yield from shapes()
    yield from layouts()
    yield from settings()
    yield from raw()
    yield from hopper()


def masks() -> Iterator[Call]:
    yield training("full", qkv())
    yield training("full/ragged", qkv(1000))
    yield training("causal", qkv() | dict(causal=True))
    yield training("causal/ordered", qkv() | dict(causal=True), setting=ordered)
    yield training("causal/ordered/d64", qkv(d=64) | dict(causal=True), setting=ordered)
    yield training("window", qkv() | dict(window=(511, 0)))
    yield training("window/both", qkv() | dict(window=(100, 200)))
    yield training("window/wide", qkv(4096) | dict(window=(3000, 0)))
    yield forward("window/right", qkv() | dict(window=(-1, 64)))
    yield training("kv_lens", qkv() | dict(kv_lens=lengths(B)))
    yield forward("kv_lens/causal", qkv() | dict(kv_lens=lengths(B), causal=True))
    yield forward("kv_lens/strided", qkv() | dict(kv_lens=lengths(2 * B)[::2]))
    yield training("q_start", qkv(256, 1024) | dict(q_start=lengths(B), causal=True))
    yield training("positions", qkv() | bounds() | dict(window=(511, 0)))


def scores() -> Iterator[Call]:
    causal = dict(causal=True)
    slopes = dict(alibi_slopes=fp32(H))
    yield training("softcap", qkv() | causal | dict(softcap=30.0))
    yield training("alibi", qkv() | causal | slopes, "alibi_slopes")
    yield training("alibi/untrained", qkv() | causal | dict(alibi_slopes=fp32(H)))
    yield training("alibi/own", qkv() | dict(alibi_slopes=fp32(B, H)), "alibi_slopes")
    yield training("sinks", qkv() | causal | dict(sinks=new(H)), "sinks")
    yield forward("sinks/strided", qkv() | dict(sinks=new(2 * H)[::2]))
    yield forward(
        "softcap+alibi+sinks", qkv() | causal | dict(softcap=30, alibi_slopes=fp32(H), sinks=new(H))
    )
    for name, shape, options in (
        ("bool", (B, 1, S, S), {}),
        ("bool/row", (B, 1, 1, S), {}),
        ("bool/row/causal", (B, 1, 1, S), causal),
        ("bool/2d", (S, S), {}),
    ):
        mask = dict(attn_mask=new(*shape, dtype=torch.bool))
        yield training(f"mask/{name}", qkv() | mask | options)
    short = qkv(256) | dict(attn_mask=new(B, 1, 1, 256, dtype=torch.bool))
    yield forward("mask/bool/row/short", short)
    columns = new(B, 1, S, S).transpose(2, 3)
    yield forward("mask/columns", qkv() | dict(attn_mask=columns))
    for name, shape, dtype in (
        ("heads", (H, S, S), torch.bfloat16),
        ("own", (B, H, S, S), torch.bfloat16),
        ("row", (B, 1, 1, S), _FP32),
        ("column", (S, 1), _FP32),
    ):
        mask = dict(attn_mask=new(*shape, dtype=dtype))
        yield training(f"mask/float/{name}", qkv() | mask, "attn_mask")
    odd = qkv(1001) | dict(attn_mask=new(1, H, 1001, 1001))
    yield training("mask/float/odd", odd | causal, "attn_mask")


def dropout() -> Iterator[Call]:
    seed = dict(dropout_seed=torch.zeros(2, dtype=torch.int64))
    yield training("dropout", qkv() | seed | dict(dropout_p=0.1, causal=True))
    yield training("dropout/d64", qkv(d=64) | seed | dict(dropout_p=0.25))
    of_a_part = dict(dropout_seed=torch.zeros(3, dtype=torch.int64))
    yield training("dropout/part", qkv(d=64) | of_a_part | dict(dropout_p=0.25))
    mask = dict(attn_mask=new(H, S, S))
    everything = dict(
        window=(511, 0), softcap=20.0, alibi_slopes=fp32(H), sinks=new(H), dropout_p=0.5
    )
    wanted = "alibi_slopes", "sinks", "attn_mask"
    yield training("everything", qkv() | bounds() | mask | seed | everything, *wanted)


def shapes() -> Iterator[Call]:
    causal = dict(causal=True)
    for d, dv in ((16, 16), (64, 64), (96, 96), (192, 128), (256, 256), (320, 320), (512, 512)):
        name = f"d{d}" if d == dv else f"d{d}-{dv}"
        yield training(name, qkv(d=d, dv=dv) | causal)
    yield training("d64/window", qkv(d=64) | dict(window=(511, 0)))
    yield training("d64/softcap", qkv(d=64) | causal | dict(softcap=30.0))
    yield training("d256/alibi", qkv(d=256) | causal | dict(alibi_slopes=fp32(H)), "alibi_slopes")
    yield training("d256/sinks", qkv(d=256) | causal | dict(sinks=new(H)), "sinks")
    yield training("d64/alibi", qkv(d=64) | causal | dict(alibi_slopes=fp32(H)), "alibi_slopes")
    yield training("fp16", qkv(dtype=_FP16) | causal)
    for d in (64, 128, 256):
        yield training(f"fp32/d{d}", qkv(d=d, dtype=_FP32) | causal)
    yield training("mha", qkv(kv=H) | causal)
    yield training("mqa", qkv(kv=1))
    yield training("cross", qkv(100, 3000))
    yield training("one_query", qkv(1, 1024) | causal)
    yield training("no_keys", qkv(64, 0))
    yield training("no_queries", qkv(0, 64))
    yield training("dlse", qkv() | dict(dlse=fp32(B, H, S)))
    yield forward("long", qkv(65536) | causal)
    yield forward("scale", qkv() | dict(scale=0.5))
    yield forward("scale/one", qkv() | dict(scale=1.0))


def layouts() -> Iterator[Call]:
    causal = dict(causal=True)
    q, k, v = (new(B, S, heads, D).transpose(1, 2) for heads in (H, KV, KV))
    yield training("layout/bshd", dict(q=q, k=k, v=v) | causal)
    merged = new(B, S, H + 2 * KV, D).transpose(1, 2)
    q, k, v = merged.split((H, KV, KV), 1)
    yield forward("layout/qkv", dict(q=q, k=k, v=v) | causal)
    q, k = new(S, B, H, D).permute(1, 2, 0, 3), new(S, B, KV, D).permute(1, 2, 0, 3)
    yield forward("layout/sbhd", dict(q=q, k=k, v=new(S, B, KV, D).permute(1, 2, 0, 3)))
    shared = new(1, KV, S, D).expand(B, -1, -1, -1)
    yield forward("layout/expanded", dict(q=new(B, H, S, D), k=shared, v=shared))
    strided = qkv(d=2 * D)
    yield training("layout/strided", {name: x[..., ::2] for name, x in strided.items()} | causal)
    yield forward("layout/slices", {name: x[..., :64] for name, x in qkv().items()} | causal)
    odd = qkv(d=D + 1)
    yield forward("layout/odd", {name: x[..., 1:] for name, x in odd.items()})
    yield training(
        "layout/wide",
        {name: far(B, heads, 16, D, step=1 << 23) for name, heads in dict(q=1, k=1, v=1).items()},
    )


def settings() -> Iterator[Call]:
    causal = dict(causal=True)
    yield training("tf32", qkv(dtype=_FP32) | causal, setting=tf32)
    tiles = dict(block_m=64, num_stages=1)
    yield training("tiles", qkv() | causal, setting=lambda: torch_fdattn.tiles(**tiles))
    mask = dict(attn_mask=new(H, S, S))
    only = dict(kernel="dmask", block_n=32)
    yield training(
        "tiles/dmask", qkv() | mask, "attn_mask", setting=lambda: torch_fdattn.tiles(**only)
    )
    for name, device in dict(h200=H200, a100=A100, b200=B200, mi300=MI300).items():
        yield training(name, qkv() | causal, device=device)
    yield training("a100/mask", qkv() | dict(attn_mask=new(H, S, S)), "attn_mask", device=A100)


def raw() -> Iterator[Call]:
    """What ring attention calls: partial results and gradients in float32."""
    plain = dict(
        kv_lens=None, q_start=None, kv_start=None, window_left=-1, window_right=0, kv_block=0, kv_stride=0, scale=0.125,
    )  # fmt: skip
    given = qkv()
    yield Call(
        "attention/raw/forward",
        torch.ops.fdattn.attention_forward,
        given | plain | dict(out_dtype=_FP32),
    )
    state = dict(dout=new(B, H, S, D), dlse=None, **qkv(), out=fp32(B, H, S, D), lse=fp32(B, H, S))
    yield Call(
        "attention/raw/backward", torch.ops.fdattn.attention_backward, state | plain | dict(grad_dtype=_FP32),
        ("dq", "dk", "dv"),
    )  # fmt: skip


def hopper() -> Iterator[Call]:
    """What other calls do not reach of the kernels for sm_90."""
    scales = dict(q_scale=fp32(H), k_scale=fp32(B, KV), v_scale=fp32(KV))
    given = qkv(dtype=torch.float8_e4m3fn) | scales | dict(kv_lens=lengths(B))
    yield Call("attention_fp8/lengths", torch_fdattn.attention_fp8, given)
