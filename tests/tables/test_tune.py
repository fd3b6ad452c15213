"""`fdattn tune`: what it measures, refuses and writes, and how it decides; interpreted where kernels run."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
import torch

pytest.importorskip("typer", reason="needs the extra cli")
pytest.importorskip("rich", reason="needs the extra cli")

from tests.cli.commands import invoke, run
from tests.tables.records import read_from, record, save
from torch_fdattn import tables, tune
from torch_fdattn.dist.decode.auto import FUSED_ROWS
from torch_fdattn.ops.decode.op import decode
from torch_fdattn.tune import attention_tiles, decode_splits, dist_decode
from torch_fdattn.tune.linears import LinearChoices, Shape, fastest, variants
from torch_fdattn.tune.timing import Clock

CPU = torch.device("cpu")


@pytest.mark.interpreter
def test_a_quick_run_writes_a_table_that_is_read(kernel_device, tmp_path: Path) -> None:
    path = save(tmp_path / "tables.json", record("cpu", gpu="another"))
    with read_from(path):
        done = invoke("tune", "--quick", "--device", kernel_device, "--out", str(path))
        assert done.exit_code == 0, done.output
        assert f"{path}: 9 entries of attention_tiles, 2 entries of decode_splits" in done.stdout
        other, own = tables.read(path)
        assert other == record("cpu", gpu="another")
        assert {x["kernel"] for x in own["attention_tiles"]} == {"forward", "dkdv", "dq"}
        assert {x["mask"] for x in own["attention_tiles"]} == {"masked", "unmasked", "short_window"}
        assert [x["paged"] for x in own["decode_splits"]] == [False, True]
        tables.forget()
        device = tables.Device.of(torch.device(kernel_device))
        found = tables.entries("attention_tiles", device)  # those of this GPU that are shipped, too
        assert all(entry in found for entry in own["attention_tiles"])
        q = torch.randn(1, 2, 1, 16, dtype=torch.float16, device=kernel_device)
        k = torch.randn(1, 1, 256, 16, dtype=torch.float16, device=kernel_device)
        assert decode(q, k, k)[0].isfinite().all()


def test_a_cpu_without_the_interpreter_is_refused(tmp_path: Path) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    out = tmp_path / "tables.json"
    done = run("-m", "torch_fdattn", "tune", "--device", "cpu", "--out", str(out), env=environment)
    assert done.returncode == 2
    assert done.stderr.startswith("fdattn: nothing is to be tuned on a CPU")
    assert not out.exists()


@pytest.mark.interpreter
def test_the_interpreter_runs_the_quick_form_alone() -> None:
    done = invoke("tune", "--device", "cpu")
    assert done.exit_code == 2
    assert "both TRITON_INTERPRET=1 and --quick" in done.stderr


@pytest.mark.interpreter
@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--section", "tiles"], "--section must be of attention_tiles, .*, got 'tiles'"),
        (["--section", ","], "--section must be of"),
        (["--section", "tensor_parallel"], "tensor_parallel is measured over ranks: start it with torchrun"),
        ([], "--out must name a file, as TORCH_FDATTN_TABLES is empty"),
        (["--out", "{folder}"], r"cannot be read \(.*directory"),
        (["--out", "{folder}/other.json/t.json"], "--out .*other.json/t.json"),
        (["--out", "{folder}/other.json"], r"other\.json must be an object with schema and machines"),
    ],
)  # fmt: skip
def test_what_is_asked_for_is_checked_first(kernel_device, tmp_path, options, says) -> None:
    (tmp_path / "other.json").write_text('{"tiles": {}}')
    words = [word.format(folder=tmp_path) for word in options]
    done = invoke("tune", "--quick", "--device", kernel_device, *words)
    assert done.exit_code == 2
    assert re.search(says, done.stderr), done.stderr


@pytest.mark.interpreter
def test_what_the_time_does_not_reach_is_said(kernel_device) -> None:
    notes: list[str] = []
    session = tune.Session(torch.device(kernel_device), quick=True, note=notes.append)
    made = tune.tune(session, list(tune.ONE_DEVICE), seconds=0)
    assert made["attention_tiles"] == made["decode_splits"] == []
    assert notes == [
        "attention_tiles: time is up after 0 of 3 kinds of calls",
        "decode_splits: time is up after 0 of 2 cases",
    ]


@pytest.mark.interpreter
def test_kernels_of_fixed_tiles_are_left_out(kernel_device, monkeypatch) -> None:
    notes: list[str] = []
    session = tune.Session(torch.device(kernel_device), quick=True, note=notes.append)
    monkeypatch.setattr(attention_tiles.dispatch, "choose", lambda *_: "hopper")
    assert attention_tiles.measure(session) == []
    assert len(notes) == 6
    assert "D16 masked runs the kernel hopper" in notes[0]


def test_a_choice_must_win_by_more_than_the_clocks_noise() -> None:
    told: list[tune.Measurement] = []
    session = tune.Session(CPU, report=told.append)
    assert session.choose("s", "c", "a", {"a": 100.0, "b": 99.0}) == "a"
    assert session.choose("s", "c", "a", {"a": 100.0, "b": 90.0}) == "b"
    assert session.choose("s", "c", "a", {"b": 90.0}) == "b"  # what is shipped raised
    assert told[1] == ("s", "c", "a", "b", 100.0, 90.0)


@pytest.mark.interpreter
def test_what_cannot_be_timed_is_said(kernel_device, monkeypatch) -> None:
    notes: list[str] = []
    session = tune.Session(torch.device(kernel_device), quick=True, note=notes.append)
    monkeypatch.setattr(session.clock, "compare", lambda calls: {})
    assert decode_splits.measure(session) == []
    assert len(notes) == 2
    assert notes[0].endswith("is left out: nothing could be timed")


def test_what_raises_is_not_compared() -> None:
    def fails() -> None:
        raise RuntimeError("out of resource")

    times = Clock(CPU).compare({"good": [lambda: None], "bad": [fails]})
    assert list(times) == ["good"]


@pytest.mark.parametrize(
    ("won", "limit"),
    [
        ({16: 0, 32: 0, 1024: 1, 2048: 1}, 32),
        ({16: 0, 32: 1, 64: 0, 1024: 1}, 16),  # two limits are as good: the first
        ({16: 1, 32: 1}, 0),
        ({16: 0, 32: 0}, FUSED_ROWS),  # nothing says how far it goes
        ({16: 0, 4096: 0}, 4096),
    ],
)
def test_the_crossover_of_fused_and_two_shot(won: dict[int, int], limit: int) -> None:
    times = {rows: dict(fused=1.0 + by, two_shot=2.0 - by) for rows, by in won.items()}
    assert dist_decode.crossover(times) == limit


def test_linears_choose_the_fastest_and_layers_by_what_was_measured() -> None:
    assert fastest("all_gather_matmul", {"fused": 2.0, "copy_engine": 1.0}) == "copy_engine"
    assert fastest("matmul_all_reduce", {}) == "nccl"
    assert variants("matmul_all_reduce", 129, 2, False) == ["nccl", "low_latency"]
    assert "fused" not in variants("all_gather_matmul", 3, 2, True)
    choices = LinearChoices(2)
    choices.add("all_gather_matmul", Shape("qkv", 8, 4, ()), 2, "fused", 1.0, 0.5)
    (entry,) = choices.entries()
    assert (entry["columns"], entry["features"], entry["choices"]) == (8, 4, [(2, "fused")])


def test_a_record_names_this_machine() -> None:
    made = tune.tune(tune.Session(CPU), [], seconds=1)
    assert tables.file.is_of_machine(record(), made)
    assert set(made) == set(tables.file.MACHINE)
