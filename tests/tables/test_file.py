"""The tuned table's file: where it lies, what is read and refused, and that writing replaces what was measured alone."""

from __future__ import annotations

import json
import multiprocessing
import sys
from pathlib import Path

import pytest

from tests.tables.records import FUSED, LINEAR, SPLITS, TILE, read_from, record, save
from torch_fdattn import tables

CPU = tables.Device("cpu", "cpu")


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "new" / "tables.json"
    assert tables.read(path) == []
    tables.write(path, record())
    assert tables.read(path) == [record()]
    names = {x.name for x in path.parent.iterdir()}
    assert names == {"tables.json", "tables.json.lock"}  # nothing partial is left


def test_new_entries_replace_those_of_the_same_keys_alone(tmp_path: Path) -> None:
    path = tmp_path / "tables.json"
    other = record(gpu="another")
    tables.write(path, other)
    tables.write(path, record(dist_decode=[FUSED, FUSED | {"ranks": 4}]))
    new = {k: v for k, v in record(date="later").items() if k not in ("tensor_parallel", "attention_tiles")}  # fmt: skip
    tables.write(path, new | {"dist_decode": [FUSED | {"fused_rows": 512}]})
    first, second = tables.read(path)
    assert first == other
    assert second["date"] == "later"
    assert (second["attention_tiles"], second["tensor_parallel"]) == ([TILE], [LINEAR])
    assert {x["ranks"]: x["fused_rows"] for x in second["dist_decode"]} == {2: 512, 4: 8}


def test_a_write_that_fails_leaves_the_file(tmp_path: Path) -> None:
    path = tmp_path / "tables.json"
    tables.write(path, record())
    before = path.read_bytes()
    with pytest.raises(
        ValueError, match=r"the new record\.dist_decode\[0\]\.ranks must be an integer"
    ):
        tables.write(path, record(dist_decode=[FUSED | {"ranks": 0}]))  # fmt: skip
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "is no JSON"),
        ("[]", "must be an object with schema and machines"),
        ('{"tiles": {}}', "must be an object with schema and machines"),  # autotune's file
        ('{"schema": 2, "machines": []}', "must have schema 1, got 2"),
        ('{"schema": 1, "machines": {}}', "machines must be a list, got dict"),
        ('{"schema": 1, "machines": [1]}', r"machines\[0\] must be an object, got int"),
        ('{"schema": 1, "machines": [{}]}', r"machines\[0\] has no gpu"),
        (b"\xff", "cannot be read"),
        ("[" * 100_000, "is no JSON"),
    ],
)
def test_other_files_are_named(tmp_path: Path, text: str | bytes, says: str) -> None:
    path = tmp_path / "tables.json"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ValueError, match=says) as error:
        tables.read(path)
    assert str(path) in str(error.value)
    with pytest.raises(ValueError, match=says):  # nor is a foreign file written over
        tables.write(path, record())
    with read_from(path), pytest.raises(ValueError, match=says):
        tables.entries("attention_tiles", CPU)


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        (dict(attention_tiles=[TILE | {"tile": "64x32"}]), r"attention_tiles\[0\]\.tile must be a tile such as"),
        (dict(attention_tiles=[TILE | {"kernel": "dmask"}]), r"\.kernel must be one of forward, dkdv, dq"),
        (dict(attention_tiles=[TILE, TILE]), r"attention_tiles\[1\] has the keys of an entry before it"),
        (dict(attention_tiles={}), r"machines\[0\]\.attention_tiles must be a list, got dict"),
        (dict(attention_tiles=[TILE | {"tile": f"{'9' * 5000}x32w1s1"}]), r"attention_tiles\[0\]\.tile must be a tile such as"),
        (dict(decode_splits=[SPLITS | {"kv_len": 10**400}]), r"decode_splits\[0\]\.kv_len must be an integer"),
        (dict(decode_splits=[SPLITS | {"splits_per_sm": True}]), r"splits_per_sm must be a number above 0"),
        (dict(decode_splits=[SPLITS | {"paged": 1}]), r"paged must be true or false, got 1"),
        (dict(dist_decode=[{"ranks": 2}]), r"dist_decode\[0\] has no fused_rows"),
        (dict(dist_decode=[FUSED | {"rows": 2}]), r"dist_decode\[0\] has fields of no table: rows"),
        (dict(tensor_parallel=[LINEAR | {"choices": []}]), r"choices must be pairs"),
        (dict(tensor_parallel=[LINEAR | {"choices": [[4, "fused"]]}]), "matmul_all_reduce has no 'fused'"),
        (dict(ring=[]), r"machines\[0\] has fields of no table: ring"),
        (dict(triton=""), r"machines\[0\]\.triton must be a text"),
    ],
)  # fmt: skip
def test_every_field_is_checked(tmp_path: Path, changed: dict, says: str) -> None:
    path = save(tmp_path / "tables.json", record(**changed))
    with pytest.raises(ValueError, match=says):
        tables.read(path)


def test_where_the_file_lies(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.delenv("TORCH_FDATTN_TABLES")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert tables.default_path() == tmp_path / "torch_fdattn" / "tables.json"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert tables.default_path() == Path.home() / ".cache" / "torch_fdattn" / "tables.json"
    monkeypatch.setenv("TORCH_FDATTN_TABLES", str(tmp_path / "other.json"))
    assert tables.default_path() == tmp_path / "other.json"
    monkeypatch.setenv("TORCH_FDATTN_TABLES", "")
    assert tables.default_path() is None


def test_users_without_a_home_and_folders_that_are_closed(monkeypatch, tmp_path: Path) -> None:
    """There attention still runs, by the shipped tables."""
    monkeypatch.delenv("TORCH_FDATTN_TABLES")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    with monkeypatch.context() as patch:
        patch.setattr("os.path.expanduser", lambda path: path)  # as for a user whom nobody knows
        assert tables.default_path() is None
        tables.forget()
        assert tables.entries("dist_decode", CPU) == ()
        patch.setenv("XDG_CACHE_HOME", "relative")  # to what, its standard does not say
        assert tables.default_path() is None

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path))
        patch.setattr("os.stat", refuse)
        tables.forget()
        assert tables.entries("dist_decode", CPU) == ()
    monkeypatch.setenv("TORCH_FDATTN_TABLES", "~nobody-of-this-name/tables.json")
    tables.forget()
    with pytest.raises(ValueError, match="no such file"):
        tables.entries("dist_decode", CPU)


def test_a_folder_in_the_place_of_the_file(tmp_path: Path) -> None:
    with read_from(tmp_path), pytest.raises(ValueError, match="cannot be read"):
        tables.entries("dist_decode", CPU)
    with pytest.raises(ValueError, match="cannot be read"):
        tables.write(tmp_path, record())


def test_processes_that_write_at_once(tmp_path: Path) -> None:
    """No entry of any of them is lost."""
    path, context = tmp_path / "tables.json", multiprocessing.get_context("fork")
    writers = [context.Process(target=_write_ten, args=(path, first)) for first in (2, 12)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
        assert writer.exitcode == 0
    assert {x["ranks"] for x in tables.read(path)[0]["dist_decode"]} == set(range(2, 22))


@pytest.mark.parametrize("exists", [False, True])
def test_without_fcntl(tmp_path: Path, monkeypatch, exists) -> None:
    """As on Windows: the table and nothing else, whether one was there or not."""
    path = tmp_path / "tables.json"
    if exists:
        tables.write(path, record(dist_decode=[FUSED | {"ranks": 8}]))
        path.with_name(f"{path.name}.lock").unlink()
    monkeypatch.setitem(sys.modules, "fcntl", None)
    tables.write(path, record(dist_decode=[FUSED]))
    ranks = {entry["ranks"] for entry in tables.read(path)[0]["dist_decode"]}
    assert ranks == {FUSED["ranks"], *([8] if exists else [])}
    assert [x.name for x in tmp_path.iterdir()] == [path.name]


def _write_ten(path: Path, first: int) -> None:
    for ranks in range(first, first + 10):
        tables.write(path, record(dist_decode=[FUSED | {"ranks": ranks}]))


def test_a_file_that_was_named_must_be_there(tmp_path: Path, monkeypatch) -> None:
    with read_from(tmp_path / "none.json"), pytest.raises(ValueError, match=r"none\.json: no such file"):  # fmt: skip
        tables.entries("dist_decode", CPU)
    with read_from(""):
        assert tables.entries("dist_decode", CPU) == ()
        monkeypatch.delenv("TORCH_FDATTN_TABLES")
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # the default may be missing
        tables.forget()
        assert tables.entries("dist_decode", CPU) == ()


@pytest.mark.parametrize("name", ["gpu", "architecture", "triton", "torch_fdattn"])
def test_other_machines_and_versions_are_not_used(tmp_path: Path, name: str) -> None:
    path = save(tmp_path / "tables.json", record(**{name: "another"}))
    with read_from(path):
        assert tables.entries("dist_decode", CPU) == ()
    save(path, record(**{name: "another"}), record())
    with read_from(path):
        assert tables.entries("dist_decode", CPU) == (FUSED,)


def test_it_is_read_once_and_not_while_it_is_measured(tmp_path: Path) -> None:
    path = save(tmp_path / "tables.json", record())
    with read_from(path):
        assert tables.entries("dist_decode", CPU) == (FUSED,)
        path.write_text("{")
        assert tables.entries("dist_decode", CPU) == (FUSED,)
        with tables.shipped_tables_only():
            assert tables.entries("dist_decode", CPU) == ()
        assert tables.entries("dist_decode", CPU) == (FUSED,)


def test_digests_tell_entries_apart(tmp_path: Path) -> None:
    found = []
    for fused in ([FUSED], [FUSED | {"ranks": 4}, FUSED], [FUSED, FUSED | {"ranks": 4}], []):
        with read_from(save(tmp_path / "tables.json", record(dist_decode=fused))):
            found.append(tables.digest("dist_decode", CPU))
    assert found[1] == found[2]
    assert len(set(found)) == 3


def test_a_file_is_a_line_an_entry(tmp_path: Path) -> None:
    path = tmp_path / "tables.json"
    tables.write(path, record())
    lines = path.read_text().splitlines()
    assert json.dumps(TILE) in {line.strip().rstrip(",") for line in lines}
