"""Tiles found by timing: what is searched, kept and refused, and which of the right ones is taken."""

from __future__ import annotations

import json
from unittest import mock

import pytest
import torch

import torch_fdattn
from tests.ops.attention.tile_cases import Watched, small
from torch_fdattn.ops.attention import backward, forward, trials, tuning
from torch_fdattn.ops.attention.candidates import parse_configs
from torch_fdattn.ops.attention.configs import BackwardConfig, TileConfig
from torch_fdattn.testing import assert_launched


@pytest.fixture
def fresh(monkeypatch):
    """No memories, and a clock under which the tiles of a list are fastest, last ones most."""
    monkeypatch.setattr(tuning, "_memories", {})
    tried = []

    def clock(call, device):
        config = call.__defaults__[0] if call.__defaults__ else None
        tried.append(config)
        parts = () if config is None else trials.parts_of("forward", config).values()
        return 100.0 - 10 * sum(x in FAST for x in parts)

    monkeypatch.setattr(trials, "median_us", clock)
    monkeypatch.setattr(tuning, "candidates", lambda kernel, *_: [*FAST, TileConfig(64, 16, 1, 1)])
    yield tried
    assert not tuning.state.active


FAST = [TileConfig(32, 16, 1, 1), TileConfig(32, 32, 1, 1)]


@pytest.mark.interpreter
def test_autotune_finds_and_remembers(kernel_device, fresh, tmp_path) -> None:
    inputs, path = small(kernel_device, requires_grad=True), tmp_path / "tiles.json"
    plain, _ = torch_fdattn.attention(*inputs)
    assert not fresh
    with torch_fdattn.autotune(path=path):
        out, _ = torch_fdattn.attention(*inputs)
        assert len(fresh) == 4  # the table's and three candidates
        torch.testing.assert_close(
            out, plain, rtol=2e-3, atol=1e-3
        )  # another tile rounds otherwise
        out.float().sum().backward()
        assert len(fresh) == 4 + 7  # the backward's table, three for each sweep
        with Watched(forward._attention_forward_kernel) as seen:
            again, _ = torch_fdattn.attention(*inputs)
        assert seen.sides == {(32, 16)}
        assert len(fresh) == 11
        assert torch.equal(again, out)
        torch_fdattn.attention(*small(kernel_device), causal=True)  # another kind of call
        assert len(fresh) == 15
    with Watched(forward._attention_forward_kernel) as seen:
        torch_fdattn.attention(*inputs)
    assert seen.sides != {(32, 16)}

    (stored,) = json.loads(path.read_text())["tiles"].values()
    assert stored["forward float16 D16/16 q32 k32"] == {"forward": "32x16w1s1"}
    assert stored["forward float16 D16/16 causal q32 k32"] == {"forward": "32x16w1s1"}
    assert stored["backward float16 D16/16 q32 k32"] == {"dkdv": "32x16w1s1", "dq": "32x16w1s1"}

    # Another process: an empty memory, the same file.
    tuning._memories.clear()
    with torch_fdattn.autotune(path=path), Watched(forward._attention_forward_kernel) as seen:
        torch_fdattn.attention(*inputs)
    assert seen.sides == {(32, 16)}
    assert len(fresh) == 15


@pytest.mark.interpreter
@pytest.mark.parametrize("grad", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_autotune_of_packed_sequences(kernel_device, fresh, grad) -> None:
    """Forward and backward have kinds of their own, by tokens and sequences, not by the lengths on the device."""
    inputs = [
        x[0].transpose(0, 1).detach().requires_grad_()
        for x in small(kernel_device, dtype=torch.float32)
    ]

    def step(*begins):
        cu_seqlens = torch.tensor(begins, dtype=torch.int32, device=kernel_device)
        out, lse = torch_fdattn.varlen_attention(*inputs, cu_seqlens, causal=True)
        found = torch.autograd.grad(out.square().sum() + lse.sum(), inputs) if grad else ()
        return out, lse, *found

    trials_of_a_kind = 4 + 7 * grad  # the table's and three candidates of each kernel
    plain = step(0, 5, 24)
    ways = ("forward", "backward")[: 1 + grad]
    launched = assert_launched(*(f"varlen_attention_{way}/triton" for way in ways))
    with torch_fdattn.autotune(), launched:
        found = step(0, 5, 24)
        assert len(fresh) == trials_of_a_kind
        with (
            Watched(forward._attention_forward_kernel) as seen_forward,
            Watched(backward._dkdv_kernel) as seen_backward,
        ):
            step(0, 20, 24)
        assert len(fresh) == trials_of_a_kind
        step(0, 2, 9, 24)  # three sequences: another kind
        assert len(fresh) == 2 * trials_of_a_kind
        calls = next(iter(tuning.state.memory.tiles.values()))
    assert seen_forward.sides == {(32, 16)}
    assert seen_backward.sides == ({(32, 16)} if grad else set())
    assert "forward float32 ieee D16/16 causal q32 k32 packed2" in calls
    assert len(calls) == 2 * (1 + grad)
    for x, y in zip(found, plain, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5)


@pytest.mark.interpreter
def test_autotune_of_pages(kernel_device, fresh) -> None:
    q, k, v = small(kernel_device)
    table = torch.arange(6, dtype=torch.int32, device=kernel_device).view(1, 6)
    pages = [x.unflatten(2, (6, 4))[0].transpose(0, 1) for x in (k, v)]
    begins = torch.tensor([0, 24], dtype=torch.int32, device=kernel_device)
    with torch_fdattn.autotune():
        out, _ = torch_fdattn.varlen_attention(
            q[0].transpose(0, 1), *pages, begins, page_table=table
        )
        (calls,) = tuning.state.memory.tiles.values()
    assert list(calls) == ["forward float16 D16/16 pages of 4 q32 k32 packed1"]
    expected, _ = torch_fdattn.attention(q, k, v)
    torch.testing.assert_close(out, expected[0].transpose(0, 1), rtol=2e-3, atol=1e-3)


@pytest.mark.interpreter
def test_other_sources_and_devices_are_others(kernel_device, fresh, tmp_path) -> None:
    inputs, path = small(kernel_device), tmp_path / "tiles.json"
    with torch_fdattn.autotune(path=path):
        torch_fdattn.attention(*inputs)
        with mock.patch.object(tuning, "_where", return_value="another"):
            torch_fdattn.attention(*inputs)
    assert len(fresh) == 8
    assert len(json.loads(path.read_text())["tiles"]) == 2
    assert ", triton " in tuning._where(inputs[0].device)


@pytest.mark.interpreter
def test_nothing_is_searched_during_capture_or_under_tiles(kernel_device, fresh) -> None:
    inputs = small(kernel_device)
    with torch_fdattn.autotune():
        with mock.patch.object(tuning, "_may_search", return_value=False):
            torch_fdattn.attention(*inputs)
            name = "forward float16 D16/16 q32 k32"  # of other kernels than there are now
            tuning.state.memory.put(tuning._where(inputs[0].device), name, {"former": FAST[0]})
            torch_fdattn.attention(*inputs)
        with torch_fdattn.tiles(block_n=32):
            torch_fdattn.attention(*inputs)
        assert not fresh
        torch_fdattn.attention(*inputs)
        assert fresh
        count = len(fresh)
        seen = Watched(forward._attention_forward_kernel)
        with mock.patch.object(tuning, "_may_search", return_value=False), seen:
            torch_fdattn.attention(*inputs)
        assert seen.sides == {(32, 16)}
        with torch_fdattn.autotune(False), Watched(forward._attention_forward_kernel) as seen:
            torch_fdattn.attention(*inputs)
        assert seen.sides != {(32, 16)}
        assert len(fresh) == count


@pytest.mark.gpu
def test_capture_on_a_gpu(fresh) -> None:
    inputs = small("cuda")
    with torch_fdattn.autotune(), torch_fdattn.tiles(block_m=16):
        torch_fdattn.attention(*inputs)  # compiled
    graph = torch.cuda.CUDAGraph()
    with torch_fdattn.autotune(), torch.cuda.graph(graph):
        out, _ = torch_fdattn.attention(*inputs)
    graph.replay()
    assert not fresh
    torch.testing.assert_close(out, torch_fdattn.attention(*inputs)[0])


@pytest.mark.gpu
def test_a_search_on_a_gpu() -> None:
    """The real clock and the real candidates, refusals among them; results by torch's own."""
    q, k, v = (torch.randn(2, 4, 300, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))  # fmt: skip
    with torch_fdattn.autotune():
        out = torch_fdattn.attention(q, k, v, causal=True)[0]
        found = torch.autograd.grad(out.float().square().sum(), (q, k, v))
    same = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    wanted = torch.autograd.grad(same.float().square().sum(), (q, k, v))
    for x, y in zip((out, *found), (same, *wanted), strict=True):
        torch.testing.assert_close(x, y, atol=0.1, rtol=0.02)


def problem(wrong=(), fails=()):
    """A launch into one tensor: (launch, outputs)."""
    out = torch.zeros(4)

    def launch(config):
        if config in fails:
            raise RuntimeError("out of resource: shared memory")
        out.fill_(1.5 if config in wrong else 1.0)

    return launch, [out]


def test_search_takes_the_fastest_right_one() -> None:
    tiles = parse_configs("16x16w1s1 32x32w1s1 64x64w1s1 128x128w1s1")
    times = dict(zip(tiles, (40.0, 30.0, 10.0, 1.0), strict=True))
    current = []

    def clock(call, device):
        call()
        return times[current[-1]]

    launch, outputs = problem(wrong=tiles[3:], fails=())

    def watched(config):
        current.append(config)
        launch(config)

    found = trials.search("forward", tiles[0], watched, outputs, lambda kernel: tiles, clock)
    assert found == tiles[2]
    launch, outputs = problem(wrong=tiles[3:], fails=tiles[2:3])
    assert trials.search("forward", tiles[0], watched, outputs, lambda kernel: tiles, clock) == tiles[1]  # fmt: skip
    times[tiles[1]] = 39.8  # less than the clock's noise
    assert trials.search("forward", tiles[0], watched, outputs, lambda kernel: tiles, clock) == tiles[0]  # fmt: skip
    both = BackwardConfig(tiles[0], tiles[1])
    assert trials.parts_of("backward", both) == {"dkdv": tiles[0], "dq": tiles[1]}
    assert trials.with_parts(both, {"dkdv": tiles[2], "dq": tiles[1]}) == BackwardConfig(tiles[2], tiles[1])  # fmt: skip


def test_rows_without_keys_are_no_difference() -> None:
    lse = torch.tensor([float("-inf"), 1.0, float("nan")])
    assert trials.difference([lse], [lse.clone()]) is None
    assert "wrong result" in trials.difference([lse], [torch.tensor([0.0, 1.0, float("nan")])])
    assert "wrong result" in trials.difference([torch.tensor([float("nan")])], [torch.zeros(1)])
    assert trials.difference([torch.empty(0)], [torch.empty(0)]) is None


@pytest.mark.parametrize("text", ["", "[]", '{"tiles": {"a": {"b": {"forward": "48x16w1s1"}}}}'])
def test_a_file_that_is_none_of_ours_is_refused(text, tmp_path) -> None:
    path = tmp_path / "other.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"path must name a file that autotune wrote, or none, got .*other.json"):  # fmt: skip
        torch_fdattn.autotune(path=path)
    assert not tuning.state.active
    assert path.read_text() == text


def test_a_path_that_cannot_be_written_is_refused_at_once(tmp_path) -> None:
    """Not by the call of attention that has searched for a minute."""
    path = tmp_path / "missing" / "tiles.json"
    with pytest.raises(ValueError, match=f"path must lie in a directory that exists, got {path}"):
        torch_fdattn.autotune(path=path)
    with pytest.raises(ValueError, match=f"path must name a file .* got {tmp_path}: .*directory"):
        torch_fdattn.autotune(path=tmp_path)


def test_wrong_types_are_named() -> None:
    with pytest.raises(TypeError, match=r"enabled must be a bool, got 'yes'"):
        torch_fdattn.autotune("yes")
    with pytest.raises(TypeError, match="path must be a str, a path or None, got 3"):
        torch_fdattn.autotune(path=3)
