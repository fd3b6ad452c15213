"""Ring attention's strategy `one_sided`: what a failed or missing rank leaves to others."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from torch_fdattn.dist import ring_attention, set_timeout
from torch_fdattn.dist.ring_attention import head_groups, placing
from torch_fdattn.dist.symm.copies import Copies

from .test_ring_one_sided import (
    Failure,
    assert_the_next_call_ends,
    needs_kernels,
    raising_on_cpus,
)


@needs_kernels
def test_what_lost_keys_make_of_scores_gradients(group, rank_device, monkeypatch) -> None:
    """NaN as well, where nothing raises: rank 0 does not come to the backward."""
    rank, world = dist.get_rank(), dist.get_world_size()
    if world == 1:
        pytest.skip("needs 2 ranks")
    new = dist.new_group()
    monkeypatch.setattr(Copies, "raise_if_lost", lambda self: None)  # as on GPUs
    shape = dict(device=rank_device, requires_grad=True)
    own = [torch.randn(1, 2, 16, 32, **shape) for _ in range(3)]
    slopes, mask = torch.rand(2, **shape), torch.randn(1, 2, 16, 16 * world, **shape)
    given = dict(alibi_slopes=slopes, attn_mask=mask, strategy="one_sided")
    for is_there in (True, rank != 0):
        out = ring_attention(*own, new.group_name, **given)[0]
        dist.barrier()
        if is_there:
            found = torch.autograd.grad(out.sum(), [*own, slopes, mask])
        set_timeout(1)
    assert rank == 0 or all(x.isnan().all() for x in found)
    dist.barrier()
    set_timeout(10)
    dist.destroy_process_group(new)


@needs_kernels
@pytest.mark.parametrize("heads", [1, 2])
def test_a_forward_that_fails_before_it_sends(group, rank_device, monkeypatch, heads: int) -> None:
    """On rank 0: an exception there and on the others, within the time limit; its next call waits no longer for them. Nor do
    they for the memory of a second group of heads."""
    rank, world = dist.get_rank(), dist.get_world_size()
    if world == 1:
        pytest.skip("needs 2 ranks")
    new = dist.new_group()
    monkeypatch.setattr(head_groups, "_LIMITS", head_groups.Limits(1, 1, 0))
    monkeypatch.setattr(head_groups, "_MAX_CALLS", 1000)

    def call(heads: int = heads) -> Tensor:
        x = torch.randn(1, heads, 16, 32, device=rank_device)
        return ring_attention(x, x, x, new.group_name, strategy="one_sided")[0]

    def fails(*_: object) -> None:
        raise Failure

    call(heads=1)
    set_timeout(2)
    try:
        with monkeypatch.context() as patch:
            if rank == 0:
                patch.setattr(placing, "place", fails)
                with pytest.raises(Failure):
                    call()
            else:
                with raising_on_cpus(rank_device):
                    assert call().isnan().all()
        assert_the_next_call_ends(call, "forward")
    finally:
        set_timeout(10)
        dist.barrier()
        dist.destroy_process_group(new)
