"""How many kernels the shapes of a server compile: batches and buffers must not each have their own."""

import itertools
import os

import pytest
import torch
from triton.compiler import make_backend
from triton.runtime.jit import create_function_from_signature

if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("compiles kernels, which the interpreter replaces", allow_module_level=True)

from benchmarks.resources.launches import recorded
from benchmarks.resources.targets import ARCHS
from torch_fdattn.ops.attention.backward import launch_backward
from torch_fdattn.ops.attention.configs import backward_config, forward_config
from torch_fdattn.ops.attention.forward import launch_forward
from torch_fdattn.ops.decode.launch import Cache, known_row, launch_decode
from torch_fdattn.ops.packed import Packed, by_heads
from torch_fdattn.ops.positions import Mask

ARCH = ARCHS["sm_90"]


def meta(*shape, dtype=torch.bfloat16):
    return torch.empty(shape, dtype=dtype, device="meta")


def kernels(caches) -> set[str]:
    """What Triton keeps the compiled decode kernels of these caches (B, H_kv, N, D) under."""
    found, backend = set(), make_backend(ARCH.target)
    for cache in caches:
        batch = cache.shape[0]
        q, lens = meta(batch, 4, 1, 128), meta(batch, dtype=torch.int32)
        with recorded() as launches:
            launch_decode(
                q, Cache(cache, cache), Mask(lens), 0.1, torch.empty_like(q), meta(batch, 4, 1),
                capability=ARCH.capability,
            )  # fmt: skip
        kernel, args, options = launches[0].kernel, launches[0].args, launches[0].kwargs
        binder = create_function_from_signature(kernel.signature, kernel.params, backend)
        _, specialization, options = binder(*args, **options)
        found.add(str((specialization, options)))
    return found


def test_sequences_first():
    """(N, B, H, D): the stride of keys follows from the batch."""
    batches = range(2, 260)
    first = kernels(meta(2048, batch, 2, 128).permute(1, 2, 0, 3) for batch in batches)
    assert len(first) <= 64
    # And no more than the batches have where keys lie in the order of a known layout.
    known = kernels(meta(batch, 2, 2048, 128) for batch in batches)
    assert len(first) <= len(known) + 4


def test_packed_sequences():
    """Tokens, sequences and pages are numbers of a launch: one kernel serves them all, a few by alignment."""
    found, backend = set(), make_backend(ARCH.target)
    config = forward_config(128, torch.bfloat16, ARCH.capability)
    for tokens, sequences, paged in itertools.product(
        (1, 17, 512, 8191), (1, 2, 16, 33), (False, True)
    ):
        q, begins = meta(tokens, 4, 128), meta(sequences + 1, dtype=torch.int32)
        k, packed = by_heads(meta(tokens, 2, 128)), Packed(begins, begins.clone())
        if paged:
            k = meta(sequences * 3, 2, 16, 128)
            packed = Packed(begins, None, meta(sequences, tokens, dtype=torch.int32))
        with recorded() as launches:
            launch_forward(
                by_heads(q), k, k, Mask(window_right=0), 0.1, by_heads(torch.empty_like(q)), meta(4, tokens),
                config=config, packed=packed,
            )  # fmt: skip
        kernel, args, options = launches[0].kernel, launches[0].args, launches[0].kwargs
        binder = create_function_from_signature(kernel.signature, kernel.params, backend)
        _, specialization, options = binder(*args, **options)
        found.add(str((specialization, options)))
    assert len(found) <= 8


def test_slices_of_any_width():
    """Rows between others: every buffer has a stride of its own."""
    widths = range(136, 1160, 8)
    assert len(kernels(meta(3, 2, 2048, width)[..., :128] for width in widths)) <= 64


def test_known_rows_are_the_compilers():
    for cache, row in (
        (meta(3, 2, 64, 128), 128), (meta(3, 64, 2, 128).transpose(1, 2), 256),
        (meta(2, 3, 64, 2, 128)[1].transpose(1, 2), 256), (meta(3, 2, 99, 128)[:, :, 3:64], 128),
        (meta(64, 3, 2, 128).permute(1, 2, 0, 3), 0), (meta(3, 2, 64, 136)[..., :128], 0),
    ):  # fmt: skip
        assert known_row(cache) == row


def test_attention():
    """Lengths, batches, heads and slices of any width, forward and backward: few kernels each."""
    found, backend = {}, make_backend(ARCH.target)
    forward, backward = (
        config(128, torch.bfloat16, ARCH.capability) for config in (forward_config, backward_config)
    )
    calls = [
        *((meta(2, 4, n, 128), meta(2, 2, n, 128)) for n in (*range(1, 130), 1000, 4096)),
        *((meta(512, b, 4, 128).permute(1, 2, 0, 3), meta(512, b, 2, 128).permute(1, 2, 0, 3)) for b in range(1, 40)),
        *((meta(2, 512, h, 128).transpose(1, 2),) * 2 for h in range(1, 40)),
        *((meta(2, 4, 512, w)[..., :128], meta(2, 2, 512, w + 5)[..., :128]) for w in range(129, 400, 7)),
    ]  # fmt: skip
    for q, k in calls:
        out, lse = torch.empty_like(q), meta(*q.shape[:3], dtype=torch.float32)
        grads, mask = [torch.empty_like(x) for x in (q, k, k)], Mask(window_right=0)
        with recorded() as launches:
            launch_forward(q, k, k, mask, 0.1, out, lse, config=forward)
            launch_backward(out, None, q, k, k, out, lse, mask, 0.1, *grads, config=backward)
        for launch in launches:
            kernel = launch.kernel
            binder = create_function_from_signature(kernel.signature, kernel.params, backend)
            _, specialization, options = binder(*launch.args, **launch.kwargs)
            found.setdefault(kernel.__name__, set()).add(str((specialization, options)))
    assert len(found) == 4
    assert sum(map(len, found.values())) <= 64
