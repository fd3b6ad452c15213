"""What launchers and `auto` ask of the tuned table: this machine's entries, read once in a process.

Nothing is read before the first question. A record of another GPU, triton or torch_fdattn is not used: what is fast with
one compiler may be slow with another. `shipped.json`, which `fdattn tune` wrote on machines of ours, speaks for its GPUs
whatever the versions, where the user's own file has no entry of the same keys.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.util
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch_fdattn.tables.device import Device
from torch_fdattn.tables.file import default_path, is_expected, is_of_machine, read
from torch_fdattn.tables.sections import SECTIONS
from torch_fdattn.version import __version__

_log = logging.getLogger("torch_fdattn")
SHIPPED = Path(__file__).with_name("shipped.json")

#: Of each section the entries, by the values of their keys.
_Sections = dict[str, dict[tuple, dict[str, Any]]]


class _TablesState:
    """Whether the user's file counts: not while `fdattn tune` measures what is to go into it."""

    def __init__(self) -> None:
        self.shipped_only = False


_state = _TablesState()


def entries(section: str, device: Device) -> tuple[dict[str, Any], ...]:
    """The entries that were measured on such a device: of the user's file, and of `shipped.json` where that has none.

    Raises:
        ValueError: the file is broken, or TORCH_FDATTN_TABLES names none; it names the path and the field.
    """
    return tuple(index(section, device).values())


def index(section: str, device: Device) -> dict[tuple, dict[str, Any]]:
    """`entries` by the values of their section's keys."""
    record = _shipped(device) if _state.shipped_only else _record(device)
    return record.get(section, {})


def digest(section: str, device: Device) -> str:
    """64 bits of the entries, the same in every process that has the same ones; empty where there are none."""
    return _digest(section, device, _state.shipped_only) if index(section, device) else ""


@functools.cache
def _digest(section: str, device: Device, shipped_only: bool) -> str:
    text = json.dumps(sorted(json.dumps(x, sort_keys=True) for x in entries(section, device)))
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


@contextlib.contextmanager
def shipped_tables_only() -> Iterator[None]:
    """Inside it the user's file is not asked, by any thread."""
    before, _state.shipped_only = _state.shipped_only, True
    try:
        yield
    finally:
        _state.shipped_only = before


def forget() -> None:
    """Makes the next question read the file anew; prepared launches keep what they were made with."""
    _record.cache_clear()
    _digest.cache_clear()


@functools.cache
def _record(device: Device) -> _Sections:
    """This machine's entries: those of the user's file in the place of shipped ones of the same keys."""
    shipped, path = _shipped(device), default_path()
    if path is None or not is_expected(path):
        return shipped
    machine = {**device._asdict(), "triton": triton_version(), "torch_fdattn": __version__}
    records = read(path)
    own = next((x for x in records if is_of_machine(x, machine)), None)
    if own is None:
        _log.info("%s has no record of %s: the shipped tables are used", path, machine)
        return shipped
    found = _by_keys(own)
    return {name: shipped.get(name, {}) | found[name] for name in SECTIONS}


@functools.cache
def _shipped(device: Device) -> _Sections:
    for record in read(SHIPPED):
        if (record["gpu"], record["architecture"]) == device:
            return _by_keys(record)
    return {}


def _by_keys(record: dict) -> _Sections:
    return {
        name: {section.key_of(entry): entry for entry in record.get(name, [])}
        for name, section in SECTIONS.items()
    }


def triton_version() -> str:
    """Empty where triton is not installed: no record is of that machine."""
    if importlib.util.find_spec("triton") is None:
        return ""
    import triton

    return str(triton.__version__)
