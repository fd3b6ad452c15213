"""The pass over matmuls beside collectives: which it takes, which it leaves, and what the graphs are then.

One process with torch's fake process group: collectives are there, and move nothing. What the graphs compute, several
processes show (tests/dist/test_compiled_matmuls.py).
"""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from expecttest import assert_expected_inline
from torch import Tensor
from torch._dynamo.backends import debugging
from torch._dynamo.utils import counters
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.utils import fresh_cache
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.compile_backend.collective_forms import FORMS, NEAR_MISSES, gather, reduce, scatter
from torch_fdattn.compile_backend.report import MATMUL_REASONS
from torch_fdattn.compile_backend.tensor_parallel import passes
from torch_fdattn.dist.tensor_parallel import auto

WORLD = 3


@pytest.fixture(scope="module", autouse=True)
def group() -> Iterator[str]:
    if dist.is_initialized():
        pytest.skip("a process group exists")
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=WORLD)
    yield dist.group.WORLD.group_name
    dist.destroy_process_group()


def traced(function, *args, dynamic: bool = False):
    """As the pass is given it: by AOTAutograd."""
    found = []

    def compiler(gm, inputs):
        found.append(copy.deepcopy(gm))
        return gm

    def backend(gm, inputs):
        return debugging.aot_eager(gm, inputs, fw_compiler=compiler)

    torch._dynamo.reset()
    torch.compile(function, backend=backend, dynamic=dynamic, fullgraph=True)(*args)
    (gm,) = found
    return gm


def inputs() -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(WORLD * 6, 8), torch.randn(10, 8)


def graph_of(name: str, group: str, dynamic: bool = False):
    function = (FORMS | NEAR_MISSES)[name][0]
    return traced(lambda x, w: function(x, w, group, WORLD), *inputs(), dynamic=dynamic)


def code(gm) -> str:
    """The graph's Python, without what names types and places."""
    gm.recompile()
    lines = gm.code.replace("torch.ops.", "").splitlines()
    kept = [line.split(";")[0].rstrip() for line in lines if line.strip()]
    return "\n".join(kept[1:])


@pytest.mark.parametrize(
    ("name", "dynamic"),
    [*((name, False) for name in FORMS), *((name, True) for name in list(FORMS)[::4])],
)
def test_forms(group: str, name: str, dynamic: bool) -> None:
    gm = graph_of(name, group, dynamic)
    before = [x.meta["val"] for x in gm.graph.find_nodes(op="output")[0].all_input_nodes]
    sites = passes.rewrite_graph(gm.graph, "fused")
    ops = [site.op for site in sites if site.op]
    assert ops == FORMS[name][1]
    called = [n for n in gm.graph.nodes if "compiled_" in str(n.target)]
    assert len(called) == len(ops)
    after = [x.meta["val"] for x in gm.graph.find_nodes(op="output")[0].all_input_nodes]
    assert [(a.shape, a.dtype) for a in after] == [(b.shape, b.dtype) for b in before]


@pytest.mark.parametrize("name", NEAR_MISSES)
def test_near_misses(group: str, name: str) -> None:
    gm = graph_of(name, group)
    before = code(gm)
    sites = passes.rewrite_graph(gm.graph, "fused")
    assert [site.reason for site in sites] == NEAR_MISSES[name][1]
    assert code(gm) == before


def test_snapshots(group: str) -> None:
    gm = graph_of("gather and scatter", group)
    passes.rewrite_graph(gm.graph, "fused")
    assert_expected_inline(
        code(gm),
        """\
    t = aten.t.default(arg1_1)
    compiled_all_gather_matmul_default = fdattn.compiled_all_gather_matmul.default(arg0_1, [arg1_1], '0', 3, 'fused', False)
    getitem = compiled_all_gather_matmul_default[0]
    relu = aten.relu.default(getitem)
    permute_default = aten.permute.default(arg1_1, [1, 0])
    compiled_matmul_reduce_scatter_default = fdattn.compiled_matmul_reduce_scatter.default(relu, permute_default, None, '0', 3, 'fused')
    return (compiled_matmul_reduce_scatter_default,)""",
    )
    gm = graph_of("gather, rows used before", group)
    passes.rewrite_graph(gm.graph, "collective")
    assert_expected_inline(
        code(gm),
        """\
    t_1 = aten.t.default(arg1_1)
    compiled_all_gather_matmul_default = fdattn.compiled_all_gather_matmul.default(arg0_1, [arg1_1], '0', 3, 'collective', True)
    getitem = compiled_all_gather_matmul_default[0]
    getitem_1 = compiled_all_gather_matmul_default[1]
    relu = aten.relu.default(getitem_1)
    t = aten.t.default(arg1_1)
    mm = aten.mm.default(relu, t)
    return (mm, getitem)""",
    )
    gm = graph_of("scatter of a sum, biases", group)
    passes.rewrite_graph(gm.graph, "copy_engine")
    assert_expected_inline(
        code(gm),
        """\
    flip = aten.flip.default(arg0_1, [0])
    stack = aten.stack.default([arg0_1, flip])
    select = aten.select.int(arg1_1, 1, 0)
    t = aten.t.default(arg1_1)
    view = aten.view.default(stack, [36, 8])
    flip_1 = aten.flip.default(arg0_1, [0])
    stack_1 = aten.stack.default([arg0_1, flip_1])
    mul = aten.mul.Tensor(stack_1, 2)
    select_1 = aten.select.int(arg1_1, 1, 1)
    t_1 = aten.t.default(arg1_1)
    view_1 = aten.view.default(mul, [36, 8])
    reshape_default = aten.reshape.default(view, [2, 18, 8])
    split_tensor = aten.split.Tensor(reshape_default, 6, 1)
    getitem_3 = split_tensor[0]
    getitem_4 = split_tensor[1]
    getitem_5 = split_tensor[2]
    cat_default = aten.cat.default([getitem_3, getitem_4, getitem_5])
    reshape_default_1 = aten.reshape.default(view_1, [2, 18, 8])
    split_tensor_1 = aten.split.Tensor(reshape_default_1, 6, 1)
    getitem_6 = split_tensor_1[0]
    getitem_7 = split_tensor_1[1]
    getitem_8 = split_tensor_1[2]
    cat_default_1 = aten.cat.default([getitem_6, getitem_7, getitem_8])
    reshape_default_2 = aten.reshape.default(cat_default, [-1, 8])
    reshape_default_3 = aten.reshape.default(cat_default_1, [-1, 8])
    cat_default_2 = aten.cat.default([reshape_default_2, reshape_default_3], 1)
    cat_default_3 = aten.cat.default([arg1_1, arg1_1], 1)
    add_tensor = aten.add.Tensor(select, select_1)
    compiled_matmul_reduce_scatter_default = fdattn.compiled_matmul_reduce_scatter.default(cat_default_2, cat_default_3, add_tensor, '0', 3, 'copy_engine')
    reshape_default_4 = aten.reshape.default(compiled_matmul_reduce_scatter_default, [-1, 6, 10])
    return (reshape_default_4,)""",
    )
    gm = graph_of("reduce of sequences", group)
    passes.rewrite_graph(gm.graph, "fused")
    assert_expected_inline(
        code(gm),
        """\
    flip = aten.flip.default(arg0_1, [0])
    stack = aten.stack.default([arg0_1, flip])
    t = aten.t.default(arg1_1)
    view = aten.view.default(stack, [36, 8])
    compiled_matmul_all_reduce_default = fdattn.compiled_matmul_all_reduce.default(view, arg1_1, None, '0', 3, 'fused')
    reshape_default_2 = aten.reshape.default(compiled_matmul_all_reduce_default, [-1, 18, 10])
    return (reshape_default_2,)""",
    )


@pytest.mark.parametrize(
    ("choice", "reason"), [("auto", "not-faster"), ("copy_engine", "strategy")]
)
def test_left(group: str, choice: str, reason: str) -> None:
    """What was not measured stays, and what a strategy cannot do."""
    gm = graph_of("reduce", group)
    before = code(gm)
    (site,) = passes.rewrite_graph(gm.graph, choice)
    assert site.reason == reason
    assert site.detail == MATMUL_REASONS[reason]
    assert code(gm) == before


def test_a_graph_that_says_too_little(group: str) -> None:
    """As another pass may leave it: not rewritten, and no error."""
    gm = graph_of("scatter", group)
    for node in gm.graph.nodes:
        if node.target is torch.ops.aten.mm.default:
            node.meta.pop("val")
    before = code(gm)
    (site,) = passes.rewrite_graph(gm.graph, "fused")
    assert site.reason == "unexpected"
    assert code(gm) == before


def test_a_weight_that_is_awaited_later(group: str) -> None:
    """Moving its collective would change the order in which ranks meet."""

    def run(x, w):
        rows = gather(x, group)
        return rows.sum() * (rows @ gather(w, group)[:10].t())

    gm = traced(run, *inputs())
    before = code(gm)
    (site,) = passes.rewrite_graph(gm.graph, "fused")
    assert site.reason == "weight-later"
    assert code(gm) == before


def test_dryrun_changes_nothing(group: str) -> None:
    gm = graph_of("gather", group)
    before = code(gm)
    (site,) = passes.rewrite_graph(gm.graph, "fused", dryrun=True)
    assert site.op == "all_gather_matmul"
    assert code(gm) == before


ENTRY = {
    "op": auto.GATHER, "gpu": "G", "architecture": "sm_90", "dtype": "bfloat16", "ranks": WORLD, "columns": 4096, "features": 1024,
    "choices": [[64, "collective"], [4096, "fused"]], "run": "r",
}  # fmt: skip


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        (auto.LinearSizes(4096, 4096, 1024, WORLD), True),
        (auto.LinearSizes(4096, 77, 1024, WORLD), True),  # columns are a rank's own
        (auto.LinearSizes(64, 4096, 1024, WORLD), False),
        (auto.LinearSizes(4096, 4096, 64, WORLD), True),  # the nearest measured layer
        (auto.LinearSizes(4096, 4096, 1024, 8), True),  # and number of ranks
        (auto.LinearSizes(64, 4096, 1024, 8), False),
        (None, True),
    ],
)
def test_where_something_was_measured(monkeypatch, sizes, expected: bool) -> None:
    monkeypatch.setattr(auto, "table", lambda: (ENTRY,))
    monkeypatch.setattr(auto.Device, "of", lambda device: auto.Device("G", "sm_90"))
    device = torch.device("cuda")
    assert auto.may_choose(auto.GATHER, device, torch.bfloat16, sizes) is expected
    assert not auto.may_choose(auto.SCATTER, device, torch.bfloat16, sizes)
    assert not auto.may_choose(auto.GATHER, device, torch.float32, sizes)
    assert not auto.may_choose(auto.GATHER, torch.device("cpu"), torch.bfloat16, sizes)


def compiled(function, **options):
    torch._dynamo.reset()
    return torch.compile(function, backend="fdattn", options=options)


def test_options(group: str) -> None:
    x, w = inputs()

    def run(x, w):
        return reduce(x @ w.t(), group)

    with pytest.raises(
        Exception, match=r'options\["tensor_parallel"\] must be one of .* got \'ring\''
    ):
        compiled(run, tensor_parallel="ring", lower="aot_eager")(x, w)
    for choice, count in (("collective", 1), ("off", 0), ("auto", 0)):
        counters.clear()
        compiled(run, tensor_parallel=choice, lower="aot_eager")(x, w)
        assert counters["fdattn"]["op/matmul_all_reduce"] == count
        assert counters["fdattn"]["left/not-faster"] == (choice == "auto")


def test_caches_know_the_option_and_the_users_pass(group: str) -> None:
    """A graph that was rewritten is not served where it was not asked for."""
    x, w = inputs()
    seen = []

    def run(x, w):
        return scatter(gather(x, group) @ w.t(), group)

    class Users(CustomGraphPass):
        def __call__(self, graph):
            seen.append(graph)

        def uuid(self):
            return "users"

    def hits(choice: str, **others) -> tuple[int, int]:
        counters.clear()
        compiled(run, tensor_parallel=choice, **others)(x, w)
        return counters["inductor"]["fxgraph_cache_hit"], counters["fdattn"]["op/all_gather_matmul"]

    with fresh_cache(), torch.no_grad():
        assert hits("collective") == (0, 1)
        assert hits("collective") == (1, 0)  # found, and so not rewritten again
        assert hits("off") == (0, 0)
        assert hits("collective", post_grad_custom_pre_pass=Users()) == (0, 1)
        assert len(seen) == 1
