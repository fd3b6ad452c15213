"""attention_fp8 in float8 against the oracle of the dequantised inputs, on an sm_90."""

import itertools

import pytest
import torch

import torch_fdattn
from tests.ops.attention_fp8.inputs import doubles, quantised
from tests.ops.decode.inputs import int32
from torch_fdattn.ops import launches
from torch_fdattn.testing import attention_oracle

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
    reason="needs a CUDA device of sm_90",
)

HERE = {"attention_fp8/hopper": 1}
HEAD_DIMS = pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
#: ‖out - exact‖ / ‖exact‖ of normal inputs: weights are rounded to e4m3, whose unit of rounding is 1/16.
ERROR = 0.06
NAN_BYTE = 0x7F


def attend(*inputs, **options):
    """A call that must come to Hopper's kernel."""
    launches.clear()
    found = torch_fdattn.attention_fp8(*inputs, **options)
    assert launches == HERE
    return found


def check(found, inputs, **options):
    exact, exact_lse = attention_oracle(*doubles(*inputs), **options)
    out, lse = found
    torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-3, atol=5e-3)
    assert (out.double() - exact).norm() <= ERROR * exact.norm()
    unseen = exact_lse == -torch.inf
    assert (out[unseen] == 0).all()


@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("causal", [False, True])
@HEAD_DIMS
@pytest.mark.parametrize(
    ("queries", "keys"), [(128, 128), (512, 512), (1, 700), (300, 1000), (200, 70)]
)
def test_against_the_oracle(queries, keys, head_dim, causal, out_dtype):
    inputs = quantised((2, 4, queries, head_dim), (2, 2, keys, head_dim), "cuda")
    found = attend(*inputs, causal=causal, out_dtype=out_dtype)
    assert found[0].dtype == out_dtype
    check(found, inputs, causal=causal)


@pytest.mark.parametrize("kv_heads", [1, 2, 8])
def test_groups_and_scales_of_heads(kv_heads):
    """Scales that differ by far, (heads,) and (batch, heads)."""
    q, k, v, *scales = quantised((3, 8, 300, 128), (3, kv_heads, 500, 128), "cuda")
    scales = [scale * torch.logspace(-1, 0.3, scale.shape[1], device="cuda") for scale in scales]
    for each in (scales, [scale[0] for scale in scales]):
        check(attend(q, k, v, *each, causal=True), (q, k, v, *each), causal=True)


@pytest.mark.parametrize("heads", [8, 6])
@HEAD_DIMS
def test_few_queries_of_many_heads(head_dim, heads):
    """More tiles than SMs: of 8 heads on 2 two share one, whose scales of q differ by far; of 6 none do."""
    q, k, v, *scales = quantised((40, heads, 33, head_dim), (40, 2, 300, head_dim), "cuda")
    scales = [
        scale * torch.tensor([0.1, 2.0] * (scale.shape[1] // 2), device="cuda") for scale in scales
    ]
    check(attend(q, k, v, *scales, causal=True), (q, k, v, *scales), causal=True)


@pytest.mark.parametrize("window", [(0, 0), (100, 0), (300, 20), (1000, 0), (0, -1), (100, -1)])
@pytest.mark.parametrize("keys", [512, 700])
@HEAD_DIMS
def test_windows(head_dim, keys, window):
    inputs = quantised((1, 4, keys, head_dim), (1, 2, keys, head_dim), "cuda")
    check(attend(*inputs, window=window), inputs, window=window)


@pytest.mark.parametrize("causal", [False, True])
@HEAD_DIMS
def test_lengths_beyond_which_is_nan(head_dim, causal):
    inputs = quantised((4, 4, 600, head_dim), (4, 2, 600, head_dim), "cuda")
    lens = [600, 0, 129, 1]
    for x, (b, n) in itertools.product(inputs[1:3], enumerate(lens)):
        x.view(torch.uint8)[b, :, n:] = NAN_BYTE
    found = attend(*inputs, int32(*lens, device="cuda"), causal=causal)
    check(found, inputs, kv_lens=lens, causal=causal)


@pytest.mark.parametrize("feature", ["softcap", "ALiBi", "sinks"])
def test_changed_scores(feature):
    inputs = quantised((2, 4, 300, 128), (2, 2, 700, 128), "cuda")
    options = {
        "softcap": dict(softcap=1.5),
        "ALiBi": dict(alibi_slopes=torch.rand(4, device="cuda") / 8),
        "sinks": dict(sinks=torch.tensor([1.0, -torch.inf, -3.0, 9.0], device="cuda")),
    }[feature]
    check(attend(*inputs, causal=True, **options), inputs, causal=True, **options)


def test_scale_of_the_scores():
    inputs = quantised((2, 4, 300, 128), (2, 2, 700, 128), "cuda")
    check(attend(*inputs, scale=0.03), inputs, scale=0.03)


def test_tiny_scales():
    """Whose product is no float32: weights of all keys that are seen are equal, and what is hidden stays hidden."""
    q, k, v, q_scale, k_scale, v_scale = quantised((1, 4, 130, 64), (1, 2, 130, 64), "cuda")
    tiny = torch.full_like(q_scale, 1e-30), torch.full_like(k_scale, 1e-30)
    out, lse = attend(q, k, v, *tiny, v_scale, causal=True)
    values = (v.double() * v_scale.double()[..., None, None]).repeat_interleave(2, 1)
    counts = torch.arange(1, 131, device="cuda")
    assert (out.double() - values.cumsum(2) / counts[:, None]).norm() < 0.06 * out.double().norm()
    torch.testing.assert_close(lse, counts.float().log().expand_as(lse), rtol=1e-3, atol=1e-3)


def test_many_sequences():
    """More heads than the third dimension of a grid takes."""
    inputs = quantised((8200, 8, 2, 64), (8200, 8, 1, 64), "cuda")
    out, _ = attend(*inputs)
    expected = inputs[2].float() * inputs[5][..., None, None]
    torch.testing.assert_close(out.float(), expected.expand(out.shape), rtol=1e-2, atol=1e-3)


def test_layout():
    tensors = quantised((2, 300, 8, 128), (2, 300, 2, 128), "cuda", layout="bshd")
    turned = *(x.transpose(1, 2) for x in tensors[:3]), *tensors[3:]
    out, lse = attend(*tensors, causal=True, layout="bshd")
    assert out.is_contiguous()
    check((out.transpose(1, 2), lse), turned, causal=True)
    found = attend(*turned, causal=True)
    assert torch.equal(found[0], out.transpose(1, 2))


def test_slices_of_one_tensor():
    """Heads of a merged projection, between others of NaN."""
    merged = torch.full((2, 300, 12, 128), NAN_BYTE, dtype=torch.uint8, device="cuda")
    merged = merged.view(torch.float8_e4m3fn).transpose(1, 2)
    *tensors, q_scale, k_scale, v_scale = quantised((2, 4, 300, 128), (2, 2, 300, 128), "cuda")
    inputs = [merged[:, first : first + n] for first, n in ((1, 4), (6, 2), (9, 2))]
    for view, x in zip(inputs, tensors, strict=True):
        view.copy_(x)
    inputs = *inputs, q_scale, k_scale, v_scale
    check(attend(*inputs), inputs)


def test_addresses_that_no_descriptor_can_have():
    """Those calls are dequantised."""
    q, k, v, *scales = quantised((1, 4, 256, 64), (1, 2, 256, 64), "cuda")
    shifted = torch.empty(k.numel() + 4, dtype=k.dtype, device="cuda")[4:].view(k.shape).copy_(k)
    launches.clear()
    found = torch_fdattn.attention_fp8(q, shifted, v, *scales)
    assert launches["attention_fp8/dequantised"] == 1
    check(found, (q, k, v, *scales))


@pytest.mark.parametrize("v_scale", [1.0, 0.375])
@HEAD_DIMS
def test_same_bits_and_exact_means(head_dim, v_scale):
    """Of small integers under equal weights: registers that wgmma reads too late would show."""
    k, scales = torch.randn(2, 2, 2048, head_dim, device="cuda"), torch.ones(2, device="cuda")
    q = torch.zeros(2, 8, 2048, head_dim, device="cuda")
    v = torch.randint(-8, 9, k.shape, device="cuda").float()
    mean = v.double().mean(2, keepdim=True) * v_scale
    expected = mean.repeat_interleave(4, 1).expand(q.shape).bfloat16()
    tensors = [x.to(torch.float8_e4m3fn) for x in (q, k, v)]
    for _ in range(50):
        out, lse = attend(*tensors, scales.repeat(4), scales, v_scale * scales)
        assert torch.equal(out, expected)
    torch.testing.assert_close(lse, torch.full_like(lse, 2048.0).log())


def test_two_streams():
    calls = [quantised((1, 8, 2048, 128), (1, 8, 2048, 128), "cuda") for _ in range(2)]
    expected = [attend(*each, causal=True)[0] for each in calls]
    streams = [torch.cuda.Stream() for _ in calls]
    torch.cuda.synchronize()
    for _ in range(20):
        found = []
        for stream, each in zip(streams, calls, strict=True):
            with torch.cuda.stream(stream):
                found.append(attend(*each, causal=True)[0])
        torch.cuda.synchronize()
        assert all(map(torch.equal, found, expected))


def test_graphs_and_eager_calls_at_once():
    """A captured launch counts its tiles by itself, on whatever stream it is replayed."""
    inputs = quantised((1, 8, 2048, 128), (1, 8, 2048, 128), "cuda")
    expected = attend(*inputs, causal=True)[0]
    graphs, outs = [torch.cuda.CUDAGraph() for _ in range(2)], []
    for graph in graphs:
        with torch.cuda.graph(graph):
            outs.append(attend(*inputs, causal=True)[0])
    streams = [torch.cuda.Stream() for _ in range(3)]
    for _ in range(20):
        for stream, graph in zip(streams, graphs, strict=False):
            with torch.cuda.stream(stream):
                graph.replay()
        with torch.cuda.stream(streams[2]):
            eager = attend(*inputs, causal=True)[0]
        torch.cuda.synchronize()
        for out in (*outs, eager):
            assert torch.equal(out, expected)
            out.zero_()


def test_a_graph_reads_new_lengths_and_scales():
    q, k, v, *scales = quantised((2, 4, 300, 128), (2, 2, 700, 128), "cuda")
    lens = int32(700, 7, device="cuda")
    attend(q, k, v, *scales, lens, causal=True)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = attend(q, k, v, *scales, lens, causal=True)
    for numbers, factor in (((1, 700), 0.5), ((0, 350), 3.0)):
        lens.copy_(int32(*numbers, device="cuda"))
        scales[2].mul_(factor)
        graph.replay()
        inputs = q, k, v, *scales
        check(captured, inputs, kv_lens=list(numbers), causal=True)
        for found, eager in zip(captured, attend(*inputs, lens, causal=True), strict=True):
            assert torch.equal(found, eager)
