"""How many kernels the shapes of a server compile: batches and buffers must not each have their own."""

import itertools
import os

import pytest
import torch
from triton.compiler import make_backend
from triton.runtime.jit import create_function_from_signature

if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("compiles kernels, which the interpreter replaces", allow_module_level=True)

from tests.compile_only.launches import recorded
from tests.compile_only.targets import ARCHS
from torch_fdattn.ops.attention.backward import launch_backward
from torch_fdattn.ops.attention.configs import backward_config, forward_config
from torch_fdattn.ops.attention.forward import launch_forward
from torch_fdattn.ops.decode.configs import static_row_stride
from torch_fdattn.ops.decode.inputs import Cache, DecodeCall
from torch_fdattn.ops.decode.launch import launch_decode
from torch_fdattn.ops.mask_strides import mask_strides, of_vectors
from torch_fdattn.ops.options import AttentionOptions, DecodeOptions
from torch_fdattn.ops.packed import Packed, by_heads
from torch_fdattn.ops.positions import Mask
from torch_fdattn.ops.row_ranges import empty_ranges
from torch_fdattn.ops.scores import NO_SCORES, Scores

ARCH = ARCHS["sm_90"]


def meta(*shape, dtype=torch.bfloat16):
    return torch.empty(shape, dtype=dtype, device="meta")


def specialisations(launches) -> dict[str, set[str]]:
    """What Triton keeps the kernels of these launches under, by kernel."""
    found, backend = {}, make_backend(ARCH.target)
    for launch in launches:
        kernel = launch.kernel
        binder = create_function_from_signature(kernel.signature, kernel.params, backend)
        _, specialization, options = binder(*launch.args, **launch.kwargs)
        found.setdefault(kernel.__name__, set()).add(str((specialization, options)))
    return found


def kernels(caches, masks=()) -> set[str]:
    """What Triton keeps the compiled decode kernels of these caches (B, H_kv, N, D) under; masks: each cache's."""
    with recorded() as launches:
        for cache, mask in itertools.zip_longest(caches, masks):
            batch = cache.shape[0]
            q, lens = meta(batch, 4, 1, 128), meta(batch, dtype=torch.int32)
            options = DecodeOptions(Mask(lens), 0.1, Scores(attn_mask=mask))
            call = DecodeCall(q, Cache(cache, cache), options)
            out, lse = torch.empty_like(q), meta(batch, 4, 1)
            launch_decode(call, out, lse, capability=ARCH.capability)
    return specialisations(launches)["_decode_kernel"]


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
    config = forward_config(128, torch.bfloat16, ARCH.capability)
    with recorded() as launches:
        for tokens, sequences, paged in itertools.product(
            (1, 17, 512, 8191), (1, 2, 16, 33), (False, True)
        ):
            q, begins = meta(tokens, 4, 128), meta(sequences + 1, dtype=torch.int32)
            k, packed = by_heads(meta(tokens, 2, 128)), Packed(begins, begins.clone())
            if paged:
                k = meta(sequences * 3, 2, 16, 128)
                packed = Packed(begins, None, meta(sequences, tokens, dtype=torch.int32))
            launch_forward(
                by_heads(q), k, k, AttentionOptions(Mask(window_right=0), 0.1), by_heads(torch.empty_like(q)),
                meta(4, tokens), config=config, packed=packed,
            )  # fmt: skip
    assert len(specialisations(launches)["_attention_forward_kernel"]) <= 8


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
        assert static_row_stride(cache) == row


def attention_launches(q, k, scores=NO_SCORES, score_grads=NO_SCORES):
    """Those of a causal call, its kernels' forward ones and its backward ones."""
    out, lse = torch.empty_like(q), meta(*q.shape[:3], dtype=torch.float32)
    grads = [torch.empty_like(x) for x in (q, k, k)]
    options = AttentionOptions(Mask(window_right=0), 0.1, scores)
    forward = forward_config(128, torch.bfloat16, ARCH.capability, scores=scores)
    backward = backward_config(128, torch.bfloat16, ARCH.capability, scores)
    ranges = empty_ranges(scores.attn_mask, q, k)
    with recorded() as of_forward:
        launch_forward(q, k, k, options, out, lse, config=forward, ranges=ranges)
    with recorded() as of_backward:
        launch_backward(
            out, None, q, k, k, out, lse, options, *grads, score_grads, config=backward, ranges=ranges
        )  # fmt: skip
    return of_forward, of_backward


def test_attention():
    """Lengths, batches, heads and slices of any width, forward and backward: few kernels each."""
    calls = [
        *((meta(2, 4, n, 128), meta(2, 2, n, 128)) for n in (*range(1, 130), 1000, 4096)),
        *((meta(512, b, 4, 128).permute(1, 2, 0, 3), meta(512, b, 2, 128).permute(1, 2, 0, 3)) for b in range(1, 40)),
        *((meta(2, 512, h, 128).transpose(1, 2),) * 2 for h in range(1, 40)),
        *((meta(2, 4, 512, w)[..., :128], meta(2, 2, 512, w + 5)[..., :128]) for w in range(129, 400, 7)),
    ]  # fmt: skip
    found = specialisations(x for call in calls for part in attention_launches(*call) for x in part)
    assert len(found) == 4
    assert sum(map(len, found.values())) <= 64


#: Which of batch, heads, queries and keys a mask has of its own.
BROADCASTS = tuple(itertools.product((False, True), repeat=4))
#: What Triton tells apart are 1, multiples of 16 and the others.
MASK_LENGTHS = 1, 2, 3, 7, 8, 15, 16, 17, 31, 32, 33, 100, 1000, 1024, 4096
MASK_DTYPES = torch.bool, torch.bfloat16, torch.float32


def masks_of(sizes, dtype):
    for own in BROADCASTS:
        yield meta(*(size if x else 1 for size, x in zip(sizes, own, strict=True)), dtype=dtype)


@pytest.mark.slow
def test_masks():
    """Of causal calls over one length: every way to broadcast a mask of every dtype, its gradient too.

    Any numbers of heads share them, where there are fewer of keys than of queries; equal ones have dK's and dV's sweep
    of their own.
    """
    parts = [], []
    sizes = [(n, 4, 2) for n in MASK_LENGTHS]
    sizes += [(n, *heads) for n in (1, 16, 17, 128) for heads in ((16, 1), (32, 8))]
    for (n, heads, kv_heads), dtype in itertools.product(sizes, MASK_DTYPES):
        q, k = meta(2, heads, n, 128), meta(2, kv_heads, n, 128)
        for mask in masks_of((2, heads, n, n), dtype):
            wanted = None if dtype == torch.bool else torch.empty_like(mask)
            made = attention_launches(q, k, Scores(attn_mask=mask), Scores(attn_mask=wanted))
            for part, more in zip(parts, made, strict=True):
                part.extend(more)
    forward, backward = map(specialisations, parts)
    assert {"_attention_forward_kernel", "_row_ranges_kernel"} == set(forward)
    assert {"_row_terms_kernel", "_dkdv_kernel", "_dq_kernel", "_dmask_kernel"} < set(backward)
    assert sum(map(len, forward.values())) <= 64
    assert sum(map(len, backward.values())) <= 64


def test_masks_of_decode():
    """The same of one query."""
    calls = [
        (meta(2, 2, n, 128), mask)
        for n, dtype in itertools.product(MASK_LENGTHS, MASK_DTYPES)
        for mask in masks_of((2, 4, 1, n), dtype)
    ]
    assert len(kernels(*zip(*calls, strict=True))) <= 64


def test_whole_vectors():
    """What kernels may read by vectors begins at multiples of 16 everywhere."""
    assert of_vectors(mask_strides(meta(2, 4, 64, 32)))
    assert of_vectors(mask_strides(meta(1, 1, 1, 32).expand(2, 4, 64, 32)))
    for other in (
        meta(2, 4, 64, 40), meta(2, 4, 64, 40)[..., :32], meta(2, 4, 64, 32)[..., :31], meta(2, 4, 64, 64)[..., ::2],
        meta(2, 4, 64, 1).expand(-1, -1, -1, 32), torch.empty(8, 4, 32, 33).flatten()[1:].as_strided((1, 4, 8, 32), (1024, 256, 32, 1)),
    ):  # fmt: skip
        assert not of_vectors(mask_strides(other))
