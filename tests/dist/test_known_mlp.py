"""MLPs that are known as a whole: the same bits as by parts, and only where all is as it was."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from tests.dist import direct_launches
from tests.dist.dense_layers import HIDDEN, config, dense_mlp
from torch_fdattn.dist import TPMLP, known_mlp, plans, set_timeout
from torch_fdattn.dist.groups import same_everywhere
from torch_fdattn.dist.tp_linear import (
    gated_product,
    gemm_epilogue,
    one_sided,
    push_values,
    row_norm,
)
from torch_fdattn.models.transformer import Residual
from torch_fdattn.ops import repeated_call, swiglu, swiglu_kernel
from torch_fdattn.ops.library import INTERPRET, launches

#: Calls after which a layer knows one, whose parts keep what they know from the third on, of launches through Triton
#: from their third on.
LEARNED = 3 if INTERPRET else 5


def layer(group, device, dtype=torch.float32, method: str = "low_latency") -> TPMLP:
    torch.manual_seed(0)
    mlp = dense_mlp(config(inner=64), "ours").to(device, dtype)
    return TPMLP.from_module(mlp, group, "all_reduce", method).eval()


def draw(*shape: int, device, dtype=torch.float32) -> Tensor:
    return torch.randn(shape, device=device).to(dtype)


def by_parts(mlp: TPMLP, *arguments, joined: bool = False) -> Tensor | tuple[Tensor, Tensor]:
    other = copy.deepcopy(mlp)  # which knows nothing
    if joined:
        other._lay_side_by_side()
    return other(*arguments)


def same(found, expected) -> bool:
    if isinstance(found, tuple):
        return all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    return torch.equal(found, expected)


def check_graph(mlp: TPMLP, *arguments, joined: bool = False) -> None:
    """Captured calls give what the parts give."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = [mlp(*arguments) for _ in range(LEARNED)]
    for _ in range(2):
        graph.replay()
        expected = by_parts(mlp, *arguments, joined=joined)
        assert all(same(one, expected) for one in found)


class TestWhole:
    """On GPUs, or with stand-ins for their direct launches in the interpreter."""

    @pytest.fixture(autouse=True)
    def _launches(self, group, rank_device, monkeypatch) -> Iterator[None]:
        if dist.get_world_size() == 1:
            pytest.skip("needs 2 ranks")
        if rank_device.type == "cuda":
            yield
            return
        if not INTERPRET:
            pytest.skip("tests a kernel: needs a CUDA device or TRITON_INTERPRET=1")
        for module in (gated_product, gemm_epilogue, push_values, row_norm, swiglu_kernel):
            monkeypatch.setattr(module, "launch", direct_launches.launch)
        monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda _: 0, raising=False)
        plans.forget()
        repeated_call.forget()
        with same_everywhere():
            yield
        repeated_call.forget()

    @pytest.mark.parametrize("half", [False, True])
    @pytest.mark.parametrize("normed", [False, True])
    @torch.inference_mode()
    def test_the_same_bits(self, group, rank_device, normed: bool, half: bool) -> None:
        """Of shapes in turn, after new weights, and with another time limit."""
        if half and rank_device.type == "cpu":
            pytest.skip("the interpreter has no bfloat16")
        dtype = torch.bfloat16 if half else torch.float32
        mlp = layer(group, rank_device, dtype)
        norm = nn.RMSNorm(HIDDEN, 1e-5, device=rank_device, dtype=dtype)

        def case(*shape: int) -> tuple:
            x = draw(*shape, HIDDEN, device=rank_device, dtype=dtype)
            return (x, Residual(torch.randn_like(x), norm)) if normed else (x,)

        def check(times: int, *cases: tuple) -> int:
            before = launches["dist/known_mlp"]
            for _ in range(times):
                for given in cases:
                    assert same(mlp(*given), by_parts(mlp, *given))
            return launches["dist/known_mlp"] - before

        cases = case(1, 2), case(3)
        check(LEARNED, *cases)
        assert check(2, *cases, case(3)) == 6
        wide = case(4)[0].repeat(1, 2)[:, :HIDDEN], *cases[0][1:]  # not contiguous
        if not normed:
            assert check(LEARNED, wide) == 0
        try:
            for seconds in (9.0, 10.0):  # learned anew
                set_timeout(seconds)
                assert check(1, *cases) == 0
                check(LEARNED, *cases)
                assert check(1, *cases) == 2
        finally:
            set_timeout(10.0)
        mlp.down_proj.weight.data = torch.randn_like(mlp.down_proj.weight)
        mlp.gate_proj.weight.data = torch.randn_like(mlp.gate_proj.weight)  # no more side by side
        assert check(1, *cases) == 0
        mlp._lay_side_by_side()
        assert check(1, *cases) == 2
        if rank_device.type == "cuda":
            check_graph(mlp, *cases[0])

    @pytest.mark.parametrize(
        ("method", "normed"),
        [("low_latency", True), ("gemm_epilogue", False), ("gemm_epilogue", True)],
    )
    @torch.inference_mode()
    def test_few_rows(self, group, rank_device, monkeypatch, method: str, normed: bool) -> None:
        """SwiGLU in the product: the same bits, as long as all is as it was; nobody's weights but the layer's."""
        monkeypatch.setattr(swiglu, "IN_PRODUCT", ((1, 8, 1, 1),))
        dtype = torch.bfloat16 if rank_device.type == "cuda" else torch.float16
        mlp = layer(group, rank_device, dtype, method)
        norm = nn.RMSNorm(HIDDEN, 1e-5, device=rank_device, dtype=dtype)

        def case(*shape: int) -> tuple:
            x = draw(*shape, HIDDEN, device=rank_device, dtype=dtype)
            return (x, Residual(torch.randn_like(x), norm)) if normed else (x,)

        def check(times: int, *cases: tuple, joined: bool = True) -> tuple[int, int]:
            """(calls that were known as a whole, launches of the product with SwiGLU by others)"""
            before = launches["dist/known_mlp"], launches["tp_linear/gated_product"]
            for _ in range(times):
                for given in cases:
                    found, expected = mlp(*given), by_parts(mlp, *given, joined=joined)
                    assert same(found, expected)
            return tuple(
                launches[name] - count
                for name, count in zip(("dist/known_mlp", "tp_linear/gated_product"), before, strict=True)
            )  # fmt: skip

        cases = case(1, 2), case(3)
        check(LEARNED, *cases)
        assert check(1, *cases, case(3)) == (3, 3)  # of the copies
        assert check(1, case(9))[1] == 0  # too many rows
        cases = cases[:1]
        try:
            set_timeout(9.0)
            assert check(1, *cases)[0] == 0
            check(LEARNED, *cases)
            assert check(1, *cases)[0] == 1
        finally:
            set_timeout(10.0)
        mlp.down_proj.weight.data = torch.randn_like(mlp.down_proj.weight)
        check(LEARNED, *cases)
        assert check(1, *cases)[0] == 1
        mlp.gate_proj.weight.data = torch.randn_like(mlp.gate_proj.weight)  # no more side by side
        assert check(1, *cases, joined=False) == (0, 0)
        mlp._lay_side_by_side()  # elsewhere
        check(LEARNED, *cases)
        assert check(1, *cases)[0] == 1
        with torch.autocast(rank_device.type, torch.float16):
            before = launches["dist/known_mlp"]
            mlp(*cases[0])
            assert launches["dist/known_mlp"] == before
        if rank_device.type == "cuda":
            check_graph(mlp, *cases[0], joined=True)

    @torch.no_grad()
    def test_compiled_once(self, group, rank_device) -> None:
        """How many rows are few is no guard of graphs."""
        mlp, graphs = layer(group, rank_device, method="nccl"), []
        compiled = torch.compile(
            mlp, backend=lambda graph, _: graphs.append(graph) or graph, dynamic=True, fullgraph=True
        )  # fmt: skip
        for rows in (3, 70, 120, 200):
            x = draw(rows, HIDDEN, device=rank_device)
            torch.testing.assert_close(compiled(x), mlp(x))
        assert len(graphs) == 1

    @torch.no_grad()
    def test_memory_that_grows(self, rank_device) -> None:
        """What a larger call outgrew is not used again, and the call is learned anew."""
        new = dist.new_group()
        mlp, x = layer(new.group_name, rank_device), draw(4, HIDDEN, device=rank_device)
        for _ in range(LEARNED):
            mlp(x)
        before = launches["dist/known_mlp"]
        mlp(x)
        assert launches["dist/known_mlp"] == before + 1
        mlp(draw(200, HIDDEN, device=rank_device))  # 113 KiB on two ranks: more than the least
        for _ in range(LEARNED):
            assert same(mlp(x), by_parts(mlp, x))
        before = launches["dist/known_mlp"]
        mlp(x)
        assert launches["dist/known_mlp"] == before + 1
        dist.destroy_process_group(new)

    @torch.no_grad()
    def test_more_rows_than_norms_are_made_for(self, group, rank_device, monkeypatch) -> None:
        """Their sum is known, but is not the one with a norm."""
        monkeypatch.setattr(one_sided, "NORM_ROWS", 2)
        plans.forget()
        mlp, x = layer(group, rank_device), draw(4, HIDDEN, device=rank_device)
        given = x, Residual(torch.randn_like(x), nn.RMSNorm(HIDDEN, 1e-5, device=rank_device))
        before = launches["dist/known_mlp"]
        for _ in range(LEARNED + 2):
            assert same(mlp(*given), by_parts(mlp, *given))
        assert launches["dist/known_mlp"] == before

    def test_who_watches_sees_the_parts(self, group, rank_device) -> None:
        """Gradients, profilers, autocast; and other methods are never known, in layers that share all else."""
        mlp, x = layer(group, rank_device), draw(4, HIDDEN, device=rank_device)
        other = copy.copy(mlp)
        other.allreduce_method = "nccl"
        with torch.no_grad():
            for _ in range(LEARNED + known_mlp._TRIES):
                other(x), mlp(x)
        before = launches["dist/known_mlp"]
        y = mlp(x.requires_grad_())
        y.sum().backward()
        assert x.grad is not None
        with torch.no_grad(), torch.profiler.profile() as profile:
            mlp(x)
        assert any("linear" in event.name for event in profile.events())
        half = torch.float16
        with torch.no_grad(), torch.autocast(rank_device.type, half):
            assert mlp(x).dtype == half
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

        class Exchange:
            def is_alike(self) -> bool:
                return calls.alike

            def __call__(self, *tensors: Tensor | None) -> bool:
                return exchange(*tensors)

        calls.plan = SimpleNamespace(memo={"exchange": Exchange()}, with_norm=False)
        monkeypatch.setattr(plans, "find", lambda *call: calls.plan)
        return calls

    @staticmethod
    def forward(known, group, x, y, down, residual=None, how=("auto",)):
        """As a layer does it: what was found; by parts, it learns."""
        found, kind = known.run(group, x, y, down, residual, how)
        if kind is not None:
            ys = y.split_with_sizes([y.shape[-1] // 2] * 2, -1)
            known.learn(group, kind, x, ys, ys[0].contiguous(), down, residual, ())
        return found

    @torch.no_grad()
    def test_what_is_launched(self, stand_ins, group) -> None:
        weights, down = draw(12, 4, device="cpu"), draw(4, 6, device="cpu")
        x, known = draw(2, 3, 4, device="cpu"), known_mlp.KnownMLP()
        y = F.linear(x, weights)

        def run(x: Tensor, *residual, y: Tensor = y, down: Tensor = down, known=known, **how):
            return self.forward(known, group, x, y, down, *residual, **how)

        assert run(x) is None
        found = run(x)
        ((part, total),) = stand_ins.sent
        assert found is total
        assert part.shape == (2, 3, 4)
        gate, up, _ = stand_ins.addresses
        assert up - gate == 24
        for other in (x[:1], x.double(), x.transpose(0, 1).contiguous().transpose(0, 1)):
            assert run(other) is None
        assert run(x, how=("nccl",)) is None
        assert run(x, y=y[..., :6]) is None  # of other columns: learned anew
        assert [run(x) is None for _ in range(2)] == [True, False]
        assert run(x, down=down[:3]) is None  # another kind
        assert run(x) is not None
        for name, value in (("alike", False), ("takes", False)):
            setattr(stand_ins, name, value)
            sent = len(stand_ins.sent)
            assert run(x) is None
            assert len(stand_ins.sent) == sent
            setattr(stand_ins, name, True)
            assert run(x) is not None  # learned anew
        with torch.enable_grad():
            assert run(x) is None
        again = pickle.loads(pickle.dumps(known))
        assert run(x, known=again) is None

    @torch.no_grad()
    def test_norms(self, stand_ins, group) -> None:
        """With a plan that has them, and of which all is as it was."""
        y, down = draw(3, 12, device="cpu"), draw(4, 6, device="cpu")
        x, known, norm = draw(3, 4, device="cpu"), known_mlp.KnownMLP(), nn.RMSNorm(4, eps=1e-6)
        added_to = torch.randn_like(x)

        def run(norm: nn.Module = norm, added_to: Tensor = added_to):
            return self.forward(known, group, x, y, down, Residual(added_to, norm))

        assert [run(), run()] == [None, None]  # the plan's exchange is of the sum alone
        stand_ins.plan.with_norm = True
        assert run() is None
        added, normed = run()
        part, *given, sent_normed, sent_added = stand_ins.sent[-1]
        assert part.shape == x.shape
        assert given[0] is None
        assert given[1] is added_to
        assert given[2] is norm.weight
        assert (sent_normed is normed, sent_added is added) == (True, True)
        assert self.forward(known, group, x, y, down) is None
        hooked, other = nn.RMSNorm(4, eps=1e-6), nn.RMSNorm(4, eps=1e-6)
        hooked.register_forward_hook(lambda *_: None)
        other.weight = nn.Parameter(torch.ones(1))
        for wrong in (
            hooked,
            nn.RMSNorm(4),
            nn.Identity(),
            nn.LayerNorm(4),
            nn.RMSNorm(4, eps=0.5),
            other,
        ):
            assert run(wrong) is None
        assert run(added_to=added_to.t().contiguous().t()) is None
        assert run() is not None

    @torch.no_grad()
    def test_what_is_never_known_is_soon_not_asked_for(self, stand_ins, group, monkeypatch) -> None:
        asked = []
        monkeypatch.setattr(plans, "find", lambda *call: asked.append(call))
        x, down, known = draw(8, 4, device="cpu"), draw(4, 6, device="cpu"), known_mlp.KnownMLP()
        y = draw(8, 12, device="cpu")
        for _ in range(10):
            assert self.forward(known, group, x[:3], y[:3], down) is None
        assert len(asked) == known_mlp._TRIES
        monkeypatch.setattr(known_mlp, "_MOST", 2)
        for rows in range(1, 9):
            self.forward(known, group, x[:rows], y[:rows], down)
        assert all(len(kinds) <= 2 for kinds in known._of.values())


@pytest.mark.parametrize("norm", [nn.Identity(), nn.LayerNorm(HIDDEN), nn.RMSNorm(HIDDEN)])
@torch.no_grad()
def test_residuals_with_any_norm(group, rank_device, norm: nn.Module) -> None:
    mlp = TPMLP.from_module(
        dense_mlp(config(), "ours").to(rank_device), group, "all_reduce", "nccl"
    )
    x, residual = (draw(3, HIDDEN, device=rank_device) for _ in range(2))
    dist.broadcast(x, 0)
    dist.broadcast(residual, 0)
    added, normed = mlp(x, Residual(residual, norm.to(rank_device)))
    torch.testing.assert_close(added, residual + mlp(x))
    torch.testing.assert_close(normed, norm(added))
