"""Outputs and workspaces that the caller gives, of one size or of several."""

import pytest
import torch

import torch_fdattn
from tests.ops.decode.inputs import caches, in_pages, int32
from torch_fdattn.launch import prepared
from torch_fdattn.ops import library
from torch_fdattn.ops.decode import schedule
from torch_fdattn.testing import make_tensor


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


@pytest.mark.parametrize("wrong", ["q", "k_cache", "page_table"])
def test_a_workspace_for_wrong_inputs(wrong, device):
    q, k, v, _ = caches(device)
    (k, table), (v, _) = in_pages(k, 16), in_pages(v, 16)
    given = dict(q=q, k_cache=k, v_cache=v, page_table=table)
    given[wrong] = given[wrong][0]
    with pytest.raises(ValueError, match=f"{wrong} must have"):
        torch_fdattn.decode_workspace(**given)


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


@pytest.mark.interpreter
def test_a_workspace_too_small(kernel_device, monkeypatch):
    monkeypatch.setattr(schedule, "SHORT", 0)
    q, k, v, _ = caches(kernel_device)
    workspace = torch.zeros(10, dtype=torch.int32, device=kernel_device)
    with pytest.raises(ValueError, match=r"workspace must have at least \d+ elements, got 10"):
        torch_fdattn.decode(q, k, v, workspace=workspace)
