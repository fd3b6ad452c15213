"""Schemas, fake outputs and error texts as they are, so that a change of any of them is a decision.

EXPECTTEST_ACCEPT=1 pytest tests/ops/test_snapshots.py rewrites the expected texts.
"""

import pytest
import torch
from expecttest import assert_expected_inline
from torch._subclasses.fake_tensor import FakeTensorMode

import torch_fdattn
from torch_fdattn.testing import make_tensor

OPS = torch.ops.fdattn
MASK = (None, None, None, -1, 0, 0, 0, 0.25)


def test_schemas():
    names = (
        "attention", "attention_forward", "attention_backward", "attention_backward_all", "decode", "decode_forward",
        "merge_states", "merge_states_forward", "merge_states_backward", "append_kv", "paged_append_kv",
        "varlen_attention", "varlen_attention_forward", "varlen_attention_backward",
    )  # fmt: skip
    schemas = "\n".join(str(getattr(OPS, name).default._schema) for name in names)
    assert_expected_inline(
        schemas,
        """\
fdattn::attention(Tensor q, Tensor k, Tensor v, Tensor? kv_lens=None, Tensor? q_start=None, Tensor? kv_start=None, *, bool causal=False, int window_left=-1, int window_right=-1, SymInt kv_block=0, SymInt kv_stride=0, float? scale=None, float softcap=0., Tensor? alibi_slopes=None, Tensor? sinks=None, Tensor? attn_mask=None, float dropout_p=0., Tensor? dropout_seed=None, str layout="bhsd") -> (Tensor out, Tensor lse)
fdattn::attention_forward(Tensor q, Tensor k, Tensor v, Tensor? kv_lens, Tensor? q_start, Tensor? kv_start, int window_left, int window_right, SymInt kv_block, SymInt kv_stride, float scale, ScalarType? out_dtype, float softcap=0., Tensor? alibi_slopes=None, Tensor? sinks=None, Tensor? attn_mask=None, float dropout_p=0., Tensor? dropout_seed=None) -> (Tensor, Tensor)
fdattn::attention_backward(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor? kv_lens, Tensor? q_start, Tensor? kv_start, int window_left, int window_right, SymInt kv_block, SymInt kv_stride, float scale, ScalarType? grad_dtype, float softcap=0., Tensor? alibi_slopes=None, Tensor? sinks=None, Tensor? attn_mask=None, float dropout_p=0., Tensor? dropout_seed=None) -> (Tensor, Tensor, Tensor)
fdattn::attention_backward_all(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, bool alibi_slopes_gradient, bool sinks_gradient, bool attn_mask_gradient, Tensor? kv_lens, Tensor? q_start, Tensor? kv_start, int window_left, int window_right, SymInt kv_block, SymInt kv_stride, float scale, ScalarType? grad_dtype, float softcap=0., Tensor? alibi_slopes=None, Tensor? sinks=None, Tensor? attn_mask=None, float dropout_p=0., Tensor? dropout_seed=None) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)
fdattn::decode(Tensor q, Tensor k_cache, Tensor v_cache, Tensor? kv_lens=None, Tensor? q_start=None, Tensor? kv_start=None, *, bool causal=True, int window_left=-1, int window_right=-1, SymInt kv_block=0, SymInt kv_stride=0, float? scale=None, Tensor? k_scale=None, Tensor? v_scale=None, float softcap=0., Tensor? alibi_slopes=None, Tensor? sinks=None, bool batch_invariant=False, Tensor? attn_mask=None, str layout="bhsd") -> (Tensor out, Tensor lse)
fdattn::decode_forward(Tensor q, Tensor k_cache, Tensor v_cache, Tensor? kv_lens, Tensor? q_start, Tensor? kv_start, int window_left, int window_right, SymInt kv_block, SymInt kv_stride, float scale, ScalarType? out_dtype=None, Tensor? k_scale=None, Tensor? v_scale=None, float softcap=0., Tensor? alibi_slopes=None, Tensor? sinks=None, bool batch_invariant=False, Tensor? attn_mask=None) -> (Tensor, Tensor)
fdattn::merge_states(Tensor outs, Tensor lses, *, ScalarType? dtype=None) -> (Tensor out, Tensor lse)
fdattn::merge_states_forward(Tensor outs, Tensor lses, ScalarType? dtype=None) -> (Tensor, Tensor)
fdattn::merge_states_backward(Tensor dout, Tensor? dlse, Tensor outs, Tensor lses, Tensor out, Tensor lse) -> (Tensor, Tensor)
fdattn::append_kv(Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor k, Tensor v, Tensor kv_lens, Tensor? new_lens=None, Tensor? k_scale=None, Tensor? v_scale=None, Tensor(c!)? q=None, Tensor? cos=None, Tensor? sin=None, Tensor? positions=None) -> ()
fdattn::paged_append_kv(Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor page_table, Tensor k, Tensor v, Tensor kv_lens, Tensor? new_lens=None, Tensor? k_scale=None, Tensor? v_scale=None, Tensor(c!)? q=None, Tensor? cos=None, Tensor? sin=None, Tensor? positions=None) -> ()
fdattn::varlen_attention(Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q, Tensor? cu_seqlens_k=None, Tensor? page_table=None, Tensor? kv_lens=None, Tensor? q_start=None, Tensor? kv_start=None, *, bool causal=False, int window_left=-1, int window_right=-1, SymInt kv_block=0, SymInt kv_stride=0, float? scale=None, float softcap=0., Tensor? alibi_slopes=None, Tensor? sinks=None, Tensor? attn_mask=None, float dropout_p=0., Tensor? dropout_seed=None, str layout="bhsd") -> (Tensor out, Tensor lse)
fdattn::varlen_attention_forward(Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? page_table, Tensor? kv_lens, Tensor? q_start, Tensor? kv_start, int window_left, int window_right, SymInt kv_block, SymInt kv_stride, float scale, ScalarType? out_dtype, float softcap=0., Tensor? alibi_slopes=None, Tensor? sinks=None, Tensor? attn_mask=None, float dropout_p=0., Tensor? dropout_seed=None) -> (Tensor, Tensor)
fdattn::varlen_attention_backward(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? kv_lens, Tensor? q_start, Tensor? kv_start, int window_left, int window_right, SymInt kv_block, SymInt kv_stride, float scale, ScalarType? grad_dtype, float softcap=0., Tensor? alibi_slopes=None, Tensor? sinks=None, Tensor? attn_mask=None, float dropout_p=0., Tensor? dropout_seed=None) -> (Tensor, Tensor, Tensor)""",
    )


def describe(*tensors):
    lines = (f"{tuple(x.shape)} stride {x.stride()} {str(x.dtype)[6:]}" for x in tensors)
    return "\n".join(lines)


@pytest.fixture
def fakes():
    with FakeTensorMode():
        yield


def calls(layout):
    """Every raw op on fake tensors of one layout."""
    shapes = (2, 4, 6, 16), (2, 2, 9, 16), (2, 2, 9, 16)
    q, k, v = (make_tensor(shape, layout, dtype=torch.bfloat16) for shape in shapes)
    out, lse = OPS.attention_forward(q, k, v, *MASK, None)
    decoded = OPS.decode_forward(q, k, v, *MASK, torch.float32)
    gradients = OPS.attention_backward(out, None, q, k, v, out, lse, *MASK, None)
    outs, lses = (
        make_tensor((3, 2, 4, 6, 16), layout, dtype=torch.bfloat16),
        torch.empty(3, 2, 4, 6),
    )
    merged, merged_lse = OPS.merge_states_forward(outs, lses, None)
    merge_gradients = OPS.merge_states_backward(merged, merged_lse, outs, lses, merged, merged_lse)
    return (
        f"attention_forward\n{describe(out, lse)}\ndecode_forward, float32\n{describe(*decoded)}\n"
        f"attention_backward\n{describe(*gradients)}\nmerge_states_forward\n{describe(merged, merged_lse)}\n"
        f"merge_states_backward\n{describe(*merge_gradients)}"
    )


def test_fakes_of_contiguous_tensors(fakes):
    assert_expected_inline(
        calls("bhsd"),
        """\
attention_forward
(2, 4, 6, 16) stride (384, 96, 16, 1) bfloat16
(2, 4, 6) stride (24, 6, 1) float32
decode_forward, float32
(2, 4, 6, 16) stride (384, 96, 16, 1) float32
(2, 4, 6) stride (24, 6, 1) float32
attention_backward
(2, 4, 6, 16) stride (384, 96, 16, 1) bfloat16
(2, 2, 9, 16) stride (288, 144, 16, 1) bfloat16
(2, 2, 9, 16) stride (288, 144, 16, 1) bfloat16
merge_states_forward
(2, 4, 6, 16) stride (384, 96, 16, 1) bfloat16
(2, 4, 6) stride (24, 6, 1) float32
merge_states_backward
(3, 2, 4, 6, 16) stride (768, 384, 96, 16, 1) bfloat16
(3, 2, 4, 6) stride (48, 24, 6, 1) float32""",
    )


def test_fakes_keep_bshd(fakes):
    assert_expected_inline(
        calls("bshd"),
        """\
attention_forward
(2, 4, 6, 16) stride (384, 16, 64, 1) bfloat16
(2, 4, 6) stride (24, 6, 1) float32
decode_forward, float32
(2, 4, 6, 16) stride (384, 16, 64, 1) float32
(2, 4, 6) stride (24, 6, 1) float32
attention_backward
(2, 4, 6, 16) stride (384, 16, 64, 1) bfloat16
(2, 2, 9, 16) stride (288, 16, 32, 1) bfloat16
(2, 2, 9, 16) stride (288, 16, 32, 1) bfloat16
merge_states_forward
(2, 4, 6, 16) stride (384, 96, 16, 1) bfloat16
(2, 4, 6) stride (24, 6, 1) float32
merge_states_backward
(3, 2, 4, 6, 16) stride (768, 384, 16, 64, 1) bfloat16
(3, 2, 4, 6) stride (48, 24, 6, 1) float32""",
    )


def test_fakes_of_slices_are_dense(fakes):
    assert_expected_inline(
        calls("slice"),
        """\
attention_forward
(2, 4, 6, 16) stride (384, 96, 16, 1) bfloat16
(2, 4, 6) stride (24, 6, 1) float32
decode_forward, float32
(2, 4, 6, 16) stride (384, 96, 16, 1) float32
(2, 4, 6) stride (24, 6, 1) float32
attention_backward
(2, 4, 6, 16) stride (384, 96, 16, 1) bfloat16
(2, 2, 9, 16) stride (288, 144, 16, 1) bfloat16
(2, 2, 9, 16) stride (288, 144, 16, 1) bfloat16
merge_states_forward
(2, 4, 6, 16) stride (384, 96, 16, 1) bfloat16
(2, 4, 6) stride (24, 6, 1) float32
merge_states_backward
(3, 2, 4, 6, 16) stride (768, 384, 96, 16, 1) bfloat16
(3, 2, 4, 6) stride (48, 24, 6, 1) float32""",
    )


def test_fakes_of_expanded_heads_are_dense(fakes):
    assert_expected_inline(
        calls("expanded"),
        """\
attention_forward
(2, 4, 6, 16) stride (384, 96, 16, 1) bfloat16
(2, 4, 6) stride (24, 6, 1) float32
decode_forward, float32
(2, 4, 6, 16) stride (384, 96, 16, 1) float32
(2, 4, 6) stride (24, 6, 1) float32
attention_backward
(2, 4, 6, 16) stride (384, 96, 16, 1) bfloat16
(2, 2, 9, 16) stride (288, 144, 16, 1) bfloat16
(2, 2, 9, 16) stride (288, 144, 16, 1) bfloat16
merge_states_forward
(2, 4, 6, 16) stride (384, 96, 16, 1) bfloat16
(2, 4, 6) stride (24, 6, 1) float32
merge_states_backward
(3, 2, 4, 6, 16) stride (768, 384, 96, 16, 1) bfloat16
(3, 2, 4, 6) stride (48, 24, 6, 1) float32""",
    )


def packed_calls(layout):
    """varlen_attention's raw ops on fake tensors of one layout, tokens first."""
    shapes = (4, 6, 16), (2, 9, 16), (2, 9, 24)
    q, k, v = (make_tensor(shape, layout, dtype=torch.bfloat16).transpose(0, 1) for shape in shapes)
    begins = torch.zeros(3, dtype=torch.int32), torch.zeros(3, dtype=torch.int32)
    out, lse = OPS.varlen_attention_forward(q, k, v, *begins, None, *MASK, None)
    gradients = OPS.varlen_attention_backward(out, None, q, k, v, out, lse, *begins, *MASK, None)
    return f"forward\n{describe(out, lse)}\nbackward\n{describe(*gradients)}"


def test_fakes_of_packed_sequences(fakes):
    assert_expected_inline(
        packed_calls("bshd"),
        """\
forward
(6, 4, 24) stride (96, 24, 1) bfloat16
(4, 6) stride (6, 1) float32
backward
(6, 4, 16) stride (64, 16, 1) bfloat16
(9, 2, 16) stride (32, 16, 1) bfloat16
(9, 2, 24) stride (48, 24, 1) bfloat16""",
    )


def test_fakes_of_packed_sequences_heads_first(fakes):
    assert_expected_inline(
        packed_calls("bhsd"),
        """\
forward
(6, 4, 24) stride (24, 144, 1) bfloat16
(4, 6) stride (6, 1) float32
backward
(6, 4, 16) stride (16, 96, 1) bfloat16
(9, 2, 16) stride (16, 144, 1) bfloat16
(9, 2, 24) stride (24, 216, 1) bfloat16""",
    )


def test_fakes_take_symbolic_lengths():
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    env = ShapeEnv()
    with FakeTensorMode(shape_env=env) as mode:
        real = torch.empty(2, 4, 32, 16)
        q = mode.from_tensor(real, symbolic_context=dynamic(real))
        out, lse = OPS.attention_forward(q, q, q, *MASK, None)
        assert out.shape == q.shape
        assert lse.shape == q.shape[:-1]
        assert not env.guards, "the checks must not specialise a length"


def dynamic(x):
    from torch.fx.experimental.symbolic_shapes import DimDynamic, StatelessSymbolicContext

    static, free = DimDynamic.STATIC, DimDynamic.DYNAMIC
    return StatelessSymbolicContext([static, static, free, static])


def test_error_texts():
    q, k = torch.randn(2, 8, 512, 128), torch.randn(2, 8, 512, 128)
    lens = torch.ones(2, dtype=torch.int32)
    wrong = {
        "rank": lambda: torch_fdattn.attention(q[0], k, k),
        "v": lambda: torch_fdattn.attention(q, k, k[:, :4]),
        "batch": lambda: torch_fdattn.attention(q, k[:1], k[:1]),
        "heads": lambda: torch_fdattn.attention(q, k[:, :3], k[:, :3]),
        "head dim": lambda: torch_fdattn.attention(
            *(x[:, :, :1, :1].expand(2, 8, 1, 520) for x in (q, k, k))
        ),
        "dtype": lambda: torch_fdattn.attention(q, k.half(), k.half()),
        "complex": lambda: torch_fdattn.attention(q.cfloat(), k.cfloat(), k.cfloat()),
        "device": lambda: torch_fdattn.attention(q, k.to("meta"), k.to("meta")),
        "kv_lens shape": lambda: torch_fdattn.attention(q, k, k, lens[:1]),
        "kv_lens dtype": lambda: torch_fdattn.attention(q, k, k, lens.float()),
        "kv_start": lambda: torch_fdattn.attention(q, k, k, kv_start=lens[None]),
        "window": lambda: torch_fdattn.attention(q, k, k, window=(-2, 0)),
        "window kind": lambda: torch_fdattn.attention(q, k, k, window=7),
        "scale": lambda: torch_fdattn.attention(q, k, k, scale=-1.0),
        "kv_stride": lambda: torch_fdattn.attention(q, k, k, kv_block=16),
        "q_start": lambda: torch_fdattn.attention(q, k, k, causal=True, kv_block=16, kv_stride=32),
        "tokens": lambda: torch_fdattn.decode(q[:, :, :17], k, k),
        "cache": lambda: torch_fdattn.decode(q[:, :, :1], k, k[:, :, :7]),
        "outs": lambda: torch_fdattn.merge_states(q, q[..., 0]),
        "lses": lambda: torch_fdattn.merge_states(q[None], q[..., 0]),
        "lses dtype": lambda: torch_fdattn.merge_states(q[None], q[None, ..., 0].half()),
        "merged dtype": lambda: torch_fdattn.merge_states(
            q[None], q[None, ..., 0], dtype=torch.int32
        ),
    }
    lines = []
    for name, call in wrong.items():
        with pytest.raises((ValueError, TypeError)) as error:
            call()
        lines.append(f"{name}: {error.type.__name__}: {error.value}")
    assert_expected_inline(
        "\n".join(lines),
        """\
rank: ValueError: q must have 4 dimensions (batch, heads, sequence, head_dim), got shape (8, 512, 128)
v: ValueError: v must have shape (2, 8, 512, 128) like k, got (2, 4, 512, 128)
batch: ValueError: k must have shape (2, 8, 512, 128) like q, got (1, 8, 512, 128)
heads: ValueError: q's head count must be a positive multiple of k's, got 8 query heads and 3 key heads
head dim: ValueError: q's head_dim must be from 1 to 512, got 520
dtype: TypeError: k must have dtype torch.float32 like q, got torch.float16
complex: TypeError: q must be bfloat16, float16, float32 (or float64 on CPU), got torch.complex64
device: ValueError: k must be on cpu like q, got meta
kv_lens shape: ValueError: kv_lens must have shape (2,) like q's batch, got (1,)
kv_lens dtype: TypeError: kv_lens must be int32 (or int64), got torch.float32
kv_start: ValueError: kv_start must have shape (2,) like q's batch, got (1, 2)
window: ValueError: window must be (left, right) with each at least 0, or -1 for unbounded, got (-2, 0)
window kind: TypeError: window must be two ints (left, right) or None, got 7
scale: ValueError: scale must be a positive finite number, got -1.0
kv_stride: ValueError: kv_block and kv_stride must both be 0 or satisfy 1 <= kv_block <= kv_stride, got kv_block=16, kv_stride=0
q_start: ValueError: q_start must be given when kv_block is and the mask depends on positions: the position of the last key does not follow from a strided shard, got q_start=None
tokens: ValueError: q must have 1 to 16 query tokens (dimension 2), got 17; use attention for longer queries
cache: ValueError: v_cache must have shape (2, 8, 512, 128) like k_cache, got (2, 8, 7, 128)
outs: ValueError: outs must have 5 dimensions (parts, batch, heads, sequence, head_dim), got shape (2, 8, 512, 128)
lses: ValueError: lses must have shape (1, 2, 8, 512) like outs, got (2, 8, 512)
lses dtype: TypeError: lses must be torch.float32, got torch.float16
merged dtype: TypeError: dtype must be bfloat16, float16, float32 or float64, got torch.int32""",
    )
