"""How many of our files a reader passes from the backend's entry to the place where a node is emitted."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import torch_fdattn
from tests.compile_backend.harness import qkv
from torch_fdattn.compile_backend import fdattn

PACKAGE = str(Path(torch_fdattn.__file__).parent)
MAX_FILES = 6


@contextmanager
def emissions() -> Iterator[list[tuple[str, list[str]]]]:
    """(target, our files on the stack of Python calls) of each node that is created meanwhile."""
    nodes = []

    def profile(frame, event, _) -> None:
        if event == "call" and frame.f_code is torch.fx.Graph.create_node.__code__:
            nodes.append((str(frame.f_locals["target"]), own_files(frame)))

    sys.setprofile(profile)
    try:
        yield nodes
    finally:
        sys.setprofile(None)


def own_files(frame) -> list[str]:
    """From the entry to the frame, each once."""
    files: dict[str, None] = {}
    while frame is not None:
        if (name := frame.f_code.co_filename).startswith(PACKAGE):
            files[name.removeprefix(PACKAGE)] = None
        frame = frame.f_back
    return [*files][::-1]


def sdpa(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def unfused(q, k, v, hide=None, bias=None, fill=-math.inf):
    scores = q @ k.transpose(-1, -2) * 0.25
    if bias is not None:
        scores = scores + bias
    if hide is not None:
        scores = scores.masked_fill(hide, fill)
    return scores.softmax(-1) @ v


def padded(q, k, v, hide):
    """Padding and causal: a mask that is made anew from what it was made of."""
    i = torch.arange(q.shape[2])
    return unfused(q, k, v, hide[:, None, None, :] | (i[None] > i[:, None]))


def nan_rows(q, k, v, bias, hide):
    """Learned, and added before a fill: rows of NaN, whose gradients need the masks."""
    return unfused(q, k, v, hide, bias)


def chunked(q, k, v):
    i = torch.arange(q.shape[2]) // 4
    return F.scaled_dot_product_attention(q, k, v, attn_mask=i[None] == i[:, None])


def alibi(q, k, v, slopes):
    i = torch.arange(q.shape[2])
    return unfused(q, k, v, bias=slopes[:, None, None] * (i[None] - i[:, None]).abs() * -1.0)


HIDE = torch.arange(8) < torch.tensor([[3], [0]])
CASES = {
    "sdpa": (sdpa, ()),
    "unfused": (unfused, ()),
    "mask": (unfused, (HIDE[:, None, None],)),
    "padded": (padded, (HIDE,)),
    "mean of values": (lambda *x: unfused(*x, fill=-1e38), (HIDE[:, None, None],)),
    "NaN": (nan_rows, (torch.randn(8, 8, requires_grad=True), HIDE[:, None, None] | True)),
    "float mask": (lambda *x: unfused(*x[:3], bias=x[3]), (torch.randn(2, 1, 8, 8),)),
    "chunks": (chunked, ()),
    "alibi": (alibi, (torch.rand(4),)),
}


@pytest.mark.parametrize("name", CASES)
def test_few_files_lead_to_each_emitted_node(name):
    fn, masks = CASES[name]
    nodes = []

    def backend(gm, inputs):
        with emissions() as emitted:
            compiled = fdattn(gm, inputs, options={"lower": "eager", "require_all": True})
        nodes.extend(emitted)
        return compiled

    torch._dynamo.reset()
    torch.compile(fn, backend=backend, fullgraph=True)(*qkv(), *masks)
    check(nodes)
    assert any("/emit/mask_" in files[-2] for _, files in nodes) == bool(masks), nodes


def test_as_few_lead_there_from_explain():
    with emissions() as nodes:
        torch_fdattn.explain(padded)(*qkv(), HIDE)
    check(nodes)


def check(nodes: list[tuple[str, list[str]]]) -> None:
    """That an op was emitted, and no node from deeper."""
    assert any(target.startswith("fdattn.") for target, _ in nodes), "no op was emitted"
    deepest = max((files for _, files in nodes), key=len)
    assert len(deepest) <= MAX_FILES, deepest
