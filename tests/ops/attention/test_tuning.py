"""Tiles by hand: right results whatever they are, and nothing of them stays."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest
import torch

import torch_fdattn
from tests.ops.attention.tile_cases import Watched, small
from torch_fdattn.ops.attention import backward, forward, tuning
from torch_fdattn.ops.attention.candidates import CANDIDATES, FP32, candidates, parse_configs
from torch_fdattn.ops.library import launches
from torch_fdattn.ops.options import AttentionOptions
from torch_fdattn.ops.positions import Mask
from torch_fdattn.testing import FeatureCase, expected_attention

CASE = FeatureCase(
    3, 2, 2, 1, 140, 150, 16, torch.float16, 16, causal=True, window=(100, -1), kv_lens=(150, 131),
    softcap=5.0,
)  # fmt: skip


#: The distinct sides of all candidates of a kernel; warps and stages are nothing to the interpreter.
SIDES = {
    kernel: sorted({(x.block_m, x.block_n) for text in (*texts.values(), FP32) for x in parse_configs(text)})
    for kernel, texts in CANDIDATES.items()
}  # fmt: skip


QUICK = {"forward": (128, 64), "dkdv": (32, 128), "dq": (128, 64)}


def run(case, device, grad=True):
    inputs = [x.requires_grad_(grad) for x in case.inputs(device)]
    given = {n: x.requires_grad_(grad) for n, x in case.parameters(device).items()}
    out, lse = torch_fdattn.attention(*inputs, **case.options(device), **given)
    if not grad:
        return lse, {"out": out}
    leaves = [*inputs, *given.values()]
    found = torch.autograd.grad([out, lse], leaves, case.output_gradients(device))
    names = ("dq", "dk", "dv", *(f"d{name}" for name in given))
    return lse, {"out": out, **dict(zip(names, found, strict=True))}


@pytest.fixture(scope="module")
def expected():
    return expected_attention(CASE, "cuda" if torch.cuda.is_available() else "cpu")


def tile_cases():
    for kernel, sides in SIDES.items():
        for side in sides:
            marks = () if side == QUICK[kernel] else pytest.mark.slow
            yield pytest.param(kernel, *side, marks=marks, id=f"{kernel}-{side[0]}x{side[1]}")


def test_short_windows_are_searched_by_themselves() -> None:
    """Their tiles differ in the table, too; windows that hide nothing are not short."""
    q = torch.empty(1, 2, 8192, 128, device="meta")
    masks = [Mask(window_left=left, window_right=0) for left in (255, 1023, 4095, 8191)]
    names = [str(tuning.TuningCase(q, q, q, AttentionOptions(mask))) for mask in masks]
    assert names[0] == names[1] != names[2] == names[3]
    short = torch.empty(1, 2, 1024, 128, device="meta")
    assert "short" not in str(tuning.TuningCase(short, short, short, AttentionOptions(masks[1])))


@pytest.mark.interpreter
@pytest.mark.parametrize(("kernel", "block_m", "block_n"), list(tile_cases()))
def test_every_candidate_is_right(kernel, block_m, block_n, kernel_device, expected) -> None:
    launched = forward if kernel == "forward" else backward
    name = {"forward": "_attention_forward_kernel"}.get(kernel, f"_{kernel}_kernel")
    real = getattr(launched, name)
    others = torch_fdattn.tiles(
        block_m=64, block_n=64
    )  # few tiles: the interpreter takes long for each
    with (
        others,
        torch_fdattn.tiles(kernel, block_m=block_m, block_n=block_n),
        Watched(real) as seen,
    ):
        lse, results = run(CASE, kernel_device, kernel != "forward")
    assert seen.sides == {(block_m, block_n)}
    expected.check(lse, **results)


@pytest.mark.interpreter
def test_the_innermost_decides_and_nothing_stays(kernel_device) -> None:
    inputs = small(kernel_device)
    kernel = forward._attention_forward_kernel
    with Watched(kernel) as table:
        torch_fdattn.attention(*inputs)
    outer, middle = (
        torch_fdattn.tiles(block_n=64),
        torch_fdattn.tiles("forward", block_n=32, block_m=32),
    )
    with outer, middle, torch_fdattn.tiles("dq", block_n=128), Watched(kernel) as inner:
        torch_fdattn.attention(*inputs)
    assert inner.sides == {(32, 32)}
    assert not tuning.state.active
    with Watched(kernel) as after:
        torch_fdattn.attention(*inputs)
    assert after.sides == table.sides


@pytest.mark.interpreter
def test_every_thread_sees_them(kernel_device) -> None:
    """As autograd's, in which backwards on GPUs run."""
    inputs, seen = small(kernel_device), Watched(forward._attention_forward_kernel)
    with torch_fdattn.tiles(block_m=64), seen:
        thread = threading.Thread(target=lambda: torch_fdattn.attention(*inputs))
        thread.start()
        thread.join()
    assert {m for m, _ in seen.sides} == {64}


@pytest.mark.interpreter
def test_compiled_graphs_follow_them(kernel_device) -> None:
    inputs = small(kernel_device, requires_grad=True)
    compiled = torch.compile(lambda *x: torch_fdattn.attention(*x)[0].float().sum(), backend="aot_eager")  # fmt: skip
    compiled(*inputs).backward()
    with torch_fdattn.tiles(block_m=64), Watched(backward._dq_kernel) as seen:
        compiled(*inputs).backward()
    assert {m for m, _ in seen.sides} == {64}


def test_not_inside_of_what_is_traced() -> None:
    def inside(x):
        with torch_fdattn.tiles(block_m=64):
            return x + 1

    def switched_on(x):
        torch_fdattn.autotune()
        return x + 1

    for function in (inside, switched_on):
        with pytest.raises(Exception, match=r"must be opened outside of what torch.compile traces"):
            torch.compile(function, backend="eager", fullgraph=True)(torch.ones(2))
    assert not tuning.state.active


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(block_m=48), r"block_m must be a power of two from 16 to 128, got 48"),
        (dict(block_n=256), r"block_n must be a power of two from 16 to 128, got 256"),
        (dict(block_n=64.0), r"block_n must be a power of two from 16 to 128, got 64.0"),
        (dict(num_warps=3), r"num_warps must be a power of two from 1 to 16, got 3"),
        (dict(num_stages=0), r"num_stages must be an int from 1 to 8, got 0"),
        (dict(num_stages=True), r"num_stages must be an int from 1 to 8, got True"),
        (dict(kernel="decode"), r"kernel must be one of forward, dkdv, dq, dmask or None, got 'decode'"),
    ],
)  # fmt: skip
def test_wrong_sizes_are_named(arguments, message) -> None:
    with pytest.raises(ValueError, match=message), torch_fdattn.tiles(**arguments):
        pass
    assert not tuning.state.active


def test_candidates_are_possible() -> None:
    for kernel in CANDIDATES:
        for dim in (16, 64, 72, 128, 256, 512):
            for dtype in (torch.bfloat16, torch.float32):
                found = candidates(kernel, dim, dtype)
                assert found == [x.checked() for x in found]
                assert len(set(found)) == len(found) >= 4
    assert not candidates("dmask", 64, torch.bfloat16)


def test_a_plain_call_knows_nothing_of_it() -> None:
    code = "import torch_fdattn; from torch_fdattn.ops.attention.tuning import state; print(state.active)"  # fmt: skip
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
    assert "autotune" not in "".join(launches)
