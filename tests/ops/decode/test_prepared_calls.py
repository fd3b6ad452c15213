"""Calls that decide once and are launched again: by their options and layouts, on other values and addresses."""

import numpy as np
import pytest
import torch

import torch_fdattn
from tests.ops.decode.inputs import LENS, OPS, caches, int32
from torch_fdattn.launch import prepared
from torch_fdattn.ops.decode import schedule
from torch_fdattn.testing import attention_oracle, make_tensor


@pytest.mark.slow
@pytest.mark.interpreter
def test_an_aborted_launch_leaves_no_trace(kernel_device, monkeypatch):
    """Stopped between its two kernels, a call leaves parts behind that no later call reads."""
    from torch_fdattn.launch import launches
    from torch_fdattn.ops.decode import launch

    q, k, v, lens = caches(kernel_device, lens=(700, 64, 0, 513), capacity=1024)
    expected = torch_fdattn.decode(q, k, v, lens)
    through_triton, stopped = launches.Launch.through_triton, []

    def abort(self):
        if self.kernel is launch._merge_kernel:
            stopped.append(self)
            raise KeyboardInterrupt
        return through_triton(self)

    prepared.forget()
    with monkeypatch.context() as patch:
        patch.setattr(launches.Launch, "through_triton", abort)
        with pytest.raises(KeyboardInterrupt):
            torch_fdattn.decode(q, k, v, lens)
    assert stopped
    for x, y in zip(torch_fdattn.decode(q, k, v, lens), expected, strict=True):
        assert torch.equal(x, y)


@pytest.mark.interpreter
def test_a_plan_serves_calls_of_equal_metadata(device):
    """Other values, other addresses, misaligned ones included."""
    for shift in (0, 1, 0):
        q, k, v, lens = caches(device)
        q, k, v = (
            torch.empty(x.numel() + 8, device=device)[shift : shift + x.numel()]
            .view(x.shape)
            .copy_(x)
            for x in (q, k, v)
        )
        out, lse = torch_fdattn.decode(q, k, v, lens)
        exact, exact_lse = attention_oracle(q.double(), k.double(), v.double(), LENS)
        torch.testing.assert_close(out.double(), exact, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-5, atol=1e-5)


@pytest.mark.interpreter
def test_a_plan_for_each_scale(device):
    q, k, v = (make_tensor((1, 1, n, 16), device=device) for n in (1, 32, 32))
    for _ in range(2):
        for scale in (0.5, 2.0):
            out, lse = torch_fdattn.decode(q, k, v, scale=scale)
            exact_out, exact_lse = attention_oracle(q.double(), k.double(), v.double(), scale=scale)
            torch.testing.assert_close(out.double(), exact_out, rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.interpreter
def test_a_plan_for_each_set_of_options(device, monkeypatch):
    """Calls that differ in one option alone, one after the other, and each without plans of others."""
    q = make_tensor((2, 2, 3, 32), device=device)
    k, v = (make_tensor((2, 1, 160, 32), device=device) for _ in range(2))
    lens = int32(150, 70, device=device)
    starts = int32(100, 40, device=device)
    variations = [
        {}, dict(scale=0.5), dict(causal=False), dict(window=(20, 0)), dict(window=(40, 0)), dict(softcap=1.0),
        dict(softcap=2.0), dict(batch_invariant=True), dict(q_start=starts), dict(kv_start=starts),
        dict(q_start=starts, kv_block=4, kv_stride=8), dict(q_start=starts, kv_block=4, kv_stride=12),
        dict(sinks=torch.ones(2, device=device)), dict(alibi_slopes=torch.ones(2, device=device)),
        dict(alibi_slopes=torch.ones(2, 2, device=device)),
    ]  # fmt: skip
    expected = []
    for options in variations:
        prepared.forget()
        expected.append(torch_fdattn.decode(q, k, v, lens, **options))
    prepared.forget()
    for _ in range(2):
        for options, right in zip(variations, expected, strict=True):
            found = torch_fdattn.decode(q, k, v, lens, **options)
            assert all(torch.equal(x, y) for x, y in zip(found, right, strict=True)), options
    different = {tuple(x.flatten().tolist()) for x, _ in expected}
    # Equal are batch invariance, positions of queries and keys moved together, and slopes said twice.
    assert len(different) >= len(variations) - 3


def decode_plans() -> list:
    return [call for key, call in prepared._calls.items() if key[0] == "decode"]


@pytest.mark.interpreter
def test_given_outputs_and_workspaces_have_plans(kernel_device, monkeypatch):
    """A call into given tensors decides once, and anew where one of them is laid out otherwise."""
    from torch_fdattn.ops.decode.launch import DecodeLaunchPlan
    from torch_fdattn.ops.decode.op import PreparedDecode

    q, k, v, lens = caches(kernel_device)
    expected = torch_fdattn.decode(q, k, v, lens)
    made, launched = [], []
    plan_init, run = DecodeLaunchPlan.__init__, PreparedDecode.run
    prepared.forget()
    monkeypatch.setattr(
        DecodeLaunchPlan,
        "__init__",
        lambda plan, *a, **b: (made.append(plan), plan_init(plan, *a, **b))[1],
    )
    monkeypatch.setattr(
        PreparedDecode,
        "run",
        lambda self, *a, **b: (launched.append(self), run(self, *a, **b))[1],
    )
    room = torch.empty(10**5, dtype=torch.int32, device=kernel_device)
    contiguous, lse = torch.empty_like(q), torch.empty_like(expected[1])
    strided = torch.empty(4, 1, 6, 64, device=kernel_device)[..., ::2].transpose(1, 2)
    half = torch.empty_like(q, dtype=torch.float16)
    variations = [
        dict(out=(contiguous, lse)), dict(out=(strided, lse)), dict(out=(half, lse)), dict(workspace=room),
        dict(out=(contiguous, lse), workspace=room),
    ]  # fmt: skip
    for _ in range(2):
        for options in variations:
            out, found_lse = torch_fdattn.decode(q, k, v, lens, **options)
            assert torch.equal(out, expected[0].to(out.dtype))
            assert torch.equal(found_lse, expected[1])
        decided = len(made)
        assert len(decode_plans()) == 4  # a workspace alone comes with an out like q
    assert len(made) == decided
    assert len(launched) == 2 * len(variations)
    monkeypatch.setattr(schedule, "SHORT", 0)
    with pytest.raises(ValueError, match="workspace must have at least"):
        torch_fdattn.decode(q, k, v, lens, workspace=room[:10])


@pytest.mark.interpreter
@pytest.mark.parametrize("entry", ["python", "op", "out"])
def test_numpy_scalars(entry, kernel_device):
    """Triton's launcher and ctypes take Python's numbers alone."""
    q, k, v, lens = caches(kernel_device)
    call = torch_fdattn.decode if entry != "op" else OPS.decode
    window = {"window": (40, 3)} if entry != "op" else {"window_left": 40, "window_right": 3}
    plain = window | dict(
        scale=0.75, softcap=2.0, kv_block=4, kv_stride=8, batch_invariant=True, causal=False,
        q_start=lens,
    )  # fmt: skip
    kinds = {float: np.float32, int: np.int64, bool: np.bool_}

    def as_numpy(x):
        if isinstance(x, tuple):
            return tuple(map(as_numpy, x))
        if type(x) is bool and entry != "python":
            return x  # the dispatcher itself refuses NumPy's
        return kinds[type(x)](x) if type(x) in kinds else x

    given = {name: as_numpy(x) for name, x in plain.items()}
    for options in (given, given, plain):
        prepared.forget()
        if entry == "out":
            options = options | {"out": (torch.empty_like(q), torch.empty_like(q[..., 0]))}
        found = call(q, k, v, lens, **options)
        (made,) = decode_plans()
        flat = [y for x in made.plan._decode.numbers for y in (x if isinstance(x, tuple) else (x,))]
        assert {type(x) for x in flat} <= {int, float, bool, str, type(None)}
    again = call(q, k, v, lens, **(given | ({"out": options["out"]} if entry == "out" else {})))
    assert all(torch.equal(x, y) for x, y in zip(found, again, strict=True))
