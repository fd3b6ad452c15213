"""What decode hands to each of its kernels: a tensor for each pointer, by the parameter's name, none for a missing one."""

import itertools

import pytest
import torch

import torch_fdattn
from torch_fdattn.launch.launches import Launch
from torch_fdattn.ops.decode import op
from torch_fdattn.ops.decode.inputs import Cache, DecodeCall
from torch_fdattn.ops.decode.kernel import _decode_kernel
from torch_fdattn.ops.decode.launch import DecodeLaunchPlan
from torch_fdattn.ops.decode.merge import _merge_kernel
from torch_fdattn.ops.library import INTERPRET
from torch_fdattn.ops.options import DecodeOptions
from torch_fdattn.ops.positions import Mask
from torch_fdattn.ops.scores import Scores

if INTERPRET:
    pytest.skip("compiles kernels, which the interpreter replaces", allow_module_level=True)


def pointer_names(kernel) -> list[str]:
    return [name.removesuffix("_ptr") for name in kernel.arg_names if name.endswith("_ptr")]


@pytest.mark.parametrize(
    ("lens", "starts", "sinks", "paged", "workspace", "masked"),
    list(itertools.product([False, True], repeat=6)),
)
def test_order(lens, starts, sinks, paged, workspace, masked, monkeypatch):
    batch, heads, kv_heads, keys = 3, 4, 2, 4096
    q = torch.randn(batch, heads, 1, 32)
    k, v = (torch.randn(batch, kv_heads, keys, 32) for _ in range(2))
    table = None
    if paged:
        k, v = (x.view(batch * 256, 16, kv_heads, 32).transpose(1, 2) for x in (k, v))
        table = torch.arange(batch * 256, dtype=torch.int32).view(batch, 256)
    numbers = lambda given: torch.ones(batch, dtype=torch.int32) if given else None  # noqa: E731
    mask = Mask(numbers(lens), numbers(starts), numbers(starts))
    scores = Scores(
        sinks=torch.zeros(heads) if sinks else None,
        alibi_slopes=torch.ones(heads),
        attn_mask=torch.zeros(keys) if masked else None,
    )
    out, lse = torch.empty_like(q), torch.empty(batch, heads, 1)
    options = DecodeOptions(mask, 0.1, scores)
    call = DecodeCall(q, Cache(k, v, table), options)
    plan = DecodeLaunchPlan(call, out, target_splits=64, capability=(9, 0))
    assert plan._merge is not None
    seen = []

    def through_triton(launch: Launch) -> None:
        kinds = [pair for pair in zip(launch.kernel.arg_names, launch.arguments, strict=False)]
        seen.append({name: x.data_ptr() for name, x in kinds if isinstance(x, torch.Tensor)})

    monkeypatch.setattr(Launch, "through_triton", through_triton)
    room = torch.empty(plan.floats, dtype=torch.int32) if workspace else None
    parts = []
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *a, **b: parts.append(empty(*a, **b)) or parts[-1])
    made = op.PreparedDecode(plan, q, out, lse)
    made.run(q, k, v, call.tensors, (out, lse, room))
    (room,) = [room] if workspace else parts
    tensors = dict(
        q=q, k=k, v=v, out=out, lse=lse, parts=room, part_lses=room[plan.lse_offset :], kv_lens=mask[0],
        q_start=mask[1], kv_start=mask[2], page_table=table, k_scale=None, v_scale=None,
        slopes=scores.alibi_slopes, mask=scores.attn_mask, sinks=scores.sinks,
    )  # fmt: skip
    for kernel, addresses in zip((_decode_kernel, _merge_kernel), seen, strict=True):
        names = [name for name in pointer_names(kernel) if tensors[name] is not None]
        expected = {f"{name}_ptr": tensors[name].data_ptr() for name in names}
        assert addresses == expected, kernel


def test_a_plan_is_whole_before_others_find_it(monkeypatch):
    """Two threads that make the same first call: none may find a plan that lacks what the other still adds."""
    found = []

    def remember(key, made) -> None:
        assert made.lse_shape == (2, 4, 1)
        assert made.out is None
        assert isinstance(made.plan, DecodeLaunchPlan)
        found.append(key)

    monkeypatch.setattr(op.prepared, "remember", remember)
    monkeypatch.setattr(op.library, "use_triton", lambda _: True)
    monkeypatch.setattr(op.PreparedDecode, "run", lambda self, *_: None)
    q, k = torch.randn(2, 4, 1, 16), torch.randn(2, 2, 8, 16)
    torch_fdattn.decode(q, k, k)
    assert len(found) == 1


def test_pages_need_a_table():
    """Pages as many as sequences would pass for a contiguous cache."""
    q, k = torch.randn(2, 4, 1, 16), torch.randn(2, 2, 8, 16)
    with pytest.raises(TypeError, match=r"page_table must be a torch\.Tensor, got None"):
        torch_fdattn.paged_decode(q, k, k, None)
