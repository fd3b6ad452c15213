"""MLPs that are known as a whole: the same bits as by parts, and only where all is as it was."""

from __future__ import annotations

import copy
import pickle
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from tests.dist.dense_layers import HIDDEN, config, dense_mlp
from torch_fdattn.dist import TPMLP, known_mlp, plans, set_timeout
from torch_fdattn.models.transformer import Residual
from torch_fdattn.ops import repeated_call
from torch_fdattn.ops.library import launches

#: Calls after which a layer knows one: the third finds what its parts have kept.
LEARNED = 5


def layer(group, device, dtype=torch.float32, method: str = "low_latency") -> TPMLP:
    torch.manual_seed(0)
    mlp = dense_mlp(config(inner=64), "ours").to(device, dtype)
    return TPMLP.from_module(mlp, group, "all_reduce", method).eval()


def draw(*shape: int, device, dtype=torch.float32) -> Tensor:
    return torch.randn(shape, device=device).to(dtype)


def by_parts(mlp: TPMLP, *arguments) -> Tensor | tuple[Tensor, Tensor]:
    return copy.deepcopy(mlp)(*arguments)  # copies know nothing


def same(found, expected) -> bool:
    if isinstance(found, tuple):
        return all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    return torch.equal(found, expected)


class TestOnGpus:
    @pytest.fixture(autouse=True)
    def _gpus(self, group, rank_device) -> None:
        if dist.get_world_size() == 1:
            pytest.skip("needs 2 ranks")
        if rank_device.type == "cpu":
            pytest.skip("needs a CUDA device")

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
    @pytest.mark.parametrize("normed", [False, True])
    @torch.inference_mode()
    def test_the_same_bits(self, group, rank_device, normed: bool, dtype) -> None:
        """Eager and captured, of shapes in turn, after new weights, and with another time limit."""
        mlp, norm = (
            layer(group, rank_device, dtype),
            nn.RMSNorm(HIDDEN, 1e-5, device=rank_device, dtype=dtype),
        )

        def case(*shape: int) -> tuple:
            x = draw(*shape, HIDDEN, device=rank_device, dtype=dtype)
            return (x, Residual(torch.randn_like(x), norm)) if normed else (x,)

        def check(times: int, *cases: tuple) -> int:
            before = launches["dist/known_mlp"]
            for _ in range(times):
                for given in cases:
                    assert same(mlp(*given), by_parts(mlp, *given))
            return launches["dist/known_mlp"] - before

        cases = case(2, 3), case(5)
        check(LEARNED, *cases)
        assert check(3, *cases, case(5)) == 9
        wide = case(6)[0].repeat(1, 2)[:, :HIDDEN], *cases[0][1:]  # not contiguous
        if not normed:
            assert check(LEARNED, wide) == 0
        try:
            set_timeout(9.0)
            assert check(1, *cases) == 0
        finally:
            set_timeout(10.0)
        assert check(1, *cases) == 2
        mlp.down_proj.weight.data = torch.randn_like(mlp.down_proj.weight)
        mlp.gate_proj.weight.data = torch.randn_like(mlp.gate_proj.weight)  # no more side by side
        assert check(1, *cases) == 0
        mlp.to(rank_device)
        mlp._lay_side_by_side()
        assert check(1, *cases) == 2
        graph, given = torch.cuda.CUDAGraph(), cases[0]
        with torch.cuda.graph(graph):
            found = [mlp(*given) for _ in range(LEARNED)]
        for _ in range(2):
            graph.replay()
            expected = by_parts(mlp, *given)
            assert all(same(one, expected) for one in found)

    def test_who_watches_sees_the_parts(self, group, rank_device) -> None:
        """Gradients, profilers, autocast; and calls by other methods are never known."""
        mlp, x = layer(group, rank_device), draw(4, HIDDEN, device=rank_device)
        other = layer(group, rank_device, method="nccl")
        with torch.no_grad():
            for _ in range(LEARNED + known_mlp._TRIES):
                mlp(x), other(x)
        before = launches["dist/known_mlp"]
        y = mlp(x.requires_grad_())
        y.sum().backward()
        assert x.grad is not None
        with torch.no_grad(), torch.profiler.profile() as profile:
            mlp(x)
        assert any("linear" in event.name for event in profile.events())
        with torch.no_grad(), torch.autocast("cuda", torch.bfloat16):
            assert mlp(x).dtype == torch.bfloat16
        with torch.no_grad():
            other(x)
        assert launches["dist/known_mlp"] == before
        with torch.no_grad():
            assert same(mlp(x), by_parts(mlp, x))
        assert launches["dist/known_mlp"] == before + 1

    @torch.inference_mode()
    def test_a_group_of_the_same_name(self, rank_device) -> None:
        """Another group's memory is not this one's."""
        x, found = draw(4, HIDDEN, device=rank_device), []
        for _ in range(2):
            new = dist.new_group()
            mlp = layer(new.group_name, rank_device)
            for _ in range(LEARNED):
                found.append(mlp(x))
            dist.destroy_process_group(new)
            with pytest.raises((RuntimeError, ValueError)):
                mlp(x)
        assert all(same(one, found[0]) for one in found)


class TestAnywhere:
    """With functions in the place of launches."""

    @pytest.fixture
    def stand_ins(self, group, monkeypatch) -> SimpleNamespace:
        calls = SimpleNamespace(sent=[], takes=True, alike=True)

        def launched(steps, addresses) -> bool:
            calls.addresses = addresses
            return calls.takes

        def exchange(*tensors: Tensor | None) -> bool:
            if calls.alike:
                calls.sent.append(tensors)
                for out in tensors[-2:] if len(tensors) > 2 else tensors[-1:]:
                    out.copy_(tensors[0])
            return calls.alike

        monkeypatch.setattr(repeated_call, "launched", launched)
        monkeypatch.setattr(repeated_call, "find", lambda key: ("a launch",))
        plan = SimpleNamespace(memo={"exchange": exchange})
        monkeypatch.setattr(plans, "find", lambda *call: plan)
        return calls

    @torch.no_grad()
    def test_what_is_launched(self, stand_ins, group) -> None:
        weights, down = draw(12, 4, device="cpu"), draw(4, 6, device="cpu")
        x, known = draw(2, 3, 4, device="cpu"), known_mlp.KnownMLP()
        y = F.linear(x, weights)

        def run(x: Tensor, residual=None, y: Tensor = y, down: Tensor = down, known=known):
            call, _ = known.find(group, x, down, residual)
            return call and call(x, y, down, residual)

        ys = y.split_with_sizes([6, 6], -1)
        assert run(x) is None
        known.learn(group, x, ys, ys[0].contiguous(), down, None, ())
        found = run(x)
        ((part, total),) = stand_ins.sent
        assert found is total
        assert part.shape == (2, 3, 4)
        gate, up, _ = stand_ins.addresses
        assert up - gate == 24
        for other in (x[:1], x.double(), x.transpose(0, 1).contiguous().transpose(0, 1)):
            assert run(other) is None
        norm = nn.RMSNorm(4, eps=1e-6)
        assert run(x, Residual(x, norm)) is None
        known.learn(group, x, ys, ys[0].contiguous(), down, Residual(x, norm), ())
        added, normed = run(x, Residual(x, norm))
        *given, sent_normed, sent_added = stand_ins.sent[-1]
        assert given[1:] == [None, x, norm.weight]
        assert (sent_normed is normed, sent_added is added) == (True, True)
        assert run(x, Residual(x, nn.RMSNorm(4, eps=0.5))) is None
        hooked = nn.RMSNorm(4, eps=1e-6)
        hooked.register_forward_hook(lambda *_: None)
        assert run(x, Residual(x, hooked)) is None
        stand_ins.alike = False
        assert run(x) is None
        stand_ins.alike, stand_ins.takes = True, False
        assert run(x) is None
        stand_ins.takes = True
        assert run(x) is not None
        with torch.enable_grad():
            assert run(x) is None
        assert run(x, y=ys[0]) is None  # of other columns
        assert run(x, down=down[:3]) is None
        again = pickle.loads(pickle.dumps(known))
        assert run(x, known=again) is None

    @torch.no_grad()
    def test_what_is_never_known_is_soon_not_asked_for(self, stand_ins, group, monkeypatch) -> None:
        asked = []
        monkeypatch.setattr(plans, "find", lambda *call: asked.append(call))
        x, down, known = draw(8, 4, device="cpu"), draw(4, 6, device="cpu"), known_mlp.KnownMLP()
        ys = draw(8, 12, device="cpu").split_with_sizes([6, 6], -1)

        def call(rows: int) -> None:
            found, learns = known.find(group, x[:rows], down, None)
            assert found is None
            if learns:
                known.learn(group, x[:rows], ys, ys[0], down, None, ())

        for _ in range(10):
            call(3)
        assert len(asked) == known_mlp._TRIES
        monkeypatch.setattr(known_mlp, "_MOST", 2)
        for rows in range(1, 9):
            call(rows)
        assert all(len(kinds) <= 2 for kinds in known._of.values())
