"""The tuned table over ranks: what decides which collective runs is what all ranks have alike, else what is shipped."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from tests.dist.one_sided_matmuls import draw
from tests.tables.records import FUSED, LINEAR, read_from, record, save
from torch_fdattn import tables, tune
from torch_fdattn.dist import (
    SequenceShards,
    chosen_strategy,
    matmul_all_reduce,
    ring_attention,
)
from torch_fdattn.dist.decode import auto
from torch_fdattn.dist.ring_attention.auto import nearest
from torch_fdattn.dist.tensor_parallel.auto import ALL_REDUCE, GATHER, LAYER, SCATTER
from torch_fdattn.dist.tuned import entries_on_all_ranks
from torch_fdattn.ops.library import INTERPRET, launches
from torch_fdattn.tables.sections import SECTIONS


@pytest.fixture
def ranks(group, rank_device) -> int:
    if rank_device.type == "cpu" and not INTERPRET:
        pytest.skip("tests a kernel: needs a CUDA device or TRITON_INTERPRET=1")
    if dist.get_world_size() == 1:
        pytest.skip("needs 2 ranks")
    return dist.get_world_size()


def new_group() -> str:
    """Of all ranks, which was never asked."""
    return dist.new_group(list(range(dist.get_world_size()))).group_name


@pytest.fixture
def planted(ranks, rank_device, tmp_path):
    """Called as planted(crossover) it makes this rank's file one with this crossover, for a with block."""

    def plant(fused_rows: int | None, choices=LINEAR["choices"]):
        fused = [] if fused_rows is None else [FUSED | dict(ranks=ranks, fused_rows=fused_rows)]
        linear = LINEAR | dict(ranks=ranks, choices=choices)
        own = record(rank_device, dist_decode=fused, tensor_parallel=[linear])
        return read_from(save(tmp_path / f"tables-{dist.get_rank()}.json", own))

    return plant


def test_ranks_with_the_same_entries_use_them(planted, ranks, rank_device) -> None:
    like, name = draw(1, device=rank_device), new_group()
    with planted(8):
        assert entries_on_all_ranks("dist_decode", name, like) == (FUSED | dict(ranks=ranks, fused_rows=8),)  # fmt: skip


def test_ranks_with_different_files_use_what_is_shipped(planted, rank_device) -> None:
    like = draw(1, device=rank_device)
    for crossover in (8 + dist.get_rank(), None if dist.get_rank() else 8):
        with planted(crossover):
            assert entries_on_all_ranks("dist_decode", new_group(), like) == ()


def test_decode_chooses_alike(planted, rank_device, monkeypatch) -> None:
    """Whether kernels can run is not the question here: on CPUs `auto` never asks for one-sided exchanges."""
    monkeypatch.setattr(auto, "_maps_peers", lambda *_: True)
    q = torch.zeros(4, 4, 1, 16, device=rank_device)  # 16 rows
    with read_from(""):
        assert chosen_strategy(q, new_group()) == "fused"
    with planted(8):
        assert chosen_strategy(q, new_group()) == "two_shot"
        assert chosen_strategy(q, new_group(), batch_invariant=True) == "fused"
    with planted(8 if dist.get_rank() else 4):  # both would take two_shot, but 6 rows not alike
        assert chosen_strategy(q, new_group()) == "fused"


@torch.no_grad()
def test_matmuls_choose_alike(planted, rank_device, ranks) -> None:
    x, weight = draw(4, 8, device=rank_device), draw(6, 8, device=rank_device)

    def one_sided() -> bool:
        before = launches["tensor_parallel/low_latency"]
        y = matmul_all_reduce(x, weight, new_group())
        torch.testing.assert_close(y, ranks * F.linear(x, weight), atol=1e-5, rtol=1e-5)
        return launches["tensor_parallel/low_latency"] > before

    with read_from(""):
        assert not one_sided()
    with planted(8):
        assert one_sided()
    with planted(8, [[4, "nccl"]] if dist.get_rank() else LINEAR["choices"]):
        assert not one_sided()


@torch.no_grad()
def test_ring_attention_chooses_alike(ranks, rank_device, tmp_path) -> None:
    """By the nearest number of tokens, of what is shipped where the file has nothing; where ranks' files differ, `ring`."""
    shards = SequenceShards.zigzag(8 * ranks, ranks)
    q = draw(1, 2, 8, 32, device=rank_device)
    tokens = 8 * ranks

    def chosen(*choices: list, group: str | None = None, dtype: torch.dtype = q.dtype) -> str:
        entries = [dict(ranks=ranks, choices=list(choices))] if choices else []
        own = record(rank_device, ring_attention=entries)
        before = Counter(launches)
        with read_from(save(tmp_path / f"tables-{dist.get_rank()}.json", own)):
            given = [q.to(dtype)] * 3
            found, _ = ring_attention(
                *given, group or new_group(), shards=shards, causal=True, strategy="auto"
            )
        expected, _ = ring_attention(*given, dist.group.WORLD, shards=shards, causal=True)
        torch.testing.assert_close(found, expected)
        return "one_sided" if launches["ring_attention/one_sided_gather"] > before["ring_attention/one_sided_gather"] else "another"  # fmt: skip

    near, far = [tokens, "one_sided"], [64 * tokens, "all_gather"]
    assert chosen(near, far) == "one_sided"
    assert chosen([64 * tokens, "one_sided"], [tokens, "ring"]) == "another"
    with tables.shipped_tables_only():
        shipped = nearest(tables.entries("ring_attention", tables.Device.of(rank_device)), ranks, tokens)  # fmt: skip
    assert chosen() == ("one_sided" if shipped == "one_sided" else "another")
    if rank_device.type == "cpu":  # float64 runs there only
        assert chosen(near, dtype=torch.float64) == "another"
    assert chosen([tokens + dist.get_rank(), "one_sided"]) == "another"


@pytest.mark.parametrize(
    ("measured", "total", "expected"),
    [
        ([], 64, "ring"),
        ([[64, "all_gather"]], 0, "ring"),
        ([[64, "all_gather"], [4096, "one_sided"]], 500, "all_gather"),
        ([[64, "all_gather"], [4096, "one_sided"]], 512, "one_sided"),
        ([[64, "all_gather"], [4096, "one_sided"]], 1 << 20, "one_sided"),
    ],
)
def test_the_nearest_number_of_tokens_counts(group, measured, total, expected) -> None:
    entries = [dict(ranks=2, choices=measured), dict(ranks=4, choices=[[total + 1, "star"]])]
    assert nearest(entries, 2, total) == expected


def test_a_broken_file_is_refused_on_all_ranks(rank_device, ranks, tmp_path) -> None:
    """By name on its rank; the others do not wait for it, at the first question and at later ones."""
    like, name = draw(1, device=rank_device), new_group()
    path = tmp_path / "tables.json"
    path.write_text("{")
    first = dist.get_rank() == 0
    said = r"tables\.json is no JSON" if first else "got a broken file on another rank"
    with read_from(path if first else ""):
        for _ in range(2):
            with pytest.raises(ValueError, match=said):
                entries_on_all_ranks("dist_decode", name, like)
    with read_from(path), pytest.raises(ValueError, match=r"tables\.json is no JSON"):
        entries_on_all_ranks("dist_decode", new_group(), like)


def test_ranks_measure_one_table(ranks, rank_device, tmp_path) -> None:
    """The quick sections over ranks: the same entries on all of them, which `auto` of these ranks then takes."""
    notes: list[str] = []
    session = tune.Session(rank_device, dist.group.WORLD, quick=True, note=notes.append)
    own = tune.tune(session, list(tune.OVER_RANKS), seconds=60)
    assert not [text for text in notes if "time is up" in text]
    gathered: list = [None] * ranks
    dist.all_gather_object(gathered, {name: own[name] for name in tune.OVER_RANKS})
    assert all(theirs == gathered[0] for theirs in gathered)
    assert [x["ranks"] for x in own["dist_decode"]] == [ranks]
    assert [x["ranks"] for x in own["ring_attention"]] == [ranks]
    assert {x["op"] for x in own["tensor_parallel"]} == {GATHER, SCATTER, ALL_REDUCE, LAYER}
    path = tmp_path / "tables.json"
    tables.write(path, own)
    with read_from(path):
        found = entries_on_all_ranks("tensor_parallel", new_group(), draw(1, device=rank_device))
        # Beside them, on a GPU that has any, those of other keys that are shipped.
        assert [x for x in found if x in own["tensor_parallel"]] == own["tensor_parallel"]
        key_of = SECTIONS["tensor_parallel"].key_of
        assert len({key_of(x) for x in found}) == len(found)
