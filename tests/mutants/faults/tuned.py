"""Faults of the tuned table: whose entries are used, by whom, and what is written."""

from __future__ import annotations

from tests.mutants.faults.fault import Fault
from tests.mutants.faults.runs import TUNED, TUNED_RANKS

FAULTS = (
    Fault(
        "another triton's record is used", "torch_fdattn/tables/sections.py",
        'MACHINE_KEYS = ("gpu", "architecture", "triton", "torch_fdattn")',
        'MACHINE_KEYS = ("gpu", "architecture", "torch_fdattn")', TUNED,
    ),
    Fault(
        "a run drops what it has not measured", "torch_fdattn/tables/file.py",
        "return [*(entry for entry in old if key_of(entry) not in keys), *new]", "return [*new]", TUNED,
    ),
    Fault(
        "a written table drops other machines", "torch_fdattn/tables/file.py",
        "records = [*(x for x in records if x is not old), merged]", "records = [merged]", TUNED,
    ),
    Fault(
        "tuned tiles under softcap", "torch_fdattn/ops/attention/tuned_tiles.py",
        "if not index or options.scores.changes_tiles or options.dropout.p:", "if not index:", TUNED,
    ),
    Fault(
        "splits from far away", "torch_fdattn/ops/decode/tuned_splits.py",
        "max(tiles, keys) <= REACH and distance < best", "distance < best", TUNED,
    ),
    Fault(
        "shipped entries stay beside tuned ones", "torch_fdattn/dist/tensor_parallel/auto.py",
        "replaced = {key(entry) for entry in own}", "replaced = set()", TUNED,
    ),
    Fault(
        "a rank takes its own table", "torch_fdattn/dist/tuned.py",
        "            question,\n        )\n    return ()", "            question,\n        )\n    return own", TUNED_RANKS,
    ),
)  # fmt: skip
