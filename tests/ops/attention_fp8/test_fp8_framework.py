"""attention_fp8 in torch's machinery: schemas, fakes, compilation, autocast, and what Hopper's launch is given."""

import pytest
import torch
from expecttest import assert_expected_inline
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.library import opcheck

import torch_fdattn
from tests.ops.attention_fp8.inputs import quantised
from torch_fdattn.ops import launches
from torch_fdattn.ops.attention_fp8 import op as attention_fp8_op
from torch_fdattn.testing import LAYOUTS, make_tensor

OPS = torch.ops.fdattn


def test_schemas():
    schemas = (OPS.attention_fp8.default._schema, OPS.attention_fp8_forward.default._schema)
    assert_expected_inline(
        "\n".join(map(str, schemas)),
        """\
fdattn::attention_fp8(Tensor q, Tensor k, Tensor v, Tensor q_scale, Tensor k_scale, Tensor v_scale, Tensor? kv_lens=None, *, bool causal=False, int window_left=-1, int window_right=-1, float? scale=None, float softcap=0., Tensor? alibi_slopes=None, Tensor? sinks=None, ScalarType out_dtype=15, str layout="bhsd") -> (Tensor out, Tensor lse)
fdattn::attention_fp8_forward(Tensor q, Tensor k, Tensor v, Tensor q_scale, Tensor k_scale, Tensor v_scale, Tensor? kv_lens, int window_left, int window_right, float scale, ScalarType out_dtype, float softcap=0., Tensor? alibi_slopes=None, Tensor? sinks=None) -> (Tensor, Tensor)""",
    )


def in_layout(layout, device):
    shapes = (2, 4, 5, 16), (2, 2, 7, 16), (2, 2, 7, 16)
    tensors = [make_tensor(s, layout, dtype=torch.float8_e4m3fn, device=device) for s in shapes]
    return *tensors, *(torch.rand(n, device=device) for n in ((4,), (2, 2), (2,)))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_opcheck(layout, device):
    inputs = in_layout(layout, device)
    lens = torch.tensor([7, 3], dtype=torch.int32, device=device)
    sinks, slopes = torch.rand(4, device=device), torch.rand(2, 4, device=device)
    checks = "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"
    # Not test_schema: torch's comparison multiplies, and has no product of float8.
    raw = *inputs, lens, 4, 0, 0.25, torch.float16, 3.0, slopes, sinks
    opcheck(OPS.attention_fp8_forward, raw, test_utils=checks)
    opcheck(OPS.attention_fp8, inputs, dict(causal=True), test_utils=checks)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_memory_of_the_results(layout, device):
    """As the fake's, and out in q's order of memory, as attention's."""
    inputs = in_layout(layout, device)
    out, lse = torch_fdattn.attention_fp8(*inputs)
    with FakeTensorMode() as mode:
        fakes = torch_fdattn.attention_fp8(*map(mode.from_tensor, inputs))
    for found, fake in zip((out, lse), fakes, strict=True):
        assert (found.shape, found.stride(), found.dtype) == (fake.shape, fake.stride(), fake.dtype)
    of_attention = torch_fdattn.attention(*(x.float() for x in inputs[:3]))
    assert out.stride() == torch.empty_like(inputs[0], dtype=out.dtype).stride()
    assert lse.stride() == of_attention[1].stride()


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiles(dynamic, device):
    @torch.compile(backend="aot_eager", fullgraph=True, dynamic=dynamic)
    def call(q, k, v):
        tensors, scales = zip(*map(torch_fdattn.quantise_per_head, (q, k, v)), strict=True)
        return torch_fdattn.attention_fp8(*tensors, *scales, causal=True, window=(5, 0))

    for keys in (12, 17):
        q, k, v = (torch.randn(2, h, keys, 32, device=device) for h in (4, 2, 2))
        pairs = [torch_fdattn.quantise_per_head(x) for x in (q, k, v)]
        inputs = *(x for x, _ in pairs), *(scale for _, scale in pairs)
        expected = torch_fdattn.attention_fp8(*inputs, causal=True, window=(5, 0))
        torch.testing.assert_close(call(q, k, v), expected)


def test_inductor(device):
    inputs = quantised((2, 4, 9, 32), (2, 2, 12, 32), device)

    @torch.compile(fullgraph=True)
    def call(*inputs):
        out, lse = torch_fdattn.attention_fp8(*inputs, out_dtype=torch.float16)
        return out * 2, lse

    out, lse = torch_fdattn.attention_fp8(*inputs, out_dtype=torch.float16)
    torch.testing.assert_close(call(*inputs), (out * 2, lse))


def test_autocast_leaves_it_alone(device):
    inputs = quantised((2, 4, 9, 32), (2, 2, 12, 32), device)
    expected = torch_fdattn.attention_fp8(*inputs)
    with torch.autocast(device, dtype=torch.float16):
        found = torch_fdattn.attention_fp8(*inputs)
    for a, b in zip(found, expected, strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)


def test_inference_mode(device):
    inputs = quantised((2, 4, 9, 32), (2, 2, 12, 32), device)
    expected = torch_fdattn.attention_fp8(*inputs)
    with torch.inference_mode():
        found = torch_fdattn.attention_fp8(*inputs)
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b)


def test_export(device):
    class Model(torch.nn.Module):
        def forward(self, *inputs):
            return torch_fdattn.attention_fp8(*inputs, causal=True)

    inputs = quantised((2, 4, 9, 32), (2, 2, 12, 32), device)
    program = torch.export.export(Model(), inputs)
    torch.testing.assert_close(program.module()(*inputs), Model()(*inputs))


def test_flops(device):
    from torch.utils.flop_counter import FlopCounterMode

    inputs = quantised((2, 4, 9, 32), (2, 2, 12, 32), device)
    with FlopCounterMode(display=False) as counter:
        torch_fdattn.attention_fp8(*inputs)
    assert counter.get_total_flops() == 4 * 2 * 4 * 9 * 12 * 32


class TestWhatHoppersLaunchIsGiven:
    """On CPU tensors, as if their device were an sm_90."""

    @pytest.fixture
    def launch(self, monkeypatch):
        """Where Hopper's launch of float8 stands."""
        from torch_fdattn.ops.attention.hopper import fp8

        monkeypatch.setattr(attention_fp8_op, "device_capability", lambda device: (9, 0))
        return fp8

    def call(self, **options):
        q, k, v, q_scale, k_scale, v_scale = quantised((2, 4, 9, 64), (2, 2, 12, 64))
        lens = torch.tensor([3, 0, 5, 0], dtype=torch.int32)[::2]
        scales = q_scale[0], k_scale[1], v_scale.mT.contiguous().mT
        launches.clear()
        return torch_fdattn.attention_fp8(q, k, v, *scales, lens, causal=True, **options), (q, k, v, *scales)  # fmt: skip

    def test_arguments(self, launch, monkeypatch):
        given = []

        def fp8_launches(*arguments):
            given.extend(arguments)
            *_, out, lse, _ = arguments
            out.fill_(7)
            lse.fill_(3)
            return ()

        monkeypatch.setattr(launch, "fp8_launches", fp8_launches)
        (out, lse), inputs = self.call(out_dtype=torch.float16)
        assert launches == {"attention_fp8/hopper": 1}
        assert (out == 7).all()
        assert (lse == 3).all()
        *tensors, q_scale, k_scale, v_scale, options, given_out, given_lse, counter = given
        assert all(a.data_ptr() == b.data_ptr() for a, b in zip(tensors, inputs, strict=False))
        scales = q_scale, k_scale, v_scale
        for scale, original, x in zip(scales, inputs[3:], inputs, strict=False):
            assert scale.is_contiguous()
            assert torch.equal(scale, original.expand(x.shape[:2]))
        assert options.mask.kv_lens.tolist() == [3, 5]
        assert options.mask.kv_lens.is_contiguous()
        assert (options.mask.window_left, options.mask.window_right) == (-1, 0)
        assert (options.dtype, options.scale) == (torch.float16, 0.125)
        assert (given_out.dtype, given_lse.shape, given_lse.is_contiguous()) == (torch.float16, (2, 4, 9), True)  # fmt: skip
        assert counter.tolist() == [0]

    def test_what_it_does_not_take(self, launch, monkeypatch):
        from torch_fdattn.ops.attention.hopper import launch as hopper_launch

        monkeypatch.setattr(hopper_launch, "takes_fp8", lambda q, k, v, options: False)
        self.call()
        assert launches["attention_fp8/dequantised"] == 1
        assert not launches["attention_fp8/hopper"]
