"""The tuned table: what was measured on this machine, read from one JSON file before the tables that are shipped.

`fdattn tune` writes the file (`torch_fdattn/tune`). Here is its form, and what `auto` and the launchers ask of it.
"""

from __future__ import annotations

from torch_fdattn.tables.device import Device
from torch_fdattn.tables.file import default_path, is_expected, read, write
from torch_fdattn.tables.lookup import digest, entries, forget, index, shipped_tables_only

__all__ = [
    "Device",
    "default_path",
    "digest",
    "entries",
    "forget",
    "index",
    "is_expected",
    "read",
    "shipped_tables_only",
    "write",
]
