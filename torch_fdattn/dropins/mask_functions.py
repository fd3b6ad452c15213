"""What transformers' mask functions mean: closures are recognised by their code and all that they enclose."""

from __future__ import annotations

import types
from collections.abc import Callable

import torch
from torch import Tensor


def window_of(mask_function: Callable, local_size: int | None, hf: types.ModuleType) -> int | None:
    """Of a causal mask: its sliding window, 0 for none; None for any other mask."""
    if mask_function is hf.causal_mask_function:
        return 0
    if local_size is not None and equal_functions(
        mask_function, hf.sliding_window_causal_mask_function(local_size)
    ):
        return local_size
    return None


def without_packing(
    mask_function: Callable, positions: Tensor, hf: types.ModuleType
) -> Callable | None:
    """The mask function beneath transformers' mask of the packed sequences that it sees in these positions (S,).

    None where it is no such mask, or of other sequences.
    """
    sequences = hf.find_packed_sequence_indices(positions[None])
    if sequences is None:
        return None
    packed = hf.packed_sequence_mask_function(sequences)
    if not _equal_code(mask_function, hf.and_masks(packed, packed)):
        return None
    inner = _enclosed(mask_function).get("mask_functions", ())
    if len(inner) != 2 or not _equal_code(inner[1], packed):
        return None
    theirs = _enclosed(inner[1]).get("packed_sequence_mask")
    if not isinstance(theirs, Tensor) or theirs.shape[-1:] != positions.shape:
        return None
    if not bool((theirs == sequences.to(theirs.device)).all()):
        return None
    remap = getattr(hf, "remap_positions_for_packed_sequence", None)  # of later versions
    if remap is not None and _equal_code(inner[0], remap(packed, positions)):
        return _enclosed(inner[0]).get("mask_function")
    return inner[0]


def equal_functions(a: object, b: object) -> bool:
    """Whether two closures have the same code over the same values, and so are the same function."""
    if not (isinstance(a, types.FunctionType) and isinstance(b, types.FunctionType)):
        if isinstance(a, tuple) and isinstance(b, tuple) and len(a) == len(b):
            return all(map(equal_functions, a, b))
        return type(a) is type(b) is int and a == b
    if a is b:
        return True
    return _equal_code(a, b) and equal_functions(
        *(tuple(cell.cell_contents for cell in of.__closure__ or ()) for of in (a, b))
    )


def _equal_code(a: object, b: object) -> bool:
    return (
        isinstance(a, types.FunctionType)
        and isinstance(b, types.FunctionType)
        and a.__code__ is b.__code__
    )


def _enclosed(function: types.FunctionType) -> dict[str, object]:
    cells = function.__closure__ or ()
    return {
        name: cell.cell_contents
        for name, cell in zip(function.__code__.co_freevars, cells, strict=True)
    }


def padding(
    attention_mask: Tensor | None, kv_length: int, kv_offset: int, end: int | Tensor,
    hf: types.ModuleType,
) -> Tensor | None:  # fmt: skip
    """True at keys that are tokens, (B, kv_length); None where all before position `end` are.

    It reads the values, once a forward, as transformers' own sdpa and flash attention do: without padding there
    is nothing to read for each key.
    """
    if attention_mask is None:
        return None
    given = attention_mask[:, kv_offset : kv_offset + kv_length]
    # Keys behind the mask's end count as padding, which matters where queries reach them.
    if not hf.is_tracing(given) and bool(given.all() & (attention_mask.shape[1] >= end)):
        return None
    return torch.nn.functional.pad(given, (0, kv_length - given.shape[1]))
