"""A driver that notes what it is handed, and calls of every kind whose launches are prepared."""

from unittest import mock

import torch

from tests.compile_only.launches import Launch
from torch_fdattn.launch.driver_launch import flat
from torch_fdattn.ops.append_kv.arguments import Append
from torch_fdattn.ops.append_kv.kernel import launch_append
from torch_fdattn.ops.attention.backward import launch_backward
from torch_fdattn.ops.attention.configs import BackwardConfig, TileConfig
from torch_fdattn.ops.attention.dropout import Dropout
from torch_fdattn.ops.attention.forward import launch_forward
from torch_fdattn.ops.block_sums_kernel import launch_block_sums
from torch_fdattn.ops.dequantised_pages_kernel import launch_dequantise_pages
from torch_fdattn.ops.merge_states.kernel import launch_merge
from torch_fdattn.ops.options import AttentionOptions
from torch_fdattn.ops.packed import Packed, by_heads
from torch_fdattn.ops.positions import Mask
from torch_fdattn.ops.rotary import KVSlots
from torch_fdattn.ops.rotary_kernel import launch_norm_rotate
from torch_fdattn.ops.scores import Scores

TILE = TileConfig(32, 32, 4, 1)


class Driver:
    """Stands where CUDA's driver does, and reads what a launch would."""

    def __init__(self) -> None:
        self.calls: list[tuple[list[int], list[int | float]]] = []  # grid, parameters
        self.layouts: dict[int, list] = {}

    def cuLaunchKernelEx(self, config, function, parameters, extra) -> int:
        layout = self.layouts[function.value]
        values = [kind.from_address(at).value for at, kind in zip(parameters, layout, strict=True)]
        self.calls.append((list(config.contents.grid), values))
        return 0


def bound(launch: Launch, grid, compiled) -> tuple[list[int], list[int | float]]:
    """(grid, parameters) as Triton would bind them."""
    own = {k: v for k, v in launch.kwargs.items() if k in launch.kernel.signature.parameters}
    arguments = launch.kernel.signature.bind(*launch.args, **own)
    arguments.apply_defaults()
    pairs = list(flat(compiled.src.signature.values(), arguments.args))
    values = [x.data_ptr() if kind.startswith("*") else x for kind, x in pairs]
    return [*grid, 1, 1], [*values, 0, 0]


class Pool:
    """Tensors by the order in which a call asks for them: calls of one pool have the same addresses."""

    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []
        self.next = 0

    def __call__(self, *shape, dtype=torch.float16, device=None) -> torch.Tensor:
        shape = shape[0] if shape and isinstance(shape[0], tuple | list) else shape
        if self.next == len(self.tensors):
            self.tensors.append(torch.zeros(shape, dtype=dtype))
        self.next += 1
        return self.tensors[self.next - 1]


_pool = [Pool()]


def draw(*shape, dtype=torch.float16) -> torch.Tensor:
    """The next tensor of the pool that the call is made with."""
    return _pool[0](*shape, dtype=dtype)


def call_with(pool: Pool, name: str) -> None:
    _pool[0], pool.next = pool, 0
    like = lambda x, *shape, **kw: pool(*(shape or x.shape), dtype=kw.get("dtype", x.dtype))  # noqa: E731
    with (
        mock.patch.object(torch, "empty", pool), mock.patch.object(torch, "empty_like", like),
        mock.patch.object(torch.Tensor, "new_empty", like),
    ):  # fmt: skip
        CALLS[name]()


def forward(case: str):
    """A call of attention's forward: on new tensors each time."""
    q, k, v = (draw(2, heads, 64, 32) for heads in (4, 2, 2))
    out, lse, lens = draw(2, 4, 64, 32), draw(2, 4, 64, dtype=torch.float32), None
    scores, dropout = Scores(), Dropout()
    if case == "features":
        lens = draw(2, dtype=torch.int32)
        slopes, sinks = draw(4, dtype=torch.float32), draw(4)
        scores = Scores(30.0, slopes, sinks, draw(4, 64, 64))
        dropout = Dropout(0.25, draw(2, dtype=torch.int64))
    options = AttentionOptions(Mask(lens, None, lens, 9, 0), 0.5, scores, dropout)
    launch_forward(q, k, v, options, out, lse, TILE)


def pages() -> None:
    q, lens = by_heads(draw(40, 4, 32)), draw(3, dtype=torch.int32)
    k, v = (draw(20, 2, 16, 32) for _ in range(2))
    out, lse = by_heads(draw(40, 4, 32)), draw(4, 40, dtype=torch.float32)
    packed = Packed(draw(4, dtype=torch.int32), None, draw(3, 6, dtype=torch.int32))
    options = AttentionOptions(Mask(lens, window_right=0), 0.5)
    launch_forward(q, k, v, options, out, lse, config=TILE, packed=packed)


def backward(case: str) -> None:
    q, out, dout, dq = (draw(2, 4, 64, 32) for _ in range(4))
    k, v, dk, dv = (draw(2, 2, 64, 32) for _ in range(4))
    lse, dlse = (draw(2, 4, 64, dtype=torch.float32) for _ in range(2))
    scores = score_grads = Scores()
    if case == "gradients":
        slopes, bias = draw(4, dtype=torch.float32), draw(4, 64, 64)
        scores = Scores(alibi_slopes=slopes, attn_mask=bias)
        score_grads = Scores(
            alibi_slopes=draw(*slopes.shape, dtype=torch.float32), attn_mask=draw(4, 64, 64)
        )
    launch_backward(
        dout, dlse if case == "plain" else None, q, k, v, out, lse, AttentionOptions(Mask(window_right=0), 0.5, scores),
        dq, dk, dv, score_grads, config=BackwardConfig(TILE, TILE),
    )  # fmt: skip


def packed_backward() -> None:
    q, out, dout, dq = (by_heads(draw(96, 4, 32)) for _ in range(4))
    k, v, dk, dv = (by_heads(draw(80, 2, 32)) for _ in range(4))
    lse, slopes = draw(4, 96, dtype=torch.float32), draw(3, 4, dtype=torch.float32)
    begins = Packed(*(draw(4, dtype=torch.int32) for _ in range(2)))
    scores, score_grads = (
        Scores(alibi_slopes=x) for x in (slopes, draw(*slopes.shape, dtype=torch.float32))
    )
    launch_backward(
        dout, None, q, k, v, out, lse, AttentionOptions(Mask(), 0.5, scores), dq, dk, dv, score_grads,
        config=BackwardConfig(TILE, TILE), packed=begins,
    )  # fmt: skip


def append() -> None:
    k_cache, v_cache = draw(2, 2, 64, 32), draw(2, 2, 64, 32)
    launch_append(
        Append(k_cache, v_cache, None, draw(2, 2, 1, 32), draw(2, 2, 1, 32), draw(2, dtype=torch.int32))
    )  # fmt: skip


def merge() -> None:
    outs, lses = draw(3, 2, 4, 5, 32), draw(3, 2, 4, 5, dtype=torch.float32)
    launch_merge(outs, lses, draw(2, 4, 5, 32), draw(2, 4, 5, dtype=torch.float32))


def rotation() -> None:
    q, k, q_out, k_out = (draw(1, 6, heads, 32) for heads in (4, 2, 4, 2))
    cos, sin = (draw(1, 1, 6, 16, dtype=torch.float32) for _ in range(2))
    launch_norm_rotate(q, k, q_out, k_out, cos, sin, draw(32), draw(32), 1e-6)


def stored_rotation(stored: torch.dtype | None = None) -> None:
    q, q_out, k, v = (draw(1, 6, heads, 32) for heads in (4, 4, 2, 2))
    k_cache, v_cache = (draw(5, 2, 4, 32, dtype=stored or k.dtype) for _ in range(2))
    cos, sin = (draw(1, 1, 6, 16, dtype=torch.float32) for _ in range(2))
    pages, slots = (draw(6, dtype=torch.int32) for _ in range(2))
    scales = (draw(5, 2, 4, dtype=torch.float32) if stored else None for _ in range(2))
    to = KVSlots(k_cache, v_cache, pages, slots, *scales)
    launch_norm_rotate(q, k, q_out, None, cos, sin, None, None, 0.0, v, to)


def dequantised() -> None:
    k_cache, v_cache = (draw(5, 2, 4, 32, dtype=torch.float8_e4m3fn) for _ in range(2))
    k_scale, v_scale = (draw(5, 2, 4, dtype=torch.float32) for _ in range(2))
    pages, k, v = draw(3, dtype=torch.int32), draw(3, 4, 2, 32), draw(3, 4, 2, 32)
    launch_dequantise_pages(k_cache, v_cache, k_scale, v_scale, pages, k, v)


def block_sums() -> None:
    largest, sums = (draw(3, 25, dtype=torch.float32) for _ in range(2))
    at = draw(3, 25, dtype=torch.int64)
    launch_block_sums(draw(3, 50000), draw(3, dtype=torch.float32), largest, at, sums)


CALLS = {
    "forward": lambda: forward("plain"), "forward, features": lambda: forward("features"), "pages": pages,
    "backward": lambda: backward("plain"), "backward, gradients": lambda: backward("gradients"),
    "packed backward": packed_backward, "append": append, "merge": merge, "rotation": rotation,
    "stored rotation": stored_rotation, "stored rotation, int8": lambda: stored_rotation(torch.int8),
    "stored rotation, e4m3": lambda: stored_rotation(torch.float8_e4m3fn), "dequantised": dequantised, "block sums": block_sums,
}  # fmt: skip
