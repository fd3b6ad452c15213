"""Options as objects stand in a raw op's arguments where its schema has them."""

import pytest
import torch

import torch_fdattn  # noqa: F401
from torch_fdattn.ops.attention.dropout import Dropout
from torch_fdattn.ops.options import AttentionOptions, DecodeOptions, with_dtype
from torch_fdattn.ops.positions import FAR, Mask
from torch_fdattn.ops.scores import Scores

MASK = Mask("kv_lens", "q_start", "kv_start", 3, 5, "kv_block", "kv_stride")
SCORES = Scores("softcap", "alibi_slopes", "sinks", "attn_mask")
ATTENTION = AttentionOptions(
    MASK, "scale", SCORES, Dropout("dropout_p", "dropout_seed"), torch.bfloat16
)
DECODE = DecodeOptions(
    MASK, "scale", SCORES, "k_scale", "v_scale", "batch_invariant", torch.bfloat16
)
VALUES = {"window_left": 3, "window_right": 5, "out_dtype": torch.bfloat16, "grad_dtype": torch.bfloat16}  # fmt: skip

#: Raw ops by the options that they take and how these are asked for.
OPS = {
    **{
        f"{op}_{part}": (ATTENTION, dict(has_dtype=part != "tangent"))
        for op in ("attention", "varlen_attention")
        for part in ("forward", "backward", "backward_all", "tangent")
    },
    "decode_forward": (DECODE, {}),
    "decode_out": (DECODE, dict(has_dtype=False)),
    "paged_decode_forward": (DECODE, dict(paged=True)),
    "paged_decode_out": (DECODE, dict(has_dtype=False, paged=True)),
}


def tail_of(op: str) -> list:
    """An op's arguments from the mask on."""
    arguments = getattr(torch.ops.fdattn, op).default._schema.arguments
    names = [x.name for x in arguments if not x.kwarg_only]
    return [x for x in arguments if x.name in names[names.index("kv_lens") :]]


@pytest.mark.parametrize("op", OPS)
def test_the_order_is_the_schemas(op):
    options, how = OPS[op]
    names = [x.name for x in tail_of(op)]
    assert options.to_raw(**how) == tuple(VALUES.get(name, name) for name in names)


@pytest.mark.parametrize("op", OPS)
def test_what_is_written_is_read(op):
    options, how = OPS[op]
    has_dtype, expected = how.get("has_dtype", True), options
    if not has_dtype:
        expected = expected._replace(dtype=None)
    if "paged" in how:
        expected = expected._replace(scores=SCORES._replace(attn_mask=None))
    assert type(options).from_raw(options.to_raw(**how), has_dtype) == expected


@pytest.mark.parametrize("op", OPS)
def test_defaults_at_the_end_do_not_come(op):
    """What the dispatcher leaves out, one argument after the other, is as in the schema."""
    options, how = OPS[op]
    has_dtype, arguments = how.get("has_dtype", True), tail_of(op)
    full = [VALUES.get(x.name, x.name) for x in arguments]
    for count in range(len(full), 0, -1):
        left_out = arguments[count:]
        if not all(x.has_default_value() for x in left_out):
            break
        defaults = [x.default_value for x in left_out]
        found = type(options).from_raw(tuple(full[:count]), has_dtype)
        assert found == type(options).from_raw((*full[:count], *defaults), has_dtype)
    assert count < len(full)


def test_windows_are_within_far():
    beyond = MASK._replace(window_left=2 * FAR, window_right=FAR + 1)
    found = AttentionOptions.from_raw(ATTENTION._replace(mask=beyond).to_raw())
    assert found.mask == MASK._replace(window_left=FAR, window_right=FAR)


def test_a_dtype_in_its_place():
    without = ATTENTION.to_raw(has_dtype=False)
    assert with_dtype(without, torch.bfloat16) == ATTENTION.to_raw()
