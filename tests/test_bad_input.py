"""Wrong calls of the ops: each a clear error or a defined result, before any launch.

A clear error names the argument, what was expected and what came. What only the device knows (lengths,
positions) is made safe there: those calls have defined results.
"""

import os
import re
import subprocess
import sys

import pytest
import torch

from tests.interpreting import needs_interpret
from torch_fdattn import attention, decode, merge_states
from torch_fdattn.testing import attention_oracle

NAN, INF = float("nan"), float("inf")


def tensor(*shape, dtype=torch.float32):
    return torch.randn(shape).to(dtype)


def q(*shape, **options):
    return tensor(*(shape or (2, 4, 5, 16)), **options)


def k(*shape, **options):
    return tensor(*(shape or (2, 2, 9, 16)), **options)


def int32(*values):
    return torch.tensor(values, dtype=torch.int32)


WRONG = {
    # shapes
    "q of rank 3": (lambda: attention(q(4, 5, 16), k(), k()), ValueError, "q must have 4 dimensions (batch, heads, sequence, head_dim), got shape (4, 5, 16)"),
    "k of rank 5": (lambda: attention(q(), k(1, 2, 2, 9, 16), k()), ValueError, "k must have 4 dimensions"),
    "scalar v": (lambda: attention(q(), k(), torch.tensor(1.0)), ValueError, "v must have 4 dimensions (batch, heads, sequence, head_dim), got shape ()"),
    "batches differ": (lambda: attention(q(), k(3, 2, 9, 16), k(3, 2, 9, 16)), ValueError, "k must have shape (2, 2, 9, 16) like q, got (3, 2, 9, 16)"),
    "batch of 1 does not broadcast": (lambda: attention(q(), k(1, 2, 9, 16), k(1, 2, 9, 16)), ValueError, "k must have shape (2, 2, 9, 16) like q, got (1, 2, 9, 16)"),
    "lengths of k and v differ": (lambda: attention(q(), k(), k(2, 2, 8, 16)), ValueError, "v must have shape (2, 2, 9, 16) like k, got (2, 2, 8, 16)"),
    "head counts of k and v differ": (lambda: attention(q(), k(), k(2, 4, 9, 16)), ValueError, "v must have shape (2, 2, 9, 16) like k, got (2, 4, 9, 16)"),
    "heads do not divide": (lambda: attention(q(2, 5, 5, 16), k(), k()), ValueError, "q's head count must be a positive multiple of k's, got 5 query heads and 2 key heads"),
    "fewer query heads": (lambda: attention(q(2, 1, 5, 16), k(), k()), ValueError, "got 1 query heads and 2 key heads"),
    "no heads": (lambda: attention(q(2, 0, 5, 16), k(2, 0, 9, 16), k(2, 0, 9, 16)), ValueError, "got 0 query heads and 0 key heads"),
    "head dim 513": (lambda: attention(*3 * [q(1, 1, 5, 513)]), ValueError, "q's head_dim must be from 1 to 512, got 513"),
    "head dim 0": (lambda: attention(*3 * [q(1, 1, 5, 0)]), ValueError, "from 1 to 512, got 0"),
    "head dim 520": (lambda: attention(*3 * [q(1, 1, 5, 520)]), ValueError, "got 520"),
    "BSHD by mistake": (lambda: attention(q(2, 5, 4, 16), k(2, 9, 2, 16), k(2, 9, 2, 16)), ValueError, "q's head count must be a positive multiple of k's, got 5 query heads and 9 key heads"),
    # dtypes
    "int q": (lambda: attention(q().int(), k().int(), k().int()), TypeError, "q must be bfloat16, float16, float32 (or float64 on CPU), got torch.int32"),
    "complex": (lambda: attention(q().cfloat(), k().cfloat(), k().cfloat()), TypeError, "got torch.complex64"),
    "fp8": (lambda: attention(*(x.to(torch.float8_e4m3fn) for x in (q(), k(), k()))), TypeError, "got torch.float8_e4m3fn"),
    "half cache under fp32": (lambda: decode(q(2, 4, 1, 16), k().half(), k().half()), TypeError, "k_cache must have dtype torch.float32 like q, got torch.float16"),
    "v of another dtype": (lambda: attention(q(), k(), k().double()), TypeError, "v must have dtype torch.float32 like q, got torch.float64"),
    # devices and kinds
    "meta k": (lambda: attention(q(), k().to("meta"), k()), ValueError, "k must be on cpu like q, got meta"),
    "meta kv_lens": (lambda: attention(q(), k(), k(), int32(1, 2).to("meta")), ValueError, "kv_lens must be on cpu like q, got meta"),
    "None for k": (lambda: attention(q(), None, k()), TypeError, "k must be a torch.Tensor, got NoneType"),
    "None for q": (lambda: attention(None, k(), k()), TypeError, "q must be a torch.Tensor, got NoneType"),
    "list for q": (lambda: attention([1.0], k(), k()), TypeError, "q must be a torch.Tensor, got list"),
    "sparse": (lambda: attention(q().to_sparse(), k(), k()), TypeError, "q must be a strided tensor, got layout torch.sparse_coo"),
    "sparse mask": (lambda: decode(q(), k(), k(), attn_mask=torch.ones(5, 9).bool().to_sparse()), TypeError, "attn_mask must be a strided tensor, got layout torch.sparse_coo"),
    "nested": (lambda: attention(*3 * [torch.nested.nested_tensor([q()[0]], layout=torch.jagged)]), TypeError, "q must be a strided tensor, got a nested tensor"),
    "nested, of fixed strides": (lambda: decode(torch.nested.nested_tensor([q(1, 4, 1, 16)[0]]), k(), k()), TypeError, "q must be a strided tensor, got a nested tensor"),
    # lengths and positions
    "list for kv_lens": (lambda: attention(q(), k(), k(), [3, 4]), TypeError, "kv_lens must be an int32 (or int64) tensor of shape (batch,) or None, got list"),
    "float kv_lens": (lambda: attention(q(), k(), k(), torch.tensor([3.0, 4.0])), TypeError, "kv_lens must be int32 (or int64), got torch.float32"),
    "bool kv_lens": (lambda: attention(q(), k(), k(), torch.tensor([True, False])), TypeError, "kv_lens must be int32 (or int64), got torch.bool"),
    "kv_lens of another batch": (lambda: attention(q(), k(), k(), int32(1, 2, 3)), ValueError, "kv_lens must have shape (2,) like q's batch, got (3,)"),
    "kv_lens of rank 2": (lambda: attention(q(), k(), k(), int32(1, 2)[:, None]), ValueError, "kv_lens must have shape (2,) like q's batch, got (2, 1)"),
    "scalar q_start": (lambda: attention(q(), k(), k(), q_start=torch.tensor(3, dtype=torch.int32)), ValueError, "q_start must have shape (2,) like q's batch, got ()"),
    "float kv_start": (lambda: attention(q(), k(), k(), kv_start=torch.zeros(2)), TypeError, "kv_start must be int32 (or int64), got torch.float32"),
    "kv_block alone": (lambda: attention(q(), k(), k(), kv_block=4), ValueError, "kv_block and kv_stride must both be 0 or satisfy 1 <= kv_block <= kv_stride, got kv_block=4, kv_stride=0"),
    "kv_stride alone": (lambda: attention(q(), k(), k(), kv_stride=4), ValueError, "got kv_block=0, kv_stride=4"),
    "kv_stride below kv_block": (lambda: attention(q(), k(), k(), kv_block=4, kv_stride=2), ValueError, "got kv_block=4, kv_stride=2"),
    "negative kv_block": (lambda: attention(q(), k(), k(), kv_block=-4, kv_stride=-2), ValueError, "got kv_block=-4, kv_stride=-2"),
    "striped mask without q_start": (lambda: attention(q(), k(), k(), causal=True, kv_block=4, kv_stride=8), ValueError, "q_start must be given when kv_block is and the mask depends on positions"),
    # masks
    "padding mask": (lambda: attention(q(), k(), k(), attn_mask=torch.ones(2, 9).bool()), ValueError, "attn_mask must be broadcastable to (2, 4, 5, 9) (batch, heads, queries, keys), got shape (2, 9); a mask (batch, keys) is given as attn_mask[:, None, None]"),
    "padding mask of decode": (lambda: decode(q(), k(), k(), attn_mask=torch.ones(2, 9).bool()), ValueError, "got shape (2, 9); a mask (batch, keys) is given as attn_mask[:, None, None]"),
    "a tokenizer's padding mask": (lambda: attention(q(), k(), k(), attn_mask=torch.ones(2, 9).long()), TypeError, "got torch.int64; a mask (batch, keys) is given as attn_mask.bool()[:, None, None]"),
    "mask without heads": (lambda: attention(q(), k(), k(), attn_mask=torch.ones(2, 5, 9)), ValueError, "got shape (2, 5, 9); a mask (batch, queries, keys) is given as attn_mask[:, None]"),
    # options
    "window below -1": (lambda: attention(q(), k(), k(), window=(-2, 3)), ValueError, "window must be (left, right) with each at least 0, or -1 for unbounded, got (-2, 3)"),
    "window of one number": (lambda: attention(q(), k(), k(), window=4), TypeError, "window must be two ints (left, right) or None, got 4"),
    "window of three numbers": (lambda: attention(q(), k(), k(), window=(1, 2, 3)), TypeError, "window must be two ints (left, right) or None, got (1, 2, 3)"),
    "q as an array": (lambda: attention(q().detach().numpy(), k(), k()), TypeError, "q must be a torch.Tensor, got ndarray"),
    "positions beyond int32": (lambda: attention(q(), k(), k(), kv_block=3, kv_stride=2**30, q_start=int32(20, 30), causal=True), ValueError, "kv_stride and the last key's position must be at most 2**29, got 9 keys with kv_block=3, kv_stride=1073741824"),
    "a stride beyond int32": (lambda: attention(q(), k(), k(), kv_block=9, kv_stride=2**29 + 1, q_start=int32(20, 30)), ValueError, "kv_stride and the last key's position must be at most 2**29, got 9 keys with kv_block=9, kv_stride=536870913"),
    "2**29 queries": (lambda: attention(q(1, 1, 1, 16).expand(1, 1, 2**29, 16), *2 * [k(1, 1, 9, 16)]), ValueError, "q must hold fewer than 2**29 queries a sequence, got 536870912"),
    "2**30 keys": (lambda: attention(q(1, 1, 1, 16), *2 * [k(1, 1, 1, 16).expand(1, 1, 2**30, 16)]), ValueError, "k must hold fewer than 2**30 keys a sequence, got 1073741824"),
    "complex scale": (lambda: attention(q(), k(), k(), scale=1j), TypeError, "scale must be a number, got complex"),
    "complex scale of decode": (lambda: decode(q(), k(), k(), scale=1j), TypeError, "scale must be a number"),
    "scale beyond every float": (lambda: attention(q(), k(), k(), scale=2**2000), ValueError, "scale must be a finite number, got an int of 2001 bits"),
    "scale of decode beyond every float": (lambda: decode(q(), k(), k(), scale=2**2000), ValueError, "scale must be a finite number, got an int of 2001 bits"),
    "complex softcap": (lambda: decode(q(), k(), k(), softcap=1j), TypeError, "softcap must be a number"),
    "window far below": (lambda: attention(q(), k(), k(), window=(0, -(2**70))), ValueError, "window must be (left, right) with each at least 0"),
    "kv_block beyond int64": (lambda: attention(q(), k(), k(), kv_block=2**70, kv_stride=2**70), ValueError, "kv_block must be an int64, got 1180591620717411303424"),
    "fractional kv_block": (lambda: decode(q(), k(), k(), kv_block=1.5, kv_stride=2).detach(), (TypeError, RuntimeError), "kv_block"),
    "fractional kv_block of attention": (lambda: attention(q(), k(), k(), kv_block=1.5, kv_stride=2), TypeError, "kv_block must be an int, got float"),
    "kv_stride a tensor": (lambda: attention(q(), k(), k(), kv_block=2, kv_stride=torch.tensor(2)), TypeError, "kv_stride must be an int, got Tensor"),
    "causal a string": (lambda: attention(q(), k(), k(), causal="lower_right"), TypeError, "causal must be a bool, got str"),
    "decode's causal a string": (lambda: decode(q(2, 4, 1, 16), k(), k(), causal="no"), TypeError, "causal must be a bool, got str"),
    "batch_invariant a string": (lambda: decode(q(2, 4, 1, 16), k(), k(), batch_invariant="x"), TypeError, "batch_invariant must be a bool, got str"),
    "a workspace that is no tensor": (lambda: decode(q(2, 4, 1, 16), k(), k(), workspace="a"), TypeError, "workspace must be a torch.Tensor, got str"),
    "an out that is no tensor": (lambda: decode(q(2, 4, 1, 16), k(), k(), out=(1, 2)), TypeError, "out must be a torch.Tensor, got int"),
    "causal a tensor": (lambda: attention(q(), k(), k(), causal=torch.tensor(True)), TypeError, "causal must be a bool, got Tensor"),
    "dropout_p beyond every float": (lambda: attention(q(), k(), k(), dropout_p=2**2000), ValueError, "dropout_p must be a finite number, got an int of 2001 bits"),
    "fractional window": (lambda: attention(q(), k(), k(), window=(1.5, 2)), TypeError, "window must be two ints (left, right) or None, got (1.5, 2)"),
    "scale 0": (lambda: attention(q(), k(), k(), scale=0.0), ValueError, "scale must be a positive finite number, got 0.0"),
    "negative scale": (lambda: attention(q(), k(), k(), scale=-1.0), ValueError, "scale must be a positive finite number, got -1.0"),
    "scale nan": (lambda: attention(q(), k(), k(), scale=NAN), ValueError, "scale must be a positive finite number, got nan"),
    "scale inf": (lambda: attention(q(), k(), k(), scale=INF), ValueError, "scale must be a positive finite number, got inf"),
    "scale a string": (lambda: attention(q(), k(), k(), scale="x"), TypeError, "scale must be a number, got str"),
    "scale a tensor of one dimension": (lambda: attention(q(), k(), k(), scale=torch.ones(1)), TypeError, "scale must be a number, got Tensor"),
    "scale a tensor that requires a gradient": (lambda: attention(q(), k(), k(), scale=torch.tensor(1.0, requires_grad=True)), TypeError, "scale has no gradient and must not require one"),
    "scale a complex tensor": (lambda: decode(q(), k(), k(), scale=torch.tensor(1j)), TypeError, "scale must be a number, got Tensor"),
    "softcap a parameter": (lambda: attention(q(), k(), k(), softcap=torch.nn.Parameter(torch.tensor(1.0))), TypeError, "softcap must be a number, got Parameter"),
    "no softcap": (lambda: attention(q(), k(), k(), softcap=None), TypeError, "softcap must be a number, got NoneType"),
    # decode
    "17 query tokens": (lambda: decode(q(2, 4, 17, 16), k(), k()), ValueError, "q must have 1 to 16 query tokens (dimension 2), got 17; use attention for longer queries"),
    "no query token": (lambda: decode(q(2, 4, 0, 16), k(), k()), ValueError, "q must have 1 to 16 query tokens (dimension 2), got 0"),
    "q of decode without its token dim": (lambda: decode(q(2, 4, 16), k(), k()), ValueError, "q must have 4 dimensions"),
    "caches differ": (lambda: decode(q(), k(), k(2, 2, 10, 16)), ValueError, "v_cache must have shape (2, 2, 9, 16) like k_cache, got (2, 2, 10, 16)"),
    # merge_states
    "outs of rank 4": (lambda: merge_states(q(), q()[..., 0]), ValueError, "outs must have 5 dimensions (parts, batch, heads, sequence, head_dim), got shape (2, 4, 5, 16)"),
    "lses of another shape": (lambda: merge_states(q()[None], q()[None]), ValueError, "lses must have shape (1, 2, 4, 5) like outs, got (1, 2, 4, 5, 16)"),
    "bf16 lses": (lambda: merge_states(q()[None].bfloat16(), q()[None, ..., 0].bfloat16()), TypeError, "lses must be torch.float32, got torch.bfloat16"),
    "int outs": (lambda: merge_states(q()[None].int(), q()[None, ..., 0]), TypeError, "outs must be bfloat16, float16, float32 (or float64 on CPU), got torch.int32"),
    "meta lses": (lambda: merge_states(q()[None], q()[None, ..., 0].to("meta")), ValueError, "lses must be on cpu like outs, got meta"),
    "int output dtype": (lambda: merge_states(q()[None], q()[None, ..., 0], dtype=torch.int32), TypeError, "dtype must be bfloat16, float16, float32 or float64, got torch.int32"),
    "list of outs": (lambda: merge_states([q()], q()[None, ..., 0]), TypeError, "outs must be a torch.Tensor, got list"),
    # unknown arguments
    "misspelt keyword": (lambda: attention(q(), k(), k(), is_causal=True), TypeError, "unexpected keyword argument 'is_causal'"),
    "causal by position": (lambda: attention(q(), k(), k(), None, True), TypeError, "positional argument"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_clear_error(name):
    call, kind, message = WRONG[name]
    with pytest.raises(kind, match=re.escape(message)):
        call()


@pytest.mark.parametrize("name", WRONG)
def test_the_same_error_with_gradients_wanted(name, monkeypatch):
    """The autograd path checks as the plain one does, before anything is saved."""
    call, kind, message = WRONG[name]
    randn = torch.randn

    def leaf(*args, **kwargs):
        return randn(*args, **kwargs).requires_grad_()

    monkeypatch.setattr(torch, "randn", leaf)
    with pytest.raises(kind, match=re.escape(message)):
        call()


RAW_WRONG = {
    "dout": (0, ValueError, "dout must have shape (2, 4, 5, 16) like q and v, got (2, 4, 4, 16)"),
    "dlse": (1, ValueError, "dlse must have shape (2, 4, 5) like q, got (2, 4, 4)"),
    "out": (5, ValueError, "out must have shape (2, 4, 5, 16) like q and v, got (2, 4, 4, 16)"),
    "lse": (6, ValueError, "lse must have shape (2, 4, 5) like q, got (2, 4, 4)"),
}


@pytest.mark.parametrize("name", RAW_WRONG)
def test_raw_backward_checks_its_own_inputs(name):
    position, kind, message = RAW_WRONG[name]
    x, y = q(), k()
    mask = (None, None, None, -1, -1, 0, 0, 0.25)
    out, lse = torch.ops.fdattn.attention_forward(x, y, y, *mask, None)
    args = [out, lse, x, y, y, out, lse]
    args[position] = args[position][:, :, :4]
    with pytest.raises(kind, match=re.escape(message)):
        torch.ops.fdattn.attention_backward(*args, *mask, None)


@pytest.mark.interpreter
@pytest.mark.parametrize("op", [attention, decode])
class TestDefinedResults:
    """What is unusual and not wrong."""

    @pytest.fixture(autouse=True)
    def _on_device(self, device):
        with torch.device(device):
            yield

    def check(self, op, q, k, v, lens, oracle_lens):
        out, lse = op(q, k, v, lens)
        causal = op is decode
        exact, exact_lse = attention_oracle(
            q.double(), k.double(), v.double(), oracle_lens, causal=causal
        )
        torch.testing.assert_close(out.double(), exact, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-5, atol=1e-5)

    def test_negative_lengths_are_zero(self, op):
        self.check(op, q(), k(), k(), int32(-1, -(2**31)), (0, 0))

    def test_lengths_beyond_the_cache_are_its_capacity(self, op):
        self.check(op, q(), k(), k(), int32(10, 2**31 - 1), (9, 9))

    def test_int64_lengths_beyond_int32(self, op):
        self.check(op, q(), k(), k(), torch.tensor([2**40, 3]), (9, 3))

    def test_empty_batch(self, op):
        out, lse = op(q(0, 4, 5, 16), k(0, 2, 9, 16), k(0, 2, 9, 16), int32())
        assert (out.shape, lse.shape) == ((0, 4, 5, 16), (0, 4, 5))

    def test_no_keys(self, op):
        out, lse = op(q(), k(2, 2, 0, 16), k(2, 2, 0, 16), int32(0, 5))
        assert (out == 0).all()
        assert (lse == -INF).all()

    def test_more_queries_than_keys(self, op):
        self.check(op, q(), k(2, 2, 3, 16), k(2, 2, 3, 16), None, (3, 3))

    @pytest.mark.parametrize("far", [2**62, 2**70])
    def test_huge_window(self, op, far):
        for a, b in zip(
            op(*(args := (q(), k(), k())), window=(far, far)),
            op(*args, window=(-1, -1)),
            strict=True,
        ):
            torch.testing.assert_close(a, b)

    def test_nan_in_one_row_stays_there(self, op):
        queries, keys = q(), k()
        queries[0, 0, 0, 0] = NAN
        out, lse = op(queries, keys, keys)
        assert out[0, 0, 0].isnan().all()
        assert lse[0, 0, 0].isnan()
        out[0, 0, 0], lse[0, 0, 0] = 0.0, 0.0
        assert torch.isfinite(out).all()
        assert torch.isfinite(lse).all()


def test_no_queries():
    out, lse = attention(q(2, 4, 0, 16), k(), k())
    assert (out.shape, lse.shape) == ((2, 4, 0, 16), (2, 4, 0))


def test_no_parts():
    out, lse = merge_states(torch.empty(0, 2, 4, 5, 16), torch.empty(0, 2, 4, 5))
    assert (out == 0).all()
    assert (lse == -INF).all()


@pytest.mark.interpreter
@needs_interpret
def test_bfloat16_in_the_interpreter_is_refused():
    """Its arithmetic is wrong there; a silently wrong result would be worse than none."""
    x = torch.randn(1, 1, 2, 16, dtype=torch.bfloat16)
    with pytest.raises(NotImplementedError, match="bfloat16 is wrong in Triton's interpreter"):
        attention(x, x, x)


def test_check_mode_names_bad_lengths():
    """TORCH_FDATTN_CHECK=1 says what is otherwise made safe in silence."""
    code = (
        "import torch, torch_fdattn; x = torch.randn(2, 1, 9, 16)\n"
        "for lens in ((-1, 3), (3, 10)):\n"
        "    try: torch_fdattn.attention(x, x, x, torch.tensor(lens, dtype=torch.int32))\n"
        "    except ValueError as error: print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True,
        env={**os.environ, "TORCH_FDATTN_CHECK": "1"},
    )  # fmt: skip
    first, second = done.stdout.splitlines()
    assert first.startswith("kv_lens must lie in [0, 9], got values from -1 to 3")
    assert second.startswith("kv_lens must lie in [0, 9], got values from 3 to 10")


def test_the_remedy_for_a_padding_mask_works():
    """And a mask of another size, or one that fits, is given no hint."""
    valid = torch.ones(2, 9).bool()
    valid[1, 4:] = False
    queries, keys = q(), k()
    found = attention(queries, keys, keys, attn_mask=valid[:, None, None])[0]
    torch.testing.assert_close(found, attention(queries, keys, keys, int32(9, 4))[0])
    with pytest.raises(ValueError, match=r"got shape \(2, 8\)$"):
        attention(queries, keys, keys, attn_mask=torch.ones(2, 8).bool())


def test_there_are_enough_wrong_calls():
    assert len(WRONG) >= 40
