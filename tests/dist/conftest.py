"""The process group of the distributed tests, which run as

    torchrun --nproc-per-node 2 -m pytest tests/dist        gloo, or NCCL where every rank has a GPU: see ranks.py

A plain pytest skips them and says so.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from tests.dist import ranks
from torch_fdattn import checks
from torch_fdattn.dist import set_timeout
from torch_fdattn.dist.tensor_parallel import auto
from torch_fdattn.ops.library import INTERPRET


@pytest.fixture(scope="session")
def group() -> Iterator[str]:
    """The name of the group of all ranks."""
    if "WORLD_SIZE" not in os.environ:
        pytest.skip("needs torchrun: torchrun --nproc-per-node 2 -m pytest tests/dist")
    ranks.start_group(timedelta(seconds=120))
    yield dist.group.WORLD.group_name
    dist.destroy_process_group()


@pytest.fixture(scope="session")
def rank_device(group: str) -> torch.device:
    """This rank's device."""
    return ranks.rank_device()


@pytest.fixture
def compared_in_every_call(rank_device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """On GPUs only the checked mode compares what a rank has seen before; one rank has nothing to compare."""
    if dist.get_world_size() == 1:
        pytest.skip("needs 2 ranks")
    if rank_device.type == "cuda":
        monkeypatch.setattr(checks, "CHECK_VALUES", True)


@pytest.fixture(scope="session")
def mesh(rank_device: torch.device) -> DeviceMesh:
    """One mesh for all tests: torch 2.13 fails to compile a DTensor program, any, on a second equal mesh."""
    return init_device_mesh(rank_device.type, (dist.get_world_size(),))


@pytest.fixture(scope="session")
def hierarchies(rank_device: torch.device) -> list[tuple[str, str]]:
    """(inner, outer) group names of every mesh (nodes, ranks of a node) that the ranks make."""
    world, found = dist.get_world_size(), []
    for nodes in range(1, world + 1):
        if world % nodes == 0:
            names = "nodes", "places"
            mesh = init_device_mesh(rank_device.type, (nodes, world // nodes), mesh_dim_names=names)
            found.append(tuple(mesh[name].get_group().group_name for name in reversed(names)))
    return found


@pytest.fixture(autouse=True)
def _same_seed_everywhere(group: str) -> None:
    """Replicated inputs are drawn alike on all ranks."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _patient() -> Iterator[None]:
    """Interpreted ranks on a machine that is slow for a while are no lost ones; tests of lost ranks set limits of their own."""
    if INTERPRET:
        set_timeout(60)
    yield
    set_timeout(10)


@pytest.fixture
def measured(rank_device: torch.device, monkeypatch) -> Iterator[Callable[..., None]]:
    """Called as measured((op, columns, features, choices), …) it puts these in place of `crossovers.json` and the tuned table."""
    device = auto.Device.of(rank_device)._asdict()

    def plant(*entries: tuple, dtype: str = "float32") -> None:
        about = dict(**device, dtype=dtype, ranks=dist.get_world_size())
        names = ("op", "columns", "features", "choices")
        table = tuple({**about, **dict(zip(names, entry, strict=True))} for entry in entries)
        monkeypatch.setattr(auto, "table", lambda: table)
        monkeypatch.setattr(auto, "entries_on_all_ranks", lambda *_: ())
        auto._cached_lookup.cache_clear()

    yield plant
    auto._cached_lookup.cache_clear()
