"""The form of the tuned table: what a record says of its machine, and what an entry of each section has.

An entry's keys say what was measured, its values what was the fastest; a section has one entry of the same keys.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from typing import NamedTuple


class Field(NamedTuple):
    """One value of the file: what it must be, in words and as a check."""

    expected: str
    accepts: Callable[[object], bool]


class Section(NamedTuple):
    keys: dict[str, Field]
    values: dict[str, Field]

    @property
    def fields(self) -> dict[str, Field]:
        return self.keys | self.values

    def key_of(self, entry: dict) -> tuple:
        return tuple(entry[name] for name in self.keys)


#: Of the tensor-parallel ops and of a model's layers, what can be chosen; what runs everywhere first.
CHOICES = {
    "all_gather_matmul": ("collective", "copy_engine", "fused", "low_latency"),
    "matmul_reduce_scatter": ("collective", "copy_engine", "fused", "low_latency"),
    "matmul_all_reduce": ("nccl", "one_shot", "two_shot", "low_latency", "gemm_all_reduce"),
    "layer": ("all_reduce", "ag_rs"),
}
_NAMES = frozenset(name for names in CHOICES.values() for name in names)
#: Of ring attention, what "auto" can choose.
RING_CHOICES = ("ring", "all_gather", "one_sided")


#: No size is larger, and each one below is a float.
_LIMIT = 2**53


def _is_count(x: object, minimum: int = 1) -> bool:
    return isinstance(x, int) and not isinstance(x, bool) and minimum <= x < _LIMIT


def _choices(about: str, names: Collection[str]) -> Field:
    """Pairs [count, name]."""

    def accepts(x: object) -> bool:
        return (
            isinstance(x, list)
            and bool(x)
            and all(
                isinstance(pair, list)
                and len(pair) == 2
                and _is_count(pair[0])
                and isinstance(pair[1], str)
                and pair[1] in names
                for pair in x
            )
        )

    return Field(f"pairs {about}", accepts)


def _one_of(*names: str) -> Field:
    return Field(f"one of {', '.join(names)}", lambda x: isinstance(x, str) and x in names)


def _is_tile(x: object) -> bool:
    return isinstance(x, str) and re.fullmatch(r"\d{1,4}x\d{1,4}w\d{1,4}s\d{1,4}", x) is not None


def _is_share(x: object) -> bool:
    return isinstance(x, int | float) and not isinstance(x, bool) and 0 < x <= 64


_COUNT = Field("an integer of at least 1", _is_count)
_TEXT = Field("a text", lambda x: isinstance(x, str) and bool(x))
_DTYPE = _one_of("bfloat16", "float16", "float32")

#: What a record says of the machine; the first four decide whether it speaks for this process.
MACHINE = {
    "gpu": _TEXT,
    "architecture": _TEXT,
    "triton": _TEXT,
    "torch_fdattn": _TEXT,
    "torch": _TEXT,
    "count": _COUNT,
    "date": _TEXT,
}
MACHINE_KEYS = ("gpu", "architecture", "triton", "torch_fdattn")

SECTIONS = {
    "attention_tiles": Section(
        {
            "kernel": _one_of("forward", "dkdv", "dq"),
            "head_dim": _COUNT,
            "dtype": _DTYPE,
            "mask": _one_of("unmasked", "masked", "short_window"),
        },
        {"tile": Field("a tile such as 128x64w8s3", _is_tile)},
    ),
    "decode_splits": Section(
        {
            "head_dim": _COUNT,
            "dtype": _DTYPE,
            "paged": Field("true or false", lambda x: isinstance(x, bool)),
            "work_tiles": _COUNT,
            "kv_len": _COUNT,
        },
        {"splits_per_sm": Field("a number above 0 and at most 64", _is_share)},
    ),
    "dist_decode": Section(
        {"ranks": _COUNT},
        {"fused_rows": Field("an integer of at least 0", lambda x: _is_count(x, 0))},
    ),
    "tensor_parallel": Section(
        {
            "op": _one_of(*CHOICES),
            "ranks": _COUNT,
            "dtype": _DTYPE,
            "columns": _COUNT,
            "features": _COUNT,
        },
        {"choices": _choices("[rows, strategy or method]", _NAMES)},
    ),
    "ring_attention": Section(
        {"ranks": _COUNT}, {"choices": _choices("[tokens, strategy]", RING_CHOICES)}
    ),
}


def unsupported_choice(entry: dict) -> str | None:
    """A choice of a tensor-parallel entry that its op does not have."""
    return next((name for _, name in entry["choices"] if name not in CHOICES[entry["op"]]), None)
