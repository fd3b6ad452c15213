"""Wrong calls over pages and quantised caches, by message."""

import re

import pytest
import torch

import torch_fdattn
from tests.ops.decode.inputs import caches, in_pages, int32

WRONG = {
    "table of rank 1": (dict(page_table=int32(1, 2)), ValueError, "page_table must have shape (4, pages a sequence)"),
    "table of other batch": (dict(page_table=int32(1, 2)[:, None]), ValueError, "got (2, 1)"),
    "int64 table": (dict(page_table=torch.zeros(4, 10, dtype=torch.int64)), TypeError, "page_table must be int32"),
    "table a list": (dict(page_table=[[1]]), TypeError, "page_table must be a torch.Tensor, got list"),
    "pages of no token": (
        dict(k_cache=torch.ones(3, 2, 0, 32), v_cache=torch.ones(3, 2, 0, 32)), ValueError,
        "pages must hold at least one token",
    ),
    "scale without quantised cache": (dict(k_scale=torch.ones(1)), ValueError, "k_scale must be None for an unquantised cache"),
    "negative softcap": (dict(softcap=-1.0), ValueError, "softcap must be positive"),
    "softcap NaN": (dict(softcap=float("nan")), ValueError, "softcap must be positive"),
    "slopes of other heads": (dict(alibi_slopes=torch.ones(5)), ValueError, "alibi_slopes must have shape (6,)"),
    "slopes of other batch": (dict(alibi_slopes=torch.ones(3, 6)), ValueError, "alibi_slopes must have shape (4, 6)"),
    "sinks of other heads": (dict(sinks=torch.ones(2)), ValueError, "sinks must have shape (6,)"),
    "integer sinks": (dict(sinks=torch.ones(6, dtype=torch.int32)), TypeError, "sinks must be bfloat16"),
    "value pages of other size": (dict(v_cache=torch.ones(40, 2, 8, 32)), ValueError, "v_cache must have shape (40, 2, 16, 32)"),
    "value head dim 513": (dict(v_cache=torch.ones(40, 2, 16, 513)), ValueError, "v_cache's head_dim must be"),
    "one cache quantised": (dict(k_cache=torch.ones(40, 2, 16, 32).to(torch.int8)), TypeError, "v_cache must have dtype torch.int8"),
    "uint8 cache": (dict(k_cache=torch.ones(40, 2, 16, 32, dtype=torch.uint8)), TypeError, "k_cache must have dtype torch.float32 like q"),
    "out of other shape": (dict(out=(torch.ones(4, 6, 1, 8), torch.ones(4, 6, 1))), ValueError, "out must have shape (4, 6, 1, 32)"),
    "half lse": (dict(out=(torch.ones(4, 6, 1, 32), torch.ones(4, 6, 1).half())), TypeError, "lse must have dtype torch.float32"),
    "strided lse": (dict(out=(torch.ones(4, 6, 1, 32), torch.ones(6, 4, 1).transpose(0, 1))), ValueError, "lse must be contiguous"),
    "expanded out": (dict(out=(torch.ones(4, 1, 1, 32).expand(4, 6, 1, 32), torch.ones(4, 6, 1))), ValueError, "out is written to and must not overlap itself, got shape (4, 6, 1, 32) with strides (32, 0, 32, 1)"),
    "overlapping out": (dict(out=(torch.ones(999).as_strided((4, 6, 1, 32), (186, 31, 31, 1)), torch.ones(4, 6, 1))), ValueError, "out is written to and must not overlap itself"),
    "expanded lse": (dict(out=(torch.ones(4, 6, 1, 32), torch.ones(4, 1, 1).expand(4, 6, 1))), ValueError, "lse must be contiguous"),
    "one output": (dict(out=torch.ones(4, 6, 1, 32)), TypeError, "out must be a pair of tensors"),
    "scale a string": (dict(scale="0.1"), TypeError, "scale must be a number"),
    "scale a tensor of one dimension": (dict(scale=torch.full((1,), 0.1)), TypeError, "scale must be a number"),
    "softcap None": (dict(softcap=None), TypeError, "softcap must be a number, got NoneType"),
    "sinks a list": (dict(sinks=[0.0] * 6), TypeError, "sinks must be a torch.Tensor, got list"),
    "k_scale a number": (dict(k_scale=0.1), TypeError, "k_scale must be a torch.Tensor, got float"),
    "float workspace": (dict(workspace=torch.ones(9)), TypeError, "workspace must be a contiguous int32 tensor"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_wrong_paged_calls(name):
    changed, error, message = WRONG[name]
    q, k, v, lens = caches("cpu")
    (k, table), (v, _) = in_pages(k, 16), in_pages(v, 16)
    call = dict(q=q, k_cache=k, v_cache=v, page_table=table, kv_lens=lens) | changed
    with pytest.raises(error, match=re.escape(message)):
        torch_fdattn.paged_decode(**call)


def test_wrong_scales():
    q, k, v, _ = (x.to(torch.int8) if i in (1, 2) else x for i, x in enumerate(caches("cpu")))
    with pytest.raises(ValueError, match=r"k_scale must be broadcastable to \(4, 2, 160\)"):
        torch_fdattn.decode(q, k, v, k_scale=torch.ones(3, 1))
    with pytest.raises(TypeError, match=r"v_scale must be float32, got torch\.float16"):
        torch_fdattn.decode(q, k, v, v_scale=torch.ones(1).half())
