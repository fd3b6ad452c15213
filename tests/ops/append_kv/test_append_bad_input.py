"""Wrong calls of append_kv and paged_append_kv: each a clear error before anything is written."""

import re

import pytest
import torch

import torch_fdattn
from tests.interpreting import needs_interpret
from tests.ops.append_kv.calls import append, arguments
from torch_fdattn import checks

INT8 = {"cache_dtype": torch.int8}
ROPE = {"options": ("cos", "sin")}


def tensor(*shape, dtype=torch.float32):
    return torch.randn(shape).to(dtype)


def ints(*values, dtype=torch.int32):
    return torch.tensor(values, dtype=dtype)


#: What `arguments` is given, what is changed in them, and the error.
WRONG = {
    # caches
    "k_cache of rank 3": ({}, {"k_cache": tensor(2, 2, 8)}, ValueError, "k_cache must have 4 dimensions"),
    "v's head dim 513": ({}, {"v_cache": tensor(2, 2, 8, 513)}, ValueError, "v_cache's head_dim must be from 1 to 512, got 513"),
    "capacities differ": ({}, {"v_cache": tensor(2, 2, 9, 16)}, ValueError, "v_cache must have shape (2, 2, 8, 16) like k_cache, got (2, 2, 9, 16)"),
    "cache dtypes differ": ({}, {"v_cache": tensor(2, 2, 8, 16, dtype=torch.int8)}, TypeError, "v_cache must have dtype torch.float32 like k_cache, got torch.int8"),
    "int32 cache": ({}, {"k_cache": tensor(2, 2, 8, 16, dtype=torch.int32)}, TypeError, "k_cache must be bfloat16, float16, float32, float8_e4m3fn, float8_e5m2, int8 (or float64 on CPU), got torch.int32"),
    "expanded cache": ({}, {"k_cache": tensor(2, 1, 8, 16).expand(2, 2, 8, 16)}, ValueError, "k_cache is written to and must not overlap itself, got shape (2, 2, 8, 16) with strides (128, 0, 16, 1)"),
    "overlapping cache": ({}, {"v_cache": tensor(999).as_strided((2, 2, 8, 16), (256, 120, 16, 1))}, ValueError, "v_cache is written to and must not overlap itself, got shape (2, 2, 8, 16) with strides (256, 120, 16, 1)"),
    "list for k_cache": ({}, {"k_cache": [1.0]}, TypeError, "k_cache must be a torch.Tensor, got list"),
    # new tokens
    "k of rank 3": ({}, {"k": tensor(2, 2, 16)}, ValueError, "k must have 4 dimensions (batch, heads, sequence, head_dim), got shape (2, 2, 16)"),
    "another batch": ({}, {"k": tensor(3, 2, 3, 16)}, ValueError, "k must have shape (2, 2, 3, 16) like k_cache, got (3, 2, 3, 16)"),
    "another head count": ({}, {"k": tensor(2, 4, 3, 16)}, ValueError, "k must have shape (2, 2, 3, 16) like k_cache, got (2, 4, 3, 16)"),
    "another head dim": ({}, {"k": tensor(2, 2, 3, 32)}, ValueError, "k must have shape (2, 2, 3, 16) like k_cache, got (2, 2, 3, 32)"),
    "another number of tokens": ({}, {"v": tensor(2, 2, 4, 16)}, ValueError, "v must have shape (2, 2, 3, 16) like k and v_cache, got (2, 2, 4, 16)"),
    "v with k's head dim": ({"v_dim": 24}, {"v": tensor(2, 2, 3, 16)}, ValueError, "v must have shape (2, 2, 3, 24) like k and v_cache, got (2, 2, 3, 16)"),
    "int k": ({}, {"k": tensor(2, 2, 3, 16, dtype=torch.int32)}, TypeError, "k must be bfloat16, float16, float32 (or float64 on CPU), got torch.int32"),
    "float8 k": ({}, {"k": tensor(2, 2, 3, 16, dtype=torch.float8_e5m2)}, TypeError, "k must be bfloat16, float16, float32 (or float64 on CPU), got torch.float8_e5m2"),
    "v of another dtype": ({}, {"v": tensor(2, 2, 3, 16, dtype=torch.float16)}, TypeError, "v must have dtype torch.float32 like k, got torch.float16"),
    "meta v": ({}, {"v": torch.empty(2, 2, 3, 16, device="meta")}, ValueError, "v must be on cpu like k_cache, got meta"),
    "None for v": ({}, {"v": None}, TypeError, "v must be a torch.Tensor, got NoneType"),
    # lengths
    "None for kv_lens": ({}, {"kv_lens": None}, TypeError, "kv_lens must be a torch.Tensor, got NoneType"),
    "float kv_lens": ({}, {"kv_lens": tensor(2)}, TypeError, "kv_lens must be int32 (or int64), got torch.float32"),
    "kv_lens of another batch": ({}, {"kv_lens": ints(1, 2, 3)}, ValueError, "kv_lens must have shape (2,) like k's batch, got (3,)"),
    "meta kv_lens": ({}, {"kv_lens": ints(1, 2).to("meta")}, ValueError, "kv_lens must be on cpu like k, got meta"),
    "an int for new_lens": ({}, {"new_lens": 3}, TypeError, "new_lens must be a torch.Tensor, got int"),
    "new_lens of rank 2": ({}, {"new_lens": ints(1, 2)[:, None]}, ValueError, "new_lens must have shape (2,) like k's batch, got (2, 1)"),
    "bool new_lens": ({}, {"new_lens": torch.ones(2, dtype=torch.bool)}, TypeError, "new_lens must be int32 (or int64), got torch.bool"),
    # pages
    "int64 page_table": ({"paged": True}, {"page_table": ints(0, 1, dtype=torch.int64)[:, None]}, TypeError, "page_table must be int32, got torch.int64"),
    "page_table of rank 1": ({"paged": True}, {"page_table": ints(0, 1)}, ValueError, "page_table must have shape (batch, pages a sequence), got (2,)"),
    "page_table of another batch": ({"paged": True}, {"page_table": ints(0, 1, 2)[:, None]}, ValueError, "k must have shape (3, 2, 3, 16) like page_table and k_cache, got (2, 2, 3, 16)"),
    "None for page_table": ({"paged": True}, {"page_table": None}, TypeError, "page_table must be a torch.Tensor, got NoneType"),
    "empty pages": ({"paged": True}, {"k_cache": tensor(4, 2, 0, 16), "v_cache": tensor(4, 2, 0, 16)}, ValueError, "k_cache's pages must hold at least one token (dimension 2), got 0"),
    "meta page_table": ({"paged": True}, {"page_table": ints(0, 1)[:, None].to("meta")}, ValueError, "page_table must be on cpu like k_cache, got meta"),
    # scales
    "scale of an unquantised cache": ({}, {"k_scale": torch.tensor(0.1)}, ValueError, "k_scale must be None for an unquantised cache, got one for a cache of torch.float32"),
    "half scale": (INT8, {"v_scale": torch.tensor(0.1).half()}, TypeError, "v_scale must be float32, got torch.float16"),
    "a number for k_scale": (INT8, {"k_scale": 0.1}, TypeError, "k_scale must be a torch.Tensor, got float"),
    "scale of other slots": (INT8, {"k_scale": tensor(7)}, ValueError, "k_scale must be broadcastable to (2, 2, 8) like the cache, got shape (7,)"),
    "scale of other heads": (INT8, {"v_scale": tensor(4, 1)}, ValueError, "v_scale must be broadcastable to (2, 2, 8) like the cache, got shape (4, 1)"),
    "scale with a head dim": (INT8, {"k_scale": tensor(2, 2, 8, 1)}, ValueError, "k_scale must be broadcastable to (2, 2, 8) like the cache, got shape (2, 2, 8, 1)"),
    "scale by sequence of pages": (INT8 | {"paged": True}, {"k_scale": tensor(2, 2, 4)}, ValueError, "k_scale must be broadcastable to (4, 2, 4) like the cache, got shape (2, 2, 4)"),
    # rope
    "cos alone": ({}, {"cos": tensor(9, 8)}, ValueError, "cos and sin must be given together, got cos and no sin"),
    "sin alone": ({}, {"sin": tensor(9, 8)}, ValueError, "cos and sin must be given together, got sin and no cos"),
    "q alone": ({}, {"q": tensor(2, 4, 3, 16)}, ValueError, "q must be None without cos and sin, got a tensor"),
    "positions alone": ({}, {"positions": torch.zeros(2, 3).int()}, ValueError, "positions must be None without cos and sin, got a tensor"),
    "whole head dim in cos": (ROPE, {"cos": tensor(9, 16), "sin": tensor(9, 16)}, ValueError, "cos must have shape (positions, rotary_dim / 2) with rotary_dim from 2 to k's head_dim 16, got (9, 16)"),
    "cos by batch": (ROPE, {"cos": tensor(2, 9, 8), "sin": tensor(2, 9, 8)}, ValueError, "cos must have shape (positions, rotary_dim / 2)"),
    "empty table": (ROPE, {"cos": tensor(0, 8), "sin": tensor(0, 8)}, ValueError, "cos must have shape (positions, rotary_dim / 2) with rotary_dim from 2 to k's head_dim 16, got (0, 8)"),
    "sin of another shape": (ROPE, {"sin": tensor(8, 6)}, ValueError, "sin must have shape (9, 6) like cos, got (8, 6)"),
    "half cos": (ROPE, {"cos": tensor(9, 6, dtype=torch.float16)}, TypeError, "cos must be float32, got torch.float16"),
    "double sin": (ROPE, {"sin": tensor(9, 6, dtype=torch.float64)}, TypeError, "sin must be float32, got torch.float64"),
    "meta sin": (ROPE, {"sin": torch.empty(9, 6, device="meta")}, ValueError, "sin must be on cpu like k_cache, got meta"),
    "float positions": (ROPE, {"positions": tensor(2, 3)}, TypeError, "positions must be int32 (or int64), got torch.float32"),
    "positions by sequence": (ROPE, {"positions": ints(1, 2)}, ValueError, "positions must have shape (2, 3) like k, got (2,)"),
    "q of rank 3": (ROPE, {"q": tensor(2, 4, 16)}, ValueError, "q must have 4 dimensions"),
    "q with other tokens": (ROPE, {"q": tensor(2, 4, 2, 16)}, ValueError, "q must have shape (2, 4, 3, 16) like k, got (2, 4, 2, 16)"),
    "q of another dtype": (ROPE, {"q": tensor(2, 4, 3, 16, dtype=torch.float16)}, TypeError, "q must have dtype torch.float32 like k, got torch.float16"),
    "expanded q": (ROPE, {"q": tensor(2, 1, 3, 16).expand(2, 4, 3, 16)}, ValueError, "q is written to and must not overlap itself, got shape (2, 4, 3, 16) with strides (48, 0, 16, 1)"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_clear_error(name):
    options, changed, kind, message = WRONG[name]
    given = arguments("cpu", **({"options": ()} | options))
    before = given["v_cache"].clone()
    with pytest.raises(kind, match=re.escape(message)):
        append(given | changed)
    assert torch.equal(given["v_cache"], before)


def test_options_by_position_are_refused():
    given = arguments("cpu", options=())
    with pytest.raises(TypeError, match="positional argument"):
        torch_fdattn.append_kv(*given.values(), None, None)


def test_there_are_enough_wrong_calls():
    assert len(WRONG) >= 40


def zeros(dtype=torch.float32) -> list[torch.Tensor]:
    """Both caches, k and v."""
    shapes = (2, 1, 9, 16), (2, 1, 9, 16), (2, 1, 3, 16), (2, 1, 3, 16)
    return [torch.zeros(shape, dtype=dtype) for shape in shapes]


def test_check_mode_names_what_would_be_dropped(monkeypatch):
    """TORCH_FDATTN_CHECK=1 says what is otherwise made safe in silence; tests/test_bad_input.py sets the variable."""
    monkeypatch.setattr(checks, "CHECK_VALUES", True)
    wrong = {
        ((-1, 3),): "kv_lens must lie in [0, 6], got values from -1 to 3",
        ((3, 7),): "kv_lens must lie in [0, 6], got values from 3 to 7",
        ((3, 9), (3, 4)): "new_lens must lie in [0, 3], got values from 3 to 4",
    }
    for lengths, message in wrong.items():
        with pytest.raises(ValueError, match="^" + re.escape(message)):
            torch_fdattn.append_kv(*zeros(), *map(torch.tensor, lengths))


@pytest.mark.interpreter
@needs_interpret
@pytest.mark.parametrize("which", ["caches", "values"])
def test_bfloat16_in_the_interpreter_is_refused(which):
    """Its conversion to bfloat16 truncates; a silently wrong cache would be worse than none."""
    half = zeros(torch.bfloat16)
    tensors = [*half[:2], *zeros()[2:]] if which == "caches" else [*zeros()[:2], *half[2:]]
    with pytest.raises(NotImplementedError, match="bfloat16 is wrong in Triton's interpreter"):
        torch_fdattn.append_kv(*tensors, torch.tensor([0, 0]))
