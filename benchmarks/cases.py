"""Every case that a benchmark measures; what a case is and how it is named stands in `shapes.py`.

`--cases` matches names and labels. The order is the order of measuring, most wanted first, because a
run with a time budget drops the last ones. Tiny cases exist so that the machinery runs on a CPU;
their figures mean nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TypeVar

from .shapes import AttentionCase, Case, CompileCase, CpuCase, DecodeCase, GenerateCase


def _smollm2(prompt_tokens: int, new_tokens: int, dtype: str, tiny: bool = False) -> GenerateCase:
    return GenerateCase("smollm2", 9, 3, 64, prompt_tokens, new_tokens, dtype, tiny)


def _prefill(head_dim: int, kilo: int, causal: bool) -> AttentionCase:
    """16384 tokens in sequences of `kilo` × 1024, 2048 / head_dim heads, as in the baselines."""
    heads = 2048 // head_dim
    label = f"hd{head_dim} {kilo}k {'causal' if causal else 'full'}"
    return AttentionCase(label, 16 // kilo, heads, heads, kilo * 1024, head_dim, causal)


ATTENTION_CASES: tuple[AttentionCase, ...] = (
    _prefill(128, 4, True),
    _prefill(128, 16, True),
    _prefill(128, 4, False),
    _prefill(128, 16, False),
    _prefill(128, 1, True),
    AttentionCase("hd128 8k causal 32/8", 2, 32, 8, 8192, 128, True),
    _prefill(64, 4, True),
    _prefill(64, 16, True),
    _prefill(64, 16, False),
    _prefill(256, 16, True),
    AttentionCase("tiny causal", 2, 4, 2, 48, 32, True, "fp32", tiny=True),
    AttentionCase("tiny full", 1, 3, 1, 33, 16, False, "fp32", tiny=True),
)

#: Of attention_fp8; inputs are quantised from bf16.
FP8_CASES: tuple[AttentionCase, ...] = (
    *(_prefill(128, kilo, causal) for kilo, causal in ((16, False), (16, True), (4, True))),
    *(_prefill(head_dim, 16, True) for head_dim in (64, 256)),
    AttentionCase("tiny causal", 2, 3, 3, 48, 32, True, "fp32", tiny=True),
)

#: Each feature of attention at 8k, beside plain causal attention; a window also at 32k. See features.py.
FEATURES = (
    "plain", "bias", "bias-grad", "alibi", "softcap", "window1024", "sinks", "dropout", "lengths", "varlen",
)  # fmt: skip
FEATURE_CASES: tuple[AttentionCase, ...] = (
    *(AttentionCase(f"8k {x}", 1, 16, 16, 8192, 128, True, feature=x) for x in FEATURES),
    *(
        AttentionCase(f"32k {x}", 1, 16, 16, 32768, 128, True, feature=x)
        for x in ("plain", "window1024")
    ),
    *(
        AttentionCase(f"tiny {x}", 1, 4, 2, 80, 16, True, "fp32", True, x)
        for x in (*FEATURES, "window16")
    ),
)

_PREFILL_KINDS = ("causal", "full", "padded", "window", "varlen")
#: On a CPU: prefill of 128 to 4096 tokens, and decode over as many; causal and decode with grouped heads too.
CPU_CASES: tuple[CpuCase, ...] = (
    *(
        CpuCase(kind, length, dtype, kv_heads=kv_heads)
        for dtype in ("fp32", "bf16")
        for length in (128, 512, 1024, 4096)
        for kind, kv_heads in (
            *((kind, 8) for kind in _PREFILL_KINDS), ("causal", 2), ("decode", 2), ("paged", 2),
        )
    ),
    *(
        CpuCase(kind, 24, "fp32", 4, kv_heads, 16, tiny=True)
        for kind, kv_heads in (*((kind, 4) for kind in _PREFILL_KINDS), ("decode", 2), ("paged", 2))
    ),
)  # fmt: skip

#: Llama-3-8B's and T5-large's layers under torch.compile; see compiled.py.
COMPILE_CASES: tuple[CompileCase, ...] = (
    CompileCase("prefill", 2, 32, 8, 8192, 128),
    CompileCase("decode", 1, 32, 8, 32768, 128),
    CompileCase("train", 2, 16, 16, 4096, 64),
    CompileCase("train-llama", 1, 16, 8, 8192, 128, layers=8),
    CompileCase("train-llama", 1, 16, 8, 32768, 128, layers=8),
    CompileCase("prefill-causal", 2, 32, 8, 8192, 128),
    CompileCase("prefill", 8, 32, 8, 2048, 128),
    CompileCase("decode", 16, 32, 8, 4096, 128),
    CompileCase("train", 8, 16, 16, 1024, 64),
    *(
        CompileCase(use, 2, 4, 2 if use != "train" else 4, 32, 16, "fp32", True)
        for use in ("prefill", "prefill-causal", "decode", "train", "train-llama")
    ),
)

_TINY = DecodeCase(2, 4, 2, 64, 32, "fp32", tiny=True)

#: The published tables of the baselines, contiguous first.
DECODE_CASES: tuple[DecodeCase, ...] = (
    DecodeCase(1, 32, 8, 1024),
    DecodeCase(1, 32, 8, 4096),
    DecodeCase(1, 32, 8, 32768),
    DecodeCase(1, 32, 8, 131072),
    DecodeCase(8, 32, 8, 1024),
    DecodeCase(32, 32, 8, 1024),
    DecodeCase(16, 32, 8, 4096),
    DecodeCase(64, 32, 8, 4096),
    DecodeCase(128, 64, 8, 8192),
    DecodeCase(8, 32, 32, 4096),
    DecodeCase(1, 32, 32, 32768),
    DecodeCase(1, 32, 8, 4096, page=16),
    DecodeCase(1, 32, 8, 32768, page=16),
    DecodeCase(1, 32, 8, 131072, page=16),
    DecodeCase(16, 32, 8, 4096, page=16),
    *(DecodeCase(64, 32, 8, 4096, page=page) for page in (16, 1, 64)),
    DecodeCase(128, 64, 8, 8192, page=16),
    DecodeCase(8, 32, 32, 4096, page=16),
    DecodeCase(32, 32, 8, 32768, page=16, ragged="uniform"),
    DecodeCase(64, 32, 8, 32768, page=16, ragged="power"),
    _TINY,
    DecodeCase(1, 6, 2, 33, 16, "fp32", tiny=True),
)

# Where not the axis itself, 86 µs of reading: long enough for a rate, short enough to show overheads.
_MIDDLE = DecodeCase(16, 32, 8, 4096)


def _axis(base: DecodeCase, name: str, values: Sequence[object]) -> tuple[DecodeCase, ...]:
    return tuple(dataclasses.replace(base, **{name: value}) for value in values)


#: Decode over one property at a time: `--sweep length,batch`. Together 33 cases, some in two axes.
SWEEPS: dict[str, tuple[DecodeCase, ...]] = {
    "length": (
        *_axis(DecodeCase(1, 32, 8, 0), "kv_len", [2**power for power in range(9, 18)]),
        *_axis(dataclasses.replace(_TINY, batch=1), "kv_len", (32, 96)),
    ),
    "batch": (*_axis(_MIDDLE, "batch", (1, 4, 16, 64)), *_axis(_TINY, "batch", (1, 3))),
    "gqa": (  # 28/4 are Qwen2.5-7B's: a group of 7 is no power of two
        *(DecodeCase(16, heads, kv, 4096) for heads, kv in ((32, 32), (32, 8), (28, 4), (32, 1))),
        *_axis(_TINY, "kv_heads", (4, 1)),
    ),
    "dim": (
        *_axis(_MIDDLE, "head_dim", (64, 96, 128, 192, 256)),
        *_axis(_TINY, "head_dim", (16, 24)),
    ),
    "page": (*_axis(_MIDDLE, "page", (1, 16, 64, 256)), *_axis(_TINY, "page", (1, 16))),
    "dtype": (
        *_axis(_MIDDLE, "dtype", ("bf16", "fp16")),
        *_axis(_MIDDLE, "cache", ("fp8", "int8")),
        *_axis(DecodeCase(64, 32, 8, 4096), "cache", (None, "fp8")),
        *_axis(DecodeCase(128, 64, 8, 8192), "cache", (None, "fp8")),
        DecodeCase(128, 32, 8, 4096, page=16, cache="fp8"),
        *_axis(_TINY, "cache", ("fp8", "int8")),
    ),
    "ragged": (
        DecodeCase(32, 32, 8, 8192, ragged="uniform"),
        DecodeCase(32, 32, 8, 32768, page=16, ragged="uniform"),
        DecodeCase(64, 32, 8, 32768, page=16, ragged="power"),
        dataclasses.replace(_TINY, batch=3, ragged="uniform"),
        dataclasses.replace(_TINY, batch=5, page=16, ragged="uniform"),
        dataclasses.replace(_TINY, batch=6, kv_len=1024, page=16, ragged="power"),
    ),
}

#: One cache sharded over ranks; kv_len is of all of them together.
DIST_DECODE_CASES: tuple[DecodeCase, ...] = (
    DecodeCase(1, 32, 8, 32768),
    DecodeCase(1, 32, 8, 131072),
    DecodeCase(1, 64, 8, 1048576),
    DecodeCase(16, 32, 8, 32768),
    DecodeCase(64, 32, 8, 8192),
    DecodeCase(1, 2, 1, 32, 16, "fp32", tiny=True),
    DecodeCase(1, 2, 2, 19, 16, "fp32", tiny=True),  # the last rank's shard is not full
)

GENERATE_CASES: tuple[GenerateCase, ...] = (
    _smollm2(32, 128, "bf16"),
    _smollm2(4096, 128, "bf16"),
    _smollm2(32, 128, "fp32"),
    _smollm2(16, 8, "fp32", tiny=True),
)


def swept(axes: str) -> tuple[DecodeCase, ...]:
    """The cases of the comma-separated axes, or of `all`; one that several axes hold comes once."""
    named = [axis.strip() for axis in axes.split(",") if axis.strip()]
    unknown = [axis for axis in named if axis not in (*SWEEPS, "all")]
    if unknown or not named:
        raise ValueError(f"--sweep must name axes of {', '.join(SWEEPS)} or all, got {axes!r}")
    chosen = SWEEPS if "all" in named else named
    return tuple(dict.fromkeys(case for axis in chosen for case in SWEEPS[axis]))


AnyCase = TypeVar("AnyCase", bound=Case)


def select(cases: Sequence[AnyCase], text: str | None, *, tiny_only: bool) -> list[AnyCase]:
    """The cases whose name or label contains one of `text`'s comma-separated substrings.

    `not TEXT` leaves out those that contain TEXT. Tiny cases are chosen only when a substring says
    `tiny`; with `tiny_only` (no GPU) no others are, because a full case would take minutes on a CPU
    and prove nothing.
    """
    named = [part.strip() for part in (text or "").split(",") if part.strip()]
    unwanted = [word.removeprefix("not ") for word in named if word.startswith("not ")]
    parts = [word for word in named if not word.startswith("not ")]
    if tiny_only and not parts:
        parts = ["tiny"]
    tiny = any("tiny" in part for part in parts)

    def is_chosen(case: AnyCase) -> bool:
        def has(parts: Sequence[str]) -> bool:
            return any(part in label for part in parts for label in (case.name, case.label))

        if case.tiny:
            return tiny and has(parts) and not has(unwanted)
        return not tiny_only and (not parts or has(parts)) and not has(unwanted)

    chosen = [case for case in cases if is_chosen(case)]
    if not chosen:
        labels = ", ".join(case.label for case in cases if case.tiny or not tiny_only)
        raise ValueError(f"--cases must match one of [{labels}], got {text!r}")
    return chosen
