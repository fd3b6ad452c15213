"""What serving relies on: batch invariance, pages, workspaces, plans; and wrong calls by message."""

import re

import numpy as np
import pytest
import torch
from torch.library import opcheck
from torch.utils.flop_counter import FlopCounterMode

import torch_fdattn
from torch_fdattn.launch import prepared
from torch_fdattn.ops import library
from torch_fdattn.ops.decode import schedule
from torch_fdattn.testing import attention_oracle, make_tensor

OPS = torch.ops.fdattn
LENS = (130, 7, 0, 61)


def int32(*values, device="cpu"):
    return torch.tensor(values, dtype=torch.int32, device=device)


def caches(device, dtype=torch.float32, lens=LENS, capacity=160):
    q = make_tensor((len(lens), 6, 1, 32), device=device, dtype=dtype)
    k, v = (make_tensor((len(lens), 2, capacity, 32), device=device, dtype=dtype) for _ in range(2))
    return q, k, v, int32(*lens, device=device)


def in_pages(x, page):
    """Pages of x (B, H, N, D) in order, and their table."""
    batch, heads, length, dim = x.shape
    pages = x.view(batch, heads, length // page, page, dim).transpose(1, 2).flatten(0, 1)
    table = torch.arange(pages.shape[0], dtype=torch.int32, device=x.device).view(batch, -1)
    return pages.contiguous(), table


@pytest.mark.slow
@pytest.mark.interpreter
def test_batch_invariant_bits(kernel_device):
    """A sequence alone, among others, and in a larger cache: the same bits; by default they differ."""
    lens = (3000, 40, 1500, 2999)
    q, k, v, kv_lens = caches(kernel_device, lens=lens, capacity=3072)
    together = torch_fdattn.decode(q, k, v, kv_lens, batch_invariant=True)
    for b in range(len(lens)):
        one = (x[b : b + 1] for x in (q, k[:, :, :3008], v[:, :, :3008], kv_lens))
        alone = torch_fdattn.decode(*one, batch_invariant=True)
        assert all(torch.equal(x[b], y[0]) for x, y in zip(together, alone, strict=True))
    among = (
        [0] * 64 if kernel_device == "cuda" else [0, 1, 2, 3]
    )  # as many as one device cuts differently
    balanced = [
        torch_fdattn.decode(*(x[b] for x in (q, k, v, kv_lens)))[0][0] for b in ([0], among)
    ]
    assert not torch.equal(*balanced)


@pytest.mark.interpreter
def test_same_bits_on_every_run(kernel_device):
    q, k, v, lens = caches(kernel_device)
    first = torch_fdattn.decode(q, k, v, lens)
    for _ in range(10):
        again = torch_fdattn.decode(q, k, v, lens)
        assert all(torch.equal(x, y) for x, y in zip(first, again, strict=True))


@pytest.mark.interpreter
@pytest.mark.parametrize("wrong", [-1, 40, 2**31 - 1, -(2**31)])
def test_keys_on_pages_that_do_not_exist_are_masked(wrong, device):
    q, k, v, lens = caches(device)
    (k_pages, table), (v_pages, _) = in_pages(k, 16), in_pages(v, 16)
    assert k_pages.shape[0] == 40
    table[0, 2] = wrong
    out, lse = torch_fdattn.paged_decode(q, k_pages, v_pages, table, lens)
    keep = [j for j in range(130) if not 32 <= j < 48]
    exact, exact_lse = attention_oracle(
        *(x.double() for x in (q[:1], k[:1, :, keep], v[:1, :, keep]))
    )
    torch.testing.assert_close(out[:1].double(), exact, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse[:1].double(), exact_lse, rtol=1e-5, atol=1e-5)
    whole = torch_fdattn.decode(q, k, v, lens)[0]
    torch.testing.assert_close(out[1:], whole[1:])


@pytest.mark.interpreter
@pytest.mark.parametrize("page", [1, 16, 32])
def test_pages_of_a_contiguous_cache(page, device):
    """The same tiles, so the same bits."""
    q, k, v, lens = caches(device)
    (k_pages, table), (v_pages, _) = in_pages(k, page), in_pages(v, page)
    paged = torch_fdattn.paged_decode(q, k_pages, v_pages, table, lens)
    for x, y in zip(paged, torch_fdattn.decode(q, k, v, lens), strict=True):
        assert torch.equal(x, y)


@pytest.mark.interpreter
def test_no_pages_at_all(device):
    q, k, v, _ = caches(device)
    table = torch.zeros(4, 0, dtype=torch.int32, device=device)
    out, lse = torch_fdattn.paged_decode(q, k[:0], v[:0], table)
    assert not out.any()
    assert (lse == float("-inf")).all()


@pytest.mark.interpreter
@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("invariant", [False, True])
def test_given_outputs_and_workspace(paged, invariant, device):
    q, k, v, lens = caches(device)
    call, inputs = torch_fdattn.decode, (q, k, v)
    if paged:
        (k, table), (v, _) = in_pages(k, 16), in_pages(v, 16)
        call, inputs = torch_fdattn.paged_decode, (q, k, v, table)
    expected = call(*inputs, lens, batch_invariant=invariant)
    workspace = torch_fdattn.decode_workspace(*inputs, batch_invariant=invariant)
    given = tuple(torch.full_like(x, float("nan")) for x in expected)
    for _ in range(2):  # a workspace is used again
        found = call(*inputs, lens, batch_invariant=invariant, out=given, workspace=workspace)
        assert found[0] is given[0]
        assert found[1] is given[1]
        assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))
    found = call(*inputs, lens, batch_invariant=invariant, workspace=workspace)
    assert torch.equal(found[0], expected[0])


@pytest.mark.slow
@pytest.mark.interpreter
@pytest.mark.parametrize("invariant", [False, True])
def test_a_workspace_for_calls_of_several_sizes(invariant, device):
    """Made for the largest, used by small ones in between."""
    lens = tuple(1100 if b % 5 == 0 else 30 - b for b in range(6))
    q, k, v, kv_lens = caches(device, lens=lens, capacity=2048)
    workspace = torch_fdattn.decode_workspace(q, k, v, batch_invariant=invariant)
    for count in (6, 2, 6):
        inputs = [x[:count] for x in (q, k, v, kv_lens)]
        expected = torch_fdattn.decode(*inputs, batch_invariant=invariant)
        found = torch_fdattn.decode(*inputs, batch_invariant=invariant, workspace=workspace)
        assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))


@pytest.mark.interpreter
def test_a_workspace_for_more_sequences_than_a_launch_scans(kernel_device, monkeypatch):
    """17 sequences are halved, and the 8, in groups of 3, 3 and 2, take more room than the 9 do."""
    from torch_fdattn.ops.decode.launch import DecodeLaunchPlan

    for name, value in (("MAX_BATCH", 9), ("GROUP", 3), ("SHORT", 0)):
        monkeypatch.setattr(schedule, name, value)
    q, k, v, kv_lens = caches(kernel_device, lens=(1,) * 17, capacity=1024)
    room = torch_fdattn.decode_workspace(q, k, v)
    taken = []
    launches = DecodeLaunchPlan.launches
    monkeypatch.setattr(
        DecodeLaunchPlan, "launches",
        lambda plan, *a, **b: (taken.append(plan.floats), launches(plan, *a, **b))[1],
    )  # fmt: skip
    torch_fdattn.decode(q, k, v, kv_lens, workspace=room)
    assert len(taken) == 2
    assert max(taken) <= room.numel()
    if library.INTERPRET:  # with its two processors the smaller half takes more
        assert taken[1] < taken[0]


@pytest.mark.interpreter
@pytest.mark.parametrize(
    "kind",
    ["every other", *(pytest.param(x, marks=pytest.mark.slow) for x in ("column", "expanded", "transposed"))],
)  # fmt: skip
def test_strided_tables_slopes_and_sinks(kind, device):
    q, k, v, lens = caches(device)
    (k, table), (v, _) = in_pages(k, 16), in_pages(v, 16)

    def laid_out(x):
        if kind == "expanded":
            return x.select(-1, 0).unsqueeze(-1).expand(x.shape)
        if kind == "transposed" and x.dim() == 2:
            return x.t().contiguous().t()
        step = 2 if kind == "every other" else 3
        wide = torch.full((*x.shape, step), -1, dtype=x.dtype, device=device)
        wide[..., 1] = x
        return wide[..., 1]

    for slopes in (torch.rand(6, device=device), torch.rand(4, 6, device=device)):
        strided = [laid_out(x) for x in (slopes, torch.rand(6, device=device))]
        here = table if kind == "expanded" else laid_out(table)
        call = (q, k, v), (strided[0], strided[1])
        out, lse = torch_fdattn.paged_decode(
            *call[0], here, lens, alibi_slopes=call[1][0], sinks=call[1][1]
        )
        dense = [x.contiguous() for x in call[1]]
        right = torch_fdattn.paged_decode(
            *call[0], table, lens, alibi_slopes=dense[0], sinks=dense[1]
        )
        for ours, dense_one in zip((out, lse), right, strict=True):
            if library.use_triton(q):
                assert torch.equal(ours, dense_one)
            else:  # torch's own loops over expanded tensors round differently on some processors
                torch.testing.assert_close(ours, dense_one)


@pytest.mark.interpreter
def test_slopes_and_sinks_far_apart(device):
    """The last head's lie more than 2**31 elements behind the first's."""
    q, k, v, lens = caches(device)
    step = 2**29
    # On a CPU memory that is not touched is not taken.
    buffer = torch.from_numpy(np.zeros(5 * step + 1, np.float16))
    if device == "cuda":
        if torch.cuda.mem_get_info()[0] < 6 << 30:
            pytest.skip(
                f"needs 6 GiB of free GPU memory, found {torch.cuda.mem_get_info()[0] >> 30}"
            )
        buffer = torch.zeros(5 * step + 1, dtype=torch.float16, device=device)
    far = buffer.as_strided((6,), (step,)).copy_(torch.rand(6))
    found = torch_fdattn.decode(q, k, v, lens, alibi_slopes=far, sinks=far)
    near = far.contiguous()
    expected = torch_fdattn.decode(q, k, v, lens, alibi_slopes=near, sinks=near)
    assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))


@pytest.mark.parametrize("wrong", ["q", "k_cache", "page_table"])
def test_a_workspace_for_wrong_inputs(wrong, device):
    q, k, v, _ = caches(device)
    (k, table), (v, _) = in_pages(k, 16), in_pages(v, 16)
    given = dict(q=q, k_cache=k, v_cache=v, page_table=table)
    given[wrong] = given[wrong][0]
    with pytest.raises(ValueError, match=f"{wrong} must have"):
        torch_fdattn.decode_workspace(**given)


def test_sinks_that_only_the_dispatcher_understands(device):
    """A subclass has no memory of its own that a kernel could read."""

    class Seen(torch.Tensor):
        @classmethod
        def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
            called.append(str(func))
            return NotImplemented

    called = []
    q, k, v, lens = caches(device)
    sinks = torch.Tensor._make_wrapper_subclass(Seen, (6,), device=device)
    with pytest.raises(TypeError):
        torch_fdattn.decode(q, k, v, lens, sinks=sinks)
    assert called == ["fdattn.decode_forward.default"]


@pytest.mark.interpreter
def test_scales_of_heads_that_hold_nothing(device):
    """Zero where a head was never written; anything where a sequence is empty."""
    q, k, v, lens = caches(device)
    k, v = k.to(torch.int8), (v * 40).to(torch.int8)
    k_scale, v_scale = torch.rand(4, 2, 1, device=device), torch.rand(4, 2, 1, device=device)
    k_scale[:, 1] = 0
    v_scale[2] = float("nan")  # LENS[2] is 0
    out, lse = torch_fdattn.decode(q, k, v, lens, k_scale=k_scale, v_scale=v_scale)
    inputs = (x.cpu() for x in (q.double(), k, v, lens))
    exact, exact_lse = torch_fdattn.decode(
        *inputs, k_scale=k_scale.cpu(), v_scale=v_scale.nan_to_num(1.0).cpu()
    )
    torch.testing.assert_close(out.double().cpu(), exact, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(lse.double().cpu(), exact_lse, rtol=1e-5, atol=1e-5)


@pytest.mark.interpreter
def test_small_scales_a_key_do_not_vanish(device):
    """Values of 1e-3 beside a key that takes most of the weight: float16 would round them away."""
    q, k, v, _ = caches(device, dtype=torch.float16, lens=(160,))
    v = (v * 40).to(torch.int8)
    v[:, :, 7] = 1
    k8 = (k * 30).to(torch.int8)
    k_scale, v_scale = torch.tensor(1 / 30, device=device), torch.full((160,), 1e-6, device=device)
    q[:] = 3 * k[:, :, 7].repeat_interleave(3, 1)[:, :, None]
    out, _ = torch_fdattn.decode(q, k8, v, k_scale=k_scale, v_scale=v_scale)
    inputs = (x.cpu() for x in (q.double(), k8, v))
    exact, _ = torch_fdattn.decode(*inputs, k_scale=k_scale.cpu(), v_scale=v_scale.cpu())
    error = (out.cpu().float() * 1e6 - exact.float() * 1e6).abs().max()
    assert (
        error <= 0.06 * 1e6 * exact.abs().max()
    )  # the output's own float16, which is subnormal here


def test_sinks_of_no_weight(device):
    q, k, v, lens = caches(device)
    nothing = torch.full((6,), float("-inf"), device=device)
    found = torch_fdattn.decode(q, k, v, lens, sinks=nothing)
    for x, y in zip(found, torch_fdattn.decode(q, k, v, lens), strict=True):
        torch.testing.assert_close(x, y)


@pytest.mark.interpreter
@pytest.mark.parametrize("page", [0, 8])
def test_a_sliding_window_does_not_read_what_it_has_left(page, device):
    """Keys before the window hold NaN, and their pages may be freed."""
    q, k, v, _ = caches(device, lens=(100,))
    inputs = (q, k, v)
    expected = torch_fdattn.decode(q, k, v, int32(100, device=device), window=(10, 0))
    k[:, :, :89], v[:, :, :89] = float("nan"), float("nan")
    call = torch_fdattn.decode
    if page:
        (k, table), (v, _) = in_pages(k, page), in_pages(v, page)
        table[0, :11] = -1
        call, inputs = torch_fdattn.paged_decode, (q, k, v, table)
    found = call(*inputs, int32(100, device=device), window=(10, 0))
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x, y)


def test_batch_invariance_with_gradients(device):
    q, k, v, lens = caches(device, lens=(1500, 40), capacity=1536)
    expected = torch_fdattn.decode(q, k, v, lens, batch_invariant=True)[0]
    found = torch_fdattn.decode(q.requires_grad_(), k, v, lens, batch_invariant=True)[0]
    assert torch.equal(found, expected)
    found.sum().backward()
    assert q.grad is not None


def test_tensors_that_only_the_dispatcher_understands(device):
    q, k, v, lens = caches(device)
    negative = torch.complex(q, -q).conj().imag
    assert negative.is_neg()
    for x, y in zip(
        torch_fdattn.decode(negative, k, v, lens), torch_fdattn.decode(q, k, v, lens), strict=True
    ):
        torch.testing.assert_close(x, y)
    out, lse = torch_fdattn.decode(*(x.to("meta") for x in (q, k, v, lens)))
    assert (out.shape, lse.shape, out.device.type) == (q.shape, q.shape[:3], "meta")


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
@pytest.mark.slow
@pytest.mark.parametrize("invariant", [False, True])
def test_what_a_workspace_holds_does_not_matter(invariant, kernel_device):
    q, k, v, lens = caches(kernel_device, lens=(2500, 64, 0, 513), capacity=2600)
    expected = torch_fdattn.decode(q, k, v, lens, batch_invariant=invariant)
    workspace = torch_fdattn.decode_workspace(q, k, v, batch_invariant=invariant)
    assert workspace.numel()
    workspace.view(torch.float32).fill_(float("nan"))
    found = torch_fdattn.decode(q, k, v, lens, batch_invariant=invariant, workspace=workspace)
    assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))


@pytest.mark.interpreter
@pytest.mark.parametrize(
    ("paged", "limits"),
    [
        (False, {"MAX_BATCH": 1}),
        (True, {"MAX_BATCH": 1}),
        (False, {"GROUP": 1}),
        (True, {"GROUP": 3}),
    ],
    ids=str,
)
def test_more_sequences_than_a_launch_scans(paged, limits, device, monkeypatch):
    q, k, v, lens = caches(device)
    options = dict(
        alibi_slopes=torch.rand(4, 6, device=device), q_start=int32(9, 6, 3, 70, device=device)
    )
    call, inputs = torch_fdattn.decode, (q, k, v)
    if paged:
        (k, table), (v, _) = in_pages(k, 16), in_pages(v, 16)
        call, inputs = torch_fdattn.paged_decode, (q, k, v, table)
    expected = call(*inputs, lens, **options)
    if device == "cuda" or library.INTERPRET:
        from torch_fdattn.ops.decode import schedule

        for name, value in (limits | {"SHORT": 0}).items():
            monkeypatch.setattr(schedule, name, value)
        prepared.forget()
    for x, y in zip(call(*inputs, lens, **options), expected, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-5)


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


@pytest.mark.parametrize("paged", [False, True])
def test_a_workspace_alone_leaves_qs_layout(paged, device):
    """out as without it: in q's order of memory."""
    q, k, v, lens = caches(device)
    q = make_tensor((4, 6, 3, 32), "bshd", device=device)
    call, inputs = torch_fdattn.decode, (q, k, v[..., :16])
    if paged:
        (k, table), (v, _) = in_pages(k, 16), in_pages(v, 16)
        call, inputs = torch_fdattn.paged_decode, (q, k, v[..., :16], table)
    plain = call(*inputs, lens)
    room = torch_fdattn.decode_workspace(*inputs)
    found = call(*inputs, lens, workspace=room)
    assert found[0].stride() == plain[0].stride()
    assert torch.equal(found[0], plain[0])
    with pytest.raises(ValueError, match="q must have 4 dimensions"):
        call(q[0], *inputs[1:], lens, workspace=room)


def test_modes_and_subclasses_see_the_op(device):
    q, k, v, lens = caches(device)
    assert library.can_call_kernel(q, k, v)
    with FlopCounterMode(display=False) as counter:
        assert not library.can_call_kernel(q, k, v)
        torch_fdattn.decode(q, k, v, lens)
    assert counter.get_total_flops() == 4 * 4 * 6 * 160 * 32
    assert not library.can_call_kernel(torch.nn.Parameter(q), k, v)
    seen = []
    torch.func.vmap(lambda x: (seen.append(library.can_call_kernel(x)), x)[1])(q)
    assert seen == [False]
    with torch.inference_mode():
        assert library.can_call_kernel(q, k, v)


@pytest.mark.parametrize(
    ("op", "layout", "given"),
    [
        ("decode_forward", "bhsd", True),
        ("decode_forward", "transposed", False),
        ("decode_forward", "slice", True),
        ("paged_decode_forward", "bshd", False),
        ("paged_decode_forward", "slice", True),
        ("decode_out", "bhsd", False),
        ("decode_out", "bshd", True),
        ("paged_decode_out", "bhsd", True),
        ("paged_decode_out", "transposed", False),
    ],
)
def test_opcheck(op, layout, given, device):
    q = make_tensor((2, 4, 3, 16), layout, device=device)
    k, v = (make_tensor((2, 2, 16, dim), layout, device=device) for dim in (16, 24))
    inputs = (q, k, v)
    scale = None
    if given:
        inputs = (q, *((x * 40).to(torch.int8) for x in (k, v)))  # opcheck compares, float8 cannot
        scale = torch.rand(2, 1, device=device)
    lens = int32(13, 3, device=device)
    if op.startswith("paged"):
        inputs += (int32(1, 0, device=device)[:, None],)
    arguments = [*inputs, lens if given else None, None, None, 4 if given else -1, 0, 0, 0, 0.25]
    extras = [
        scale,
        scale,
        2.0,
        torch.rand(4, device=device),
        torch.rand(2 * 2, device=device),
        True,
    ]
    options = {}
    if op.endswith("out"):
        options = dict(
            out=torch.empty(2, 4, 3, 24, device=device), lse=torch.empty(2, 4, 3, device=device)
        )
    else:
        arguments.append(torch.float32 if given else None)
    opcheck(getattr(OPS, op), tuple(arguments + extras * given), options)


def test_autocast_leaves_quantised_caches_alone(device):
    q, k, v, lens = caches(device)
    k, v = k.to(torch.float8_e4m3fn), v.to(torch.float8_e4m3fn)
    with torch.autocast(device, dtype=torch.float16):
        out, _ = torch_fdattn.decode(q, k, v, lens)
    assert out.dtype == torch.float16
    expected, _ = torch_fdattn.decode(q.half(), k, v, lens)
    assert torch.equal(out, expected)


@pytest.mark.parametrize("name", ["k_scale", "v_scale"])
def test_a_backward_is_refused_where_there_is_none(name, device):
    """And no forward: a model's inputs require gradients outside of no_grad."""
    q, k, v, lens = caches(device)
    options = {name: torch.tensor(1.0, device=device)}
    k, v = k.to(torch.float8_e4m3fn), v.to(torch.float8_e4m3fn)
    expected = torch_fdattn.decode(q, k, v, lens, **options)
    out, lse = torch_fdattn.decode(q.requires_grad_(), k, v, lens, **options)
    assert torch.equal(out, expected[0])
    for result in (out, lse):
        with pytest.raises(
            NotImplementedError, match=f"decode has no gradient with {name}, a quantised"
        ):
            result.sum().backward(retain_graph=True)


def test_pages_have_no_gradient(device):
    q, k, v, lens = caches(device)
    (k, table), (v, _) = in_pages(k, 16), in_pages(v, 16)
    expected, _ = torch_fdattn.paged_decode(q, k, v, table, lens)
    out, _ = torch_fdattn.paged_decode(q.requires_grad_(), k, v, table, lens)
    assert torch.equal(out, expected)
    with pytest.raises(NotImplementedError, match="paged_decode has no gradient over pages"):
        out.sum().backward()


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
    "value head dim 7": (dict(v_cache=torch.ones(40, 2, 16, 7)), ValueError, "v_cache's head_dim must be"),
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


@pytest.mark.interpreter
def test_a_workspace_too_small(kernel_device, monkeypatch):
    monkeypatch.setattr(schedule, "SHORT", 0)
    q, k, v, _ = caches(kernel_device)
    workspace = torch.zeros(10, dtype=torch.int32, device=kernel_device)
    with pytest.raises(ValueError, match=r"workspace must have at least \d+ elements, got 10"):
        torch_fdattn.decode(q, k, v, workspace=workspace)
