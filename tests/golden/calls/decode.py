"""`decode` and `paged_decode`."""

from __future__ import annotations

from collections.abc import Iterator

import torch

import torch_fdattn
from tests.golden.calls.common import Call, fp32, lengths, new, tf32, trained
from tests.golden.device import A100, B200, H200, MI300

B, H, KV, N, D = 4, 32, 8, 8192, 128
E4M3, E5M2, INT8 = torch.float8_e4m3fn, torch.float8_e5m2, torch.int8
_PAGES = 4096


def cache(
    b: int = B, h: int = H, kv: int = KV, t: int = 1, n: int = N, d: int = D, dv: int | None = None,
    dtype: torch.dtype = torch.bfloat16, cached: torch.dtype | None = None, equal: bool = False,
) -> dict[str, object]:  # fmt: skip
    """equal: all sequences fill the cache."""
    given = dict(
        q=new(b, h, t, d, dtype=dtype), k_cache=new(b, kv, n, d, dtype=cached or dtype),
        v_cache=new(b, kv, n, dv or d, dtype=cached or dtype),
    )  # fmt: skip
    return given if equal else given | dict(kv_lens=lengths(b))


def pages(b: int = B, page: int = 16, cached: torch.dtype = torch.bfloat16, **options) -> dict[str, object]:  # fmt: skip
    given = cache(b, n=1, **options)
    shape = _PAGES, given["k_cache"].shape[1], page, D
    caches = dict(k_cache=new(*shape, dtype=cached), v_cache=new(*shape, dtype=cached))
    return given | caches | dict(page_table=lengths(b, N // page))


def scales(*shape: int) -> dict[str, object]:
    return dict(k_scale=fp32(*shape), v_scale=fp32(*shape))


def one(name: str, given: dict, **options) -> Call:
    op = torch_fdattn.paged_decode if "page_table" in given else torch_fdattn.decode
    kind = "paged_decode" if "page_table" in given else "decode"
    return Call(f"{kind}/{name}", op, given, **options)


def calls() -> Iterator[Call]:
    yield from sizes()
    yield from options()
    yield from layouts()
    yield from quantised()
    yield from paged()
    yield from given_memory()


def sizes() -> Iterator[Call]:
    for b in (1, 4, 64, 200, 300):
        yield one(f"b{b}", cache(b))
        yield one(f"b{b}/equal", cache(b, equal=True))
    for t in (2, 4, 16):
        yield one(f"t{t}", cache(t=t))
    for kv in (1, 2, 32):
        yield one(f"kv{kv}", cache(kv=kv))
    yield one("kv1/t16", cache(kv=1, t=16))
    yield one("b16", cache(16))
    yield one("b1/long", cache(1, n=1 << 20))
    yield one("b64/short", cache(64, n=256))
    yield one("b1/short", cache(1, n=64))
    yield one("b70000", cache(70000, 1, 1, n=16, d=16))
    for d, dv in ((64, 64), (96, 96), (192, 128), (256, 256), (512, 512)):
        yield one(f"d{d}" if d == dv else f"d{d}-{dv}", cache(d=d, dv=dv))
    yield one("d512/b128", cache(128, n=1024, d=512))
    yield one("fp16", cache(dtype=torch.float16))
    yield one("fp32", cache(dtype=torch.float32))
    yield one("fp32/tf32", cache(dtype=torch.float32), setting=tf32)
    for name, device in dict(h200=H200, a100=A100, b200=B200, mi300=MI300).items():
        yield one(f"b1/{name}", cache(1, n=1 << 17), device=device)


def options() -> Iterator[Call]:
    yield one("window", cache() | dict(window=(1023, 0)))
    yield one("full/t4", cache(t=4) | dict(causal=False))
    yield one("softcap", cache() | dict(softcap=30.0))
    yield one("alibi", cache() | dict(alibi_slopes=fp32(H)))
    yield one("alibi/own", cache() | dict(alibi_slopes=fp32(B, H)))
    yield one("sinks", cache() | dict(sinks=new(H)))
    yield one("sinks/b1", cache(1, equal=True) | dict(sinks=new(H)))
    yield one("mask/bool", cache() | dict(attn_mask=new(B, 1, 1, N, dtype=torch.bool)))
    yield one("mask/float", cache(t=4) | dict(attn_mask=new(H, 4, N)))
    yield one("q_start", cache(t=4) | dict(q_start=lengths(B)))
    positions = dict(q_start=lengths(B), kv_start=lengths(B), kv_block=16, kv_stride=64)
    yield one("positions", cache(t=2) | positions | dict(window=(1023, 0)))
    yield one("kv_lens/strided", cache() | dict(kv_lens=lengths(2 * B)[::2]))
    yield one("scale", cache() | dict(scale=0.5))
    for b in (1, 4, 300):
        yield one(f"invariant/b{b}", cache(b) | dict(batch_invariant=True))
    yield one(
        "invariant/softcap+sinks", cache() | dict(batch_invariant=True, softcap=30.0, sinks=new(H))
    )
    dout, op = dict(dout=new(B, H, 1, D)), trained(torch_fdattn.decode, ("q", "k_cache", "v_cache"))
    yield Call("decode/backward", op, dout | cache(n=1024))


def layouts() -> Iterator[Call]:
    def keys_first(*shape: int, order: tuple[int, ...]) -> dict[str, object]:
        return cache() | {name: new(*shape).permute(*order) for name in ("k_cache", "v_cache")}

    yield one("layout/bnhd", keys_first(B, N, KV, D, order=(0, 2, 1, 3)))
    yield one("layout/nbhd", keys_first(N, B, KV, D, order=(1, 2, 0, 3)))
    both = new(2, B, N, KV, D).transpose(2, 3)
    yield one("layout/both", cache() | dict(k_cache=both[0], v_cache=both[1]))
    wide = new(B, KV, N, 2 * D)
    yield one("layout/halves", cache() | dict(k_cache=wide[..., :D], v_cache=wide[..., D:]))
    yield one("layout/strided", cache(t=16) | dict(k_cache=wide[..., ::2], v_cache=wide[..., 1::2]))
    yield one("layout/q", cache(t=2) | dict(q=new(B, 2, H, D).transpose(1, 2)))
    yield one("layout/expanded", cache() | dict(k_cache=new(1, KV, N, D).expand(B, -1, -1, -1)))


def quantised() -> Iterator[Call]:
    for name, dtype in dict(e4m3=E4M3, e5m2=E5M2, int8=INT8).items():
        yield one(name, cache(cached=dtype) | scales(KV, 1))
    yield one("e4m3/b64", cache(64, cached=E4M3))
    yield one("e4m3/a100", cache(cached=E4M3) | scales(1), device=A100)
    yield one("int8/positions", cache(cached=INT8) | scales(B, KV, N))
    yield one("e4m3/fp32", cache(dtype=torch.float32, cached=E4M3))
    yield one("e4m3/t16", cache(t=16, d=128, dv=32, cached=E4M3))


def paged() -> Iterator[Call]:
    yield one("b1", pages(1))
    yield one("b4", pages())
    yield one("b64", pages(64))
    yield one("equal", pages(equal=True))
    yield one("page64", pages(page=64))
    yield one("page1", pages(page=1))
    yield one("t4", pages(t=4))
    yield one("window", pages() | dict(window=(1023, 0)))
    yield one(
        "softcap+alibi+sinks", pages() | dict(softcap=30.0, alibi_slopes=fp32(H), sinks=new(H))
    )
    yield one("e4m3", pages(cached=E4M3) | scales(_PAGES, KV, 16))
    yield one("int8/b64", pages(64, cached=INT8) | scales(KV, 1))
    yield one("invariant", pages() | dict(batch_invariant=True))
    caches = {name: new(_PAGES, 16, KV, D).transpose(1, 2) for name in ("k_cache", "v_cache")}
    yield one("layout", pages() | caches | dict(page_table=lengths(B, N // 8)[:, ::2]))


def given_memory() -> Iterator[Call]:
    """Results and scratch memory of the caller's."""

    def into(op, out, lse, **given):
        return op(**given, out=(out, lse))

    def with_workspace(op, **given):
        table = [given["page_table"]] if "page_table" in given else []
        workspace = torch_fdattn.decode_workspace(
            given["q"], given["k_cache"], given["v_cache"], *table
        )
        return op(**given, workspace=workspace)

    for name, given in dict(decode=cache(), paged_decode=pages()).items():
        op = getattr(torch_fdattn, name)
        memory = dict(out=fp32(B, H, 1, D), lse=fp32(B, H, 1))
        yield Call(f"{name}/out", into, dict(op=op) | memory | given)
        yield Call(f"{name}/workspace", with_workspace, dict(op=op) | given)
