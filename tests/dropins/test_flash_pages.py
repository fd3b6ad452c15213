"""varlen_attn over pages and varlen_attn_out by FDATTN, through torch's own entries, on the CPU (`flash_ops.py`)."""

from __future__ import annotations

import math

import pytest
import torch

import torch_fdattn
from tests.dropins.flash_ops import FLASH, INTO, PAGED, aten, close
from torch_fdattn.dropins import flash_impl
from torch_fdattn.ops.library import launches

if not PAGED:
    pytest.skip("this torch has no varlen_attn over pages", allow_module_level=True)

from torch.nn.attention.varlen import AuxRequest, varlen_attn, varlen_attn_out

FLASH_INTO = getattr(aten, INTO.removeprefix("aten::"))
BEGINS, LENS, PAGE = (0, 3, 4, 9), (11, 20, 5), 8


def ints(*values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def paged(dtype=torch.float16):
    """q (9, 4, 32) of three sequences, pages (8, 8, 2, 32), seqused_k and a table whose unused entries are -1."""
    q = torch.randn(9, 4, 32, dtype=dtype)
    k, v = torch.randn(2, 8, PAGE, 2, 32, dtype=dtype)
    table = torch.stack([ints(5, 0, -1), ints(2, 7, 1), ints(3, -1, -1)])
    return q, k, v, ints(*LENS), table


def expected(q, k, v, table, **options):
    """Attention of each sequence over its keys, gathered."""
    outs, lses = [], []
    for b, length in enumerate(LENS):
        rows = q[BEGINS[b] : BEGINS[b + 1]].transpose(0, 1)[None].float()
        keys, values = (
            x[table[b].clamp(min=0).long()].flatten(0, 1)[:length].transpose(0, 1)[None].float()
            for x in (k, v)
        )
        out, lse = torch_fdattn.attention(rows, keys, values, **options)
        outs.append(out[0].transpose(0, 1))
        lses.append(lse[0])
    return torch.cat(outs), torch.cat(lses, 1)


WINDOWS = {
    (-1, 0): {"causal": True},
    (-1, -1): {},
    (6, 0): {"window": (6, 0)},
    (2, 1): {"window": (2, 1)},
}


@pytest.mark.parametrize("num_splits", [None, 1])
@pytest.mark.parametrize("window", WINDOWS)
def test_keys_on_pages(window, num_splits, active):
    q, k, v, lens, table = paged()
    out, lse = varlen_attn(
        q, k, v, ints(*BEGINS), None, 5, 20, window_size=window, scale=0.3, enable_gqa=True, seqused_k=lens,
        block_table=table, num_splits=num_splits, return_aux=AuxRequest(lse=True),
    )  # fmt: skip
    launched = dict(launches)
    want, want_lse = expected(q, k, v, table, scale=0.3, **WINDOWS[window])
    close(out, want)
    torch.testing.assert_close(lse, want_lse, rtol=1e-3, atol=1e-3)
    assert launched == {"varlen_attention_forward/cpu": 1}
    assert not active
    assert not flash_impl.fallbacks


def test_a_sequence_without_keys_has_lse_of_plus_infinity(active):
    q, k, v, lens, table = paged()
    lens[2] = 0
    out, lse = varlen_attn(
        q, k, v, ints(*BEGINS), None, 5, 20, window_size=(-1, 0), enable_gqa=True, seqused_k=lens,
        block_table=table, return_aux=AuxRequest(lse=True),
    )  # fmt: skip
    assert (out[4:] == 0).all()
    assert (lse[:, 4:] == math.inf).all()
    assert not active


@pytest.mark.parametrize("over_pages", [False, True])
def test_a_given_out_is_written(over_pages, active):
    if over_pages:
        q, k, v, lens, table = paged()
        begins, where = ints(*BEGINS), {"seqused_k": lens, "block_table": table}
        want, want_lse = expected(q, k, v, table, causal=True)
        keys = None
    else:
        q, k, v = (torch.randn(24, heads, 32, dtype=torch.float16) for heads in (4, 2, 2))
        keys = begins = ints(0, 9, 24)
        where = {}
        want, want_lse = torch_fdattn.varlen_attention(
            q.float(), k.float(), v.float(), begins, causal=True
        )
    out = torch.full((*q.shape[:2], 64), 5.0, dtype=q.dtype)[..., :32]  # a slice of larger memory
    launches.clear()
    version = out._version
    found, lse = varlen_attn_out(
        out, q, k, v, begins, keys, 20, 20, window_size=(-1, 0), enable_gqa=True, return_aux=AuxRequest(lse=True),
        **where,
    )  # fmt: skip
    assert found is out
    close(out, want)
    torch.testing.assert_close(lse, want_lse, rtol=1e-3, atol=1e-3)
    assert out._version > version
    assert dict(launches) == {"varlen_attention_forward/cpu": 1}
    assert not active


@pytest.mark.parametrize("backend", ["aot_eager"])
def test_torch_compile(backend, active):
    q, k, v, lens, table = paged()

    def step(q, k, v, lens, table):
        out = torch.zeros_like(q)
        where = {"seqused_k": lens, "block_table": table, "enable_gqa": True}
        varlen_attn_out(out, q, k, v, begins, None, 5, 20, window_size=(-1, 0), **where)
        return out + varlen_attn(q, k, v, begins, None, 5, 20, window_size=(-1, 0), **where)

    begins = ints(*BEGINS)
    compiled = torch.compile(step, fullgraph=True, backend=backend)
    close(compiled(q, k, v, lens, table), step(q, k, v, lens, table))
    assert not active


def cases():
    """A code of UNSUPPORTED_REASONS, and changes to a call over pages that it names."""
    q, k, v, lens, table = paged()
    yield "paged", {"seqused_k": None}
    yield "paged", {"seqused_k": lens[:2]}
    yield "paged", {"block_table": table.long()}
    yield "paged", {"block_table": table[:2]}
    yield "paged", {"block_table": table[:, :0]}
    yield "cu-seqlens", {"cum_seq_q": None}
    yield "cu-seqlens", {"cum_seq_q": ints(*BEGINS).long()}
    yield "cu-seqlens", {"seqused_k": lens.long()}
    yield "rank", {"key": k[:, 0]}
    yield "rank", {"query": q[None]}
    yield "empty", {"key": k[:, :0]}
    yield "shape", {"value": v[:4]}
    yield "shape", {"query": q[:, :3]}
    yield "head-dim", {"value": v[..., :16]}
    yield "dtype", {"query": q.float()}
    yield "split", {"num_splits": 4}
    yield "device", {"block_table": table.to("meta")}


CASES = list(cases())


@pytest.mark.parametrize("into", [False, True])
@pytest.mark.parametrize(("code", "changes"), CASES, ids=[x[0] for x in CASES])
def test_what_ours_does_not_do_goes_to_torchs_own(code, changes, into, active):
    q, k, v, lens, table = paged()
    call = {"query": q, "key": k, "value": v, "cum_seq_q": ints(*BEGINS), "cum_seq_k": None}
    call |= {
        "max_q": 5,
        "max_k": 20,
        "dropout_p": 0.0,
        "is_causal": True,
        "return_debug_mask": False,
    }
    call |= {"seqused_k": lens, "block_table": table} | changes
    options = {x: call.pop(x) for x in ("seqused_k", "block_table", "num_splits") if x in call}
    out = torch.empty_like(call["query"])
    args = (out, *call.values()) if into else (*call.values(),)
    op = FLASH_INTO if into else FLASH
    kernel = flash_impl._KERNELS[op.default._schema.name.removeprefix("aten::")]
    assert kernel(*args, **options) == code
    if any(x.is_meta for x in options.values() if isinstance(x, torch.Tensor)):
        return
    found = op(*args, **options)
    assert ((out if into else found[0]) == 7).all()
    assert flash_impl.fallbacks == {code: 1}
    assert sum(active.values()) == 1
    assert not launches


@pytest.mark.parametrize("out", [torch.empty(9, 4, 32), torch.empty(9, 4, 16, dtype=torch.float16)])
def test_an_out_that_does_not_fit_goes_to_torchs_own(out, active):
    q, k, v, lens, table = paged()
    FLASH_INTO(
        out,
        q,
        k,
        v,
        ints(*BEGINS),
        None,
        5,
        20,
        0.0,
        True,
        False,
        seqused_k=lens,
        block_table=table,
    )
    assert flash_impl.fallbacks == {"out": 1}
    assert active == {INTO: 1}
