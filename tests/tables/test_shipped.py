"""The table that is shipped, beside a user's own."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tables.records import SPLITS, read_from, record, save
from torch_fdattn import tables
from torch_fdattn.tables.lookup import SHIPPED

_RECORDS = tables.read(SHIPPED)


def device_of(shipped: dict) -> tables.Device:
    return tables.Device(shipped["gpu"], shipped["architecture"])


def test_one_record_a_gpu() -> None:
    assert _RECORDS
    assert len({device_of(x) for x in _RECORDS}) == len(_RECORDS)


@pytest.mark.parametrize("shipped", _RECORDS, ids=lambda x: x["gpu"])
def test_its_entries_are_asked_where_a_user_has_none(tmp_path: Path, shipped: dict) -> None:
    device = device_of(shipped)
    with read_from(""):
        assert list(tables.entries("decode_splits", device)) == shipped["decode_splits"]
        assert tables.entries("decode_splits", device._replace(gpu="another")) == ()

    replaced = shipped["decode_splits"][0] | {"splits_per_sm": 0.125}
    own = record(decode_splits=[replaced, SPLITS], **device._asdict())
    with read_from(save(tmp_path / "tables.json", own)):
        expected = [replaced, *shipped["decode_splits"][1:], SPLITS]
        assert list(tables.entries("decode_splits", device)) == expected
        with tables.shipped_tables_only():
            assert list(tables.entries("decode_splits", device)) == shipped["decode_splits"]
            assert tables.digest("decode_splits", device)
