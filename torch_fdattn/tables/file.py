"""The tuned table's file: where it lies, read with errors that name path and field, written whole or not at all.

{"schema": 1, "machines": [{"gpu": …, "architecture": …, "triton": …, "torch_fdattn": …, "torch": …, "count": …, "date": …,
"attention_tiles": [entry, …], "decode_splits": […], "dist_decode": […], "ring_attention": […],
"tensor_parallel": […]}, …]}

One file may hold several machines, so that a shared home or a repository can: a record speaks for its GPU, and for its
versions of triton and torch_fdattn.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from torch_fdattn.tables.sections import (
    MACHINE,
    MACHINE_KEYS,
    SECTIONS,
    Field,
    unsupported_choice,
)

SCHEMA = 1
#: Names the file; empty: none is read.
VARIABLE = "TORCH_FDATTN_TABLES"


def default_path() -> Path | None:
    """TORCH_FDATTN_TABLES, else torch_fdattn/tables.json in the user's cache folder; None where the variable is empty, and
    for a user who has no home.
    """
    given = os.environ.get(VARIABLE)
    if given is not None:
        return Path(os.path.expanduser(given)).absolute() if given else None
    # As its standard has it, a relative XDG_CACHE_HOME does not count.
    for cache in (os.environ.get("XDG_CACHE_HOME", ""), os.path.expanduser("~/.cache")):
        if os.path.isabs(cache):
            return Path(cache) / "torch_fdattn" / "tables.json"
    return None


def is_expected(path: Path) -> bool:
    """Whether there is such a file; that of the cache folder may be missing, one that the variable names must not.

    Raises:
        ValueError: TORCH_FDATTN_TABLES names no file.
    """
    if os.path.exists(path):  # False, too, where the user may not look
        return True
    if os.environ.get(VARIABLE):
        raise ValueError(
            f"{VARIABLE} must name a file that `fdattn tune` wrote, or be empty for none, got {path}: no such file"
        )
    return False


def read(path: Path) -> list[dict]:
    """The records of a file, one a machine, checked; none where there is no file.

    Raises:
        ValueError: what is there is not such a file; it names the path and the field.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return []
    except (OSError, UnicodeDecodeError) as error:
        raise _error(path, f"cannot be read ({error})") from None
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _error(path, f"is no JSON ({error})") from None
    if not isinstance(document, dict) or "machines" not in document:
        raise _error(path, "must be an object with schema and machines")
    if document.get("schema") != SCHEMA:
        raise _error(path, f"must have schema {SCHEMA}, got {document.get('schema')!r}")
    records = document["machines"]
    if not isinstance(records, list):
        raise _error(path, f"machines must be a list, got {type(records).__name__}")
    for i, record in enumerate(records):
        _check_record(path, f"machines[{i}]", record)
    return records


def write(path: Path, record: dict) -> None:
    """Puts a machine's record into the file: its entries in the place of those of the same keys, all others stay.

    Raises:
        ValueError: the file is there and is no such file, or the record is not as it should be.
    """
    _check_record(path, "the new record", record)
    path.parent.mkdir(parents=True, exist_ok=True)
    with _one_writer(path):
        records = read(path)
        old = next((x for x in records if is_of_machine(x, record)), {})
        merged = {name: record[name] for name in MACHINE}
        for name in SECTIONS:
            if name in old or name in record:
                merged[name] = merge(name, old.get(name, []), record.get(name, []))
        records = [*(x for x in records if x is not old), merged]
        partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
        try:
            partial.write_text(_text(records), encoding="utf-8")
            partial.replace(path)  # whole or not at all
        except OSError:
            partial.unlink(missing_ok=True)
            raise


@contextlib.contextmanager
def _one_writer(path: Path) -> Iterator[None]:
    """One process at a time, or what another one has just written would be lost.

    Without fcntl (Windows) nothing waits: each file is one that a process has written, and the last one stays.
    """
    try:
        import fcntl
    except ImportError:
        yield
        return
    with path.with_name(f"{path.name}.lock").open("w") as lock:
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(lock, fcntl.LOCK_EX)  # until the file is closed
        yield


def merge(section: str, old: list[dict], new: list[dict]) -> list[dict]:
    """The entries of a section, new ones in the place of old ones of the same keys."""
    key_of = SECTIONS[section].key_of
    keys = {key_of(entry) for entry in new}
    return [*(entry for entry in old if key_of(entry) not in keys), *new]


def is_of_machine(record: Mapping, machine: Mapping) -> bool:
    """Whether a record speaks for a machine: its GPU, and the versions that decide what kernels become."""
    return all(record[name] == machine[name] for name in MACHINE_KEYS)


def _check_record(path: Path, where: str, record: object) -> None:
    if not isinstance(record, dict):
        raise _error(path, f"{where} must be an object, got {type(record).__name__}")
    _check_fields(path, where, MACHINE, record, (*MACHINE, *SECTIONS))
    for name, section in SECTIONS.items():
        entries = record.get(name, [])
        if not isinstance(entries, list):
            raise _error(path, f"{where}.{name} must be a list, got {type(entries).__name__}")
        keys = set()
        for i, entry in enumerate(entries):
            at = f"{where}.{name}[{i}]"
            if not isinstance(entry, dict):
                raise _error(path, f"{at} must be an object, got {type(entry).__name__}")
            _check_fields(path, at, section.fields, entry, tuple(section.fields))
            if name == "tensor_parallel" and (choice := unsupported_choice(entry)):
                raise _error(path, f"{at}.choices: {entry['op']} has no {choice!r}")
            if (key := section.key_of(entry)) in keys:
                raise _error(path, f"{at} has the keys of an entry before it")
            keys.add(key)


def _check_fields(
    path: Path, where: str, fields: Mapping[str, Field], given: dict, names: tuple[str, ...]
) -> None:
    for name, field in fields.items():
        if name not in given:
            raise _error(path, f"{where} has no {name}")
        if not field.accepts(given[name]):
            raise _error(path, f"{where}.{name} must be {field.expected}, got {given[name]!r}")
    if unexpected := set(given) - set(names):
        raise _error(path, f"{where} has fields of no table: {', '.join(sorted(unexpected))}")


def _text(records: list[dict]) -> str:
    """JSON with a line an entry, which a diff shows."""
    machines = []
    for record in records:
        lines = [f"{json.dumps(name)}: {json.dumps(record[name])}" for name in MACHINE]
        for name in (name for name in SECTIONS if name in record):
            rows = ",\n".join(f"   {json.dumps(entry)}" for entry in record[name])
            lines.append(f"{json.dumps(name)}: [\n{rows}\n  ]" if rows else f"{json.dumps(name)}: []")  # fmt: skip
        machines.append(" {\n  " + ",\n  ".join(lines) + "\n }")
    return f'{{"schema": {SCHEMA}, "machines": [\n' + ",\n".join(machines) + "\n]}\n"


def _error(path: Path, what: str) -> ValueError:
    return ValueError(
        f"the tuned table {path} {what}; `fdattn tune` writes one: remove the file or name another one in {VARIABLE} "
        "(empty: none)"
    )
