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
from torch import Tensor
from torch._dynamo.backends import debugging
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.compile_backend.collective_forms import FORMS, NEAR_MISSES
from torch_fdattn.compile_backend.tensor_parallel import passes

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


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", FORMS)
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
