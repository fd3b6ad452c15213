"""The dispatch table: it fits every call, is what runs, and is what docs/attention.md shows.

EXPECTTEST_ACCEPT=1 pytest tests/ops/attention/test_dispatch.py rewrites the page's tables.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch

import torch_fdattn
from torch_fdattn.launch import prepared
from torch_fdattn.ops import determinism
from torch_fdattn.ops.attention import configs, derivative_op, dispatch, hopper
from torch_fdattn.ops.attention.dispatch import FEATURES, GPUS, TABLE, Row
from torch_fdattn.ops.attention.dropout import NO_DROPOUT, Dropout
from torch_fdattn.ops.library import INTERPRET, launches
from torch_fdattn.ops.options import AttentionOptions
from torch_fdattn.ops.packed import Packed
from torch_fdattn.ops.positions import Mask
from torch_fdattn.ops.scores import NO_SCORES, Scores
from torch_fdattn.testing import make_tensor

PAGE = Path(__file__).parents[3] / "docs" / "attention.md"
_MARKED = re.compile(r"(<!-- dispatch -->\n).*?(<!-- end of dispatch -->)", re.DOTALL)
CAPABILITIES = {"sm_80": (8, 0), "sm_90": (9, 0), "sm_100": (10, 0), "AMD": (0, 0)}
ANY = torch.empty(1)
#: How calls differ in their tiles: (borders, scores, dropout, short window) by name.
KINDS = {
    "full": (False, NO_SCORES, NO_DROPOUT, False),
    "masked": (True, NO_SCORES, NO_DROPOUT, False),
    "softcap, ALiBi": (True, Scores(30.0), NO_DROPOUT, False),
    "sinks": (True, Scores(sinks=ANY), NO_DROPOUT, False),
    "window ≤ 2048": (True, NO_SCORES, NO_DROPOUT, True),
    "window ≤ 2048 with softcap, ALiBi": (True, Scores(30.0), NO_DROPOUT, True),
    "explicit mask": (True, Scores(attn_mask=ANY), NO_DROPOUT, False),
    "dropout": (True, NO_SCORES, Dropout(0.1, ANY), False),
}


def table(head: str, rows: list[list[object]]) -> str:
    columns = head.split(" | ")
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def kernels() -> str:
    rows = []
    for row in TABLE:
        dtypes = ", ".join(str(x).removeprefix("torch.") for x in row.dtypes)
        features = "all" if row.features == FEATURES else ", ".join(sorted(row.features))
        hardware = ", ".join(sorted(row.hardware))
        rows.append([" + ".join(row.directions), hardware, dtypes, f"≤ {row.head_dim}", features, f"`{row.kernel}`", row.note])  # fmt: skip
    return table("way | hardware | dtypes | head dims | features | kernel | note", rows)


def tile_rows() -> str:
    """Neighbouring head dims and kinds with the same tiles stand in one row."""
    rows = []
    for hardware, capability in CAPABILITIES.items():
        for dtype, dim in itertools.product((torch.bfloat16, torch.float32), (64, 128, 256, 512)):
            by_tiles: dict[tuple[object, ...], list[str]] = {}
            for kind, (borders, *modified) in KINDS.items():
                forward = configs.forward_config(dim, dtype, capability, borders, *modified)
                backward = configs.backward_config(dim, dtype, capability, *modified)
                tiles = (forward, backward.dkdv, backward.dq)
                by_tiles.setdefault(tiles, []).append(kind)
            for tiles, kinds in by_tiles.items():
                said = "all" if len(kinds) == len(KINDS) else "; ".join(kinds)
                rows.append([hardware, "16 bits" if dtype.itemsize == 2 else "fp32", f"≤ {dim}", said, *tiles])  # fmt: skip
    return table("hardware | dtypes | head dims | calls | forward | dK, dV | dQ", rows)


def shown() -> str:
    return (
        f"{kernels()}\n\nTiles: queries x keys, w warps, s stages of the pipeline.\n\n"
        f"{tile_rows()}\n"
    )


@pytest.mark.parametrize(
    ("left", "right", "keys", "short"),
    [
        (1023, 0, 8192, True), (2047, 0, 2049, True), (1023, 1024, 8192, True), (0, 0, 2, True),
        (2047, 0, 2048, False), (2048, 0, 8192, False), (1024, 1024, 8192, False),
        (-1, 0, 8192, False), (511, -1, 8192, False), (-1, -1, 8192, False), (0, 0, 1, False), (0, 0, 0, False),
    ],
)  # fmt: skip
def test_short_windows(left: int, right: int, keys: int, short: bool) -> None:
    """Those that bound both sides and hide some keys."""
    assert configs.is_short_window(Mask(window_left=left, window_right=right), keys) is short


@pytest.mark.skipif(INTERPRET, reason="compiles kernels, which the interpreter replaces")
def test_the_page_shows_the_table() -> None:
    text = PAGE.read_text(encoding="utf-8")
    new = _MARKED.sub(lambda found: f"{found[1]}{shown()}{found[2]}", text)
    if os.environ.get("EXPECTTEST_ACCEPT") == "1":
        PAGE.write_text(new, encoding="utf-8")
    assert text == new, "EXPECTTEST_ACCEPT=1 pytest tests/ops/attention/test_dispatch.py"


def test_every_call_has_a_row_that_does_everything() -> None:
    for way, dim in itertools.product(("forward", "backward"), (16, 256, 512)):
        for hardware in (*GPUS, "CPU", "interpreter"):
            for dtype in (torch.bfloat16, torch.float16, torch.float32):
                rows = dispatch._rows(way, hardware, dtype, dim)
                assert rows
                assert rows[-1].features == FEATURES


@pytest.mark.interpreter
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_what_is_chosen_is_what_runs(dtype, device) -> None:
    if device == "cuda" and dtype == torch.float64:
        pytest.skip("float64 runs on the CPU only")
    q, k, v = (make_tensor((1, 2, 20, 16), dtype=dtype, device=device).requires_grad_() for _ in range(3))  # fmt: skip
    kernel = dispatch.choose("forward", q, q, v, AttentionOptions())
    assert kernel == ("triton" if device == "cuda" or (INTERPRET and dtype != torch.float64) else "cpu")  # fmt: skip
    launches.clear()
    torch_fdattn.attention(q, k, v)[0].sum().backward()
    assert dict(launches) == {f"attention_{way}/{kernel}": 1 for way in ("forward", "backward")}


def test_a_kernel_that_can_do_less_is_taken_where_it_can() -> None:
    """What a new row above the portable ones does."""
    q = torch.empty(1, 1, 4, 16)
    some = Row("special", ("forward",), frozenset(("CPU", "interpreter")), (torch.float32,), 64, frozenset(("causal", "lengths")), "")  # fmt: skip
    plain = dispatch.choose("forward", q, q, q, AttentionOptions())
    dispatch._rows.cache_clear()
    try:
        with mock.patch.object(dispatch, "TABLE", (some, *TABLE)):

            def chosen(way="forward", v=q, mask=None, scores=NO_SCORES, dropout=NO_DROPOUT):
                options = AttentionOptions(mask or Mask(), 1.0, scores, dropout)
                return dispatch.choose(way, q, q, v, options)

            assert chosen() == chosen(mask=Mask(window_right=0)) == "special"
            assert chosen(mask=Mask(window_left=3)) == chosen("backward") == plain
            assert chosen(v=torch.empty(1, 1, 4, 128)) == plain
            assert chosen(scores=Scores(softcap=5.0)) == plain
            assert chosen(dropout=Dropout(0.1, ANY)) == plain
    finally:
        dispatch._rows.cache_clear()


def test_a_triton_without_what_hopper_needs_gives_the_portable_kernels(monkeypatch) -> None:
    q = make_tensor((1, 2, 200, 128), "bhsd", dtype=torch.bfloat16, device="cpu", generator=torch.Generator())  # fmt: skip
    monkeypatch.setattr(dispatch.library, "use_triton", lambda q: True)
    monkeypatch.setattr(dispatch, "_rows", lambda direction, *_: tuple(x for x in TABLE if "sm_90" in x.hardware and direction in x.directions))  # fmt: skip
    options = AttentionOptions(Mask(), 0.1)
    for has, kernel in ((True, "hopper"), (False, "triton")):
        hopper.is_importable.cache_clear()
        if not has:
            # As a name that Gluon has no more.
            monkeypatch.setitem(sys.modules, "torch_fdattn.ops.attention.hopper.fp8", None)
        with contextlib.nullcontext() if has else pytest.warns(UserWarning, match=r"need triton 3\.6 or 3\.7"):  # fmt: skip
            for direction in ("forward", "backward"):
                assert dispatch.choose(direction, q, q, q, options) == kernel
    hopper.is_importable.cache_clear()


def only_warn(enabled: bool) -> None:
    torch.use_deterministic_algorithms(enabled, warn_only=enabled)


@pytest.mark.parametrize("ask", [None, torch.use_deterministic_algorithms, only_warn, torch_fdattn.set_deterministic])  # fmt: skip
def test_deterministic_backwards_have_no_sums_on_hopper(ask, monkeypatch) -> None:
    """Which take any order; the kernels are Hopper's either way."""
    q = make_tensor((2, 4, 200, 128), "bhsd", dtype=torch.bfloat16, device="cpu", generator=torch.Generator())  # fmt: skip
    monkeypatch.setattr(dispatch.library, "use_triton", lambda q: True)
    monkeypatch.setattr(dispatch, "_rows", lambda *_: tuple(x for x in TABLE if "sm_90" in x.hardware and "backward" in x.directions))  # fmt: skip
    prepared.forget()
    given = []
    monkeypatch.setattr(
        derivative_op, "state_launches", lambda *args, ranges: given.append(args) or ()
    )
    # `poisoned_empty` has turned torch's on, and hides it.
    torch.use_deterministic_algorithms(False)
    monkeypatch.setattr(determinism, "asked_of_torch", torch.are_deterministic_algorithms_enabled)
    if ask is not None:
        ask(True)
    try:
        torch.ops.fdattn.attention_backward(q, None, q, q, q, q, q[..., 0].float(), None, None, None, -1, -1, 0, 0, 0.1, None)  # fmt: skip
    finally:
        prepared.forget()
        if ask is not None:
            ask(False)
    ((call, *_, sums, _),) = given
    assert call.label == "attention_backward/hopper"
    assert (None if sums is None else sums.shape) == (None if ask else (2, 4, 256, 128))


@pytest.mark.parametrize(
    ("head_dim", "tokens", "sequences", "kernel"),
    [(128, 5000, 4, "hopper"), (160, 5000, 4, "triton"), (128, 100, 20, "hopper"), (128, 5000, 400, "triton")],
)  # fmt: skip
def test_packed_backwards(head_dim, tokens, sequences, kernel, monkeypatch) -> None:
    """Not of wide heads, and not of many short sequences, whose sums of dQ would be padding."""
    q = torch.empty(1, 4, tokens, head_dim, dtype=torch.bfloat16)
    monkeypatch.setattr(dispatch.library, "use_triton", lambda q: True)
    monkeypatch.setattr(dispatch, "_rows", lambda *_: tuple(x for x in TABLE if "sm_90" in x.hardware and "backward" in x.directions))  # fmt: skip
    packed = Packed(torch.zeros(sequences + 1, dtype=torch.int32))
    options = AttentionOptions(Mask(), 0.1)
    assert dispatch.choose("backward", q, q, q, options, packed) == kernel


@pytest.mark.parametrize(
    ("head_dim", "softcap", "is_packed", "wanted", "kernel"),
    [
        (128, 0.0, False, "sinks", "hopper"), (256, 0.0, False, "sinks", "hopper"), (64, 30.0, True, "sinks", "hopper"),
        (128, 0.0, False, "alibi_slopes", "hopper"), (256, 0.0, False, "alibi_slopes", "hopper"),
        (128, 30.0, False, "alibi_slopes", "triton"), (64, 0.0, True, "alibi_slopes", "triton"),
    ],
)  # fmt: skip
def test_gradients_of_parameters(head_dim, softcap, is_packed, wanted, kernel, monkeypatch) -> None:
    """Those that Hopper's backward gives; else the portable kernels make all of the call's."""
    q = torch.empty(1, 4, 5000, head_dim, dtype=torch.bfloat16)
    monkeypatch.setattr(dispatch.library, "use_triton", lambda q: True)
    monkeypatch.setattr(dispatch, "_rows", lambda *_: tuple(x for x in TABLE if "sm_90" in x.hardware and "backward" in x.directions))  # fmt: skip
    packed = Packed(torch.zeros(5, dtype=torch.int32)) if is_packed else None
    options = AttentionOptions(Mask(), 0.1, Scores(softcap, ANY, ANY))
    asked = derivative_op.backward_kernel(q, q, q, q, options, Scores(**{wanted: ANY}), packed)
    assert asked == kernel
    assert derivative_op.backward_kernel(q, q, q, q, options, NO_SCORES, packed) == "hopper"


def test_features() -> None:
    lens = torch.ones(1, dtype=torch.int32)
    mask, scores = Mask(lens, lens, None, 5, 0, 0, 0), Scores(1.0, ANY, ANY, ANY)
    every = AttentionOptions(mask, 1.0, scores, Dropout(0.5, ANY))
    assert dispatch.features_of(every, Packed(lens, None, lens[None])) == FEATURES
    assert dispatch.features_of(AttentionOptions(), Packed(lens)) == {"packed"}
    assert dispatch.features_of(AttentionOptions()) == frozenset()
    assert dispatch.features_of(AttentionOptions(Mask(window_right=3, kv_block=2, kv_stride=4))) == {"window", "positions"}  # fmt: skip
