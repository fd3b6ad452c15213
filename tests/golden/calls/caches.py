"""`append_kv`, `merge_states`, and the small kernels of a model's layers."""

from __future__ import annotations

from collections.abc import Iterator

import torch

import torch_fdattn
from tests.golden.calls.common import Call, fp32, lengths, new, trained
from torch_fdattn.ops.block_sums import BLOCK
from torch_fdattn.ops.block_sums_kernel import launch_block_sums
from torch_fdattn.ops.dequantised_pages_kernel import launch_dequantise_pages
from torch_fdattn.ops.rotary import KVSlots
from torch_fdattn.ops.rotary_kernel import launch_norm_rotate
from torch_fdattn.ops.swiglu_kernel import launch_silu_mul

B, H, KV, N, D = 4, 32, 8, 4096, 128
E4M3, E5M2, INT8 = torch.float8_e4m3fn, torch.float8_e5m2, torch.int8


def calls() -> Iterator[Call]:
    yield from appends()
    yield from merges()
    yield from layers()


def append(name: str, given: dict) -> Call:
    paged = "page_table" in given
    op = torch_fdattn.paged_append_kv if paged else torch_fdattn.append_kv
    return Call(f"{'paged_' if paged else ''}append_kv/{name}", op, given)


def contiguous(t: int = 1, cached: torch.dtype = torch.bfloat16, d: int = D, dv: int | None = None) -> dict[str, object]:  # fmt: skip
    k, v = (new(B, t, KV, dims).transpose(1, 2) for dims in (d, dv or d))
    caches = dict(
        k_cache=new(B, KV, N, d, dtype=cached), v_cache=new(B, KV, N, dv or d, dtype=cached)
    )
    return caches | dict(k=k, v=v, kv_lens=lengths(B))


def paged(t: int = 1, cached: torch.dtype = torch.bfloat16) -> dict[str, object]:
    caches = dict(
        k_cache=new(1024, KV, 16, D, dtype=cached), v_cache=new(1024, KV, 16, D, dtype=cached)
    )
    return contiguous(t) | caches | dict(page_table=lengths(B, 256))


def rope(t: int, dims: int = D) -> dict[str, object]:
    return dict(q=new(B, t, H, D).transpose(1, 2), cos=fp32(N, dims // 2), sin=fp32(N, dims // 2))


def appends() -> Iterator[Call]:
    positions = dict(positions=torch.zeros(B, 512, dtype=torch.int64))
    per_head, per_slot = (
        dict(k_scale=fp32(*shape), v_scale=fp32(*shape)) for shape in ((KV, 1), (1024, KV, 16))
    )
    yield append("step", contiguous())
    yield append("step/rope", contiguous() | rope(1))
    yield append("prefill", contiguous(512))
    yield append(
        "prefill/rope", contiguous(512) | rope(512, 64) | positions | dict(new_lens=lengths(B))
    )
    yield append("d192-128", contiguous(4, d=192, dv=128))
    yield append("e4m3", contiguous(cached=E4M3) | per_head)
    yield append("e5m2/prefill", contiguous(512, E5M2))
    yield append("int8", contiguous(cached=INT8) | per_head)
    yield append("fp32", contiguous(cached=torch.float32))
    yield append("step", paged())
    yield append("prefill/rope", paged(512) | rope(512) | positions)
    yield append("e4m3", paged(cached=E4M3) | per_slot)
    many = dict(page_table=lengths(2048, 1), kv_lens=lengths(2048))
    tokens = {x: new(2048, 1, KV, D).transpose(1, 2) for x in "kv"}
    yield append("many_sequences", paged() | many | tokens)


def merges() -> Iterator[Call]:
    merge = torch_fdattn.merge_states

    def parts(count: int, dtype: torch.dtype, d: int = D) -> dict[str, object]:
        return dict(outs=new(count, 2, 8, 64, d, dtype=dtype), lses=fp32(count, 2, 8, 64))

    yield Call("merge_states/2", merge, parts(2, torch.bfloat16))
    yield Call("merge_states/40", merge, parts(40, torch.float32) | dict(dtype=torch.bfloat16))
    yield Call("merge_states/d96", merge, parts(3, torch.float16, 96))
    given = parts(4, torch.float32)
    strided = dict(outs=given["outs"].transpose(2, 3), lses=given["lses"].transpose(2, 3))
    yield Call("merge_states/strided", merge, strided)
    op, state = trained(merge, ("outs", "lses")), dict(dout=fp32(2, 8, 64, D), dlse=fp32(2, 8, 64))
    yield Call("merge_states/backward", op, state | parts(4, torch.float32))
    yield Call(
        "merge_states/backward/bf16", op, dict(dout=new(2, 8, 64, D)) | parts(4, torch.bfloat16)
    )
    tree, given = torch.ops.fdattn.merge_tree, parts(40, torch.float32)
    yield Call("merge_tree/64", tree, given | dict(leaves=64, dtype=torch.bfloat16))
    yield Call(
        "merge_tree_rows/8", torch.ops.fdattn.merge_tree_rows, given | dict(leaves=8), ("rows",)
    )
    one = dict(out=fp32(2, 8, 64, D), lse=fp32(2, 8, 64))
    yield Call(
        "merge_pair", torch.ops.fdattn.merge_pair, one | {f"other_{n}": x for n, x in one.items()}
    )
    where = dict(q_len=1, block=1024, count=6, each=2, rank=1, world_size=4, length_limit=1 << 29)
    bounds = dict(kv_lens=torch.full((3,), 9000, dtype=torch.int32), q_start=None, pages_apart=48)
    yield Call("block_bounds", torch.ops.fdattn.block_bounds, bounds | where, ("bounds",))


def layers() -> Iterator[Call]:
    """By their launchers: the functions around them look for CUDA tensors."""
    q, k = new(2, 64, H, D), new(2, 64, KV, D)
    state = dict(q=q, k=k, q_out=new(2, 64, H, D), k_out=new(2, 64, KV, D))
    angles = dict(cos=fp32(2, 1, 64, D // 2), sin=fp32(2, 1, 64, D // 2))
    norms = dict(q_weight=new(D), k_weight=new(D), eps=1e-6)
    yield Call("norm_and_rotate/norms", launch_norm_rotate, state | angles | norms)
    shared = dict(cos=fp32(1, 1, 64, D // 2), sin=fp32(1, 1, 64, D // 2))
    yield Call(
        "norm_and_rotate/plain",
        launch_norm_rotate,
        state | shared | dict(q_weight=None, k_weight=None, eps=0.0),
    )
    places = [torch.zeros(128, dtype=torch.int32) for _ in range(2)]
    projected = state | angles | norms | dict(k_out=None, v=new(2, 64, KV, D))
    to = KVSlots(new(9, KV, 16, D), new(9, KV, 16, D), *places)
    yield Call("norm_and_rotate/stored", launch_norm_rotate, projected | dict(to=to))
    to = KVSlots(
        new(9, KV, 16, D).to(torch.float8_e4m3fn), new(9, KV, 16, D).to(torch.float8_e4m3fn), *places, fp32(9, KV, 16),
        fp32(9, KV, 16),
    )  # fmt: skip
    yield Call("norm_and_rotate/stored_e4m3", launch_norm_rotate, projected | dict(to=to))
    copies = dict(k=new(12, 16, KV, D), v=new(12, 16, KV, D))
    of_pages = dict(
        zip(("k_cache", "v_cache"), to[:2], strict=True), k_scale=to.k_scale, v_scale=to.v_scale
    )
    pages = dict(pages=torch.zeros(12, dtype=torch.int32))
    yield Call("dequantised_pages/e4m3", launch_dequantise_pages, of_pages | pages | copies)
    both = new(256, 2 * 14336)
    gate, up = both.split(14336, 1)
    rows = dict(gate_stride=both.stride(0), up_stride=both.stride(0))
    yield Call("silu_mul/both", launch_silu_mul, dict(gate=gate, up=up, out=new(256, 14336)) | rows)
    small = dict(gate=new(3, 96), up=new(3, 96), out=new(3, 96), gate_stride=96, up_stride=96)
    yield Call("silu_mul/small", launch_silu_mul, small)
    shape = 256, -(-151936 // BLOCK)
    found = dict(largest=fp32(*shape), columns=torch.zeros(shape, dtype=torch.int64), sums=fp32(*shape))  # fmt: skip
    logits = dict(x=new(256, 151936), temperature=fp32(256))
    yield Call("block_sums", launch_block_sums, logits | found)
