"""torchtitan's Llama 3 of its tests over FDATTN, in a process that has torchtitan: see test_torchtitan.py."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import current_flash_attention_impl, restore_flash_attention_impl
from torchtitan.config import apply_overrides
from torchtitan.config.override import OverrideConfig
from torchtitan.models.common.attention import (
    VarlenAttention,
    create_varlen_metadata_for_document,
)
from torchtitan.models.llama3 import model_registry

import torch_fdattn
from torch_fdattn.ops.library import launches

IMPORT = "torch_fdattn.dropins.torchtitan.fdattn"
LAYERS = 6


def by_sdpa(q, k, v, **options):
    """Attention of one document a row, in float32."""
    q, k, v = (x.transpose(1, 2).float() for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)


def built(override: bool):
    spec = model_registry("debugmodel", attn_backend="varlen")
    lines = apply_overrides(OverrideConfig(imports=[IMPORT]), spec.model) if override else []
    assert len(lines) == (LAYERS if override else 0), lines
    model = spec.model.build()
    model.init_states(buffer_device=torch.device("cpu"))
    return model


torch.manual_seed(0)
plain = VarlenAttention.Config().build()  # on the CPU it activates nothing
ours, theirs = built(override=True), built(override=False)
for module in theirs.modules():
    if isinstance(module, VarlenAttention):
        module.forward = by_sdpa
assert current_flash_attention_impl() == "FDATTN"
layer = next(x for x in ours.modules() if isinstance(x, VarlenAttention))
assert type(layer).__name__ == "FdattnVarlenAttention"
assert (
    vars(layer).keys() == vars(plain).keys()
)  # nothing that VarlenAttention's __init__ sets is missing
theirs.load_state_dict(ours.state_dict())
on_cpu = torch_fdattn.dropins.flash_impl.activate("CPU")  # held, or it is removed

tokens = torch.randint(2048, (2, 48))
positions = torch.arange(48).expand(2, 48)
masks = create_varlen_metadata_for_document(positions)
launches.clear()
logits = ours(tokens, positions, masks)
assert launches == {"varlen_attention_forward/cpu": LAYERS}, launches
wanted = theirs(tokens, positions, masks)
error = (logits - wanted).norm() / wanted.norm()
assert error < 1e-2, error  # attention is bfloat16
grads = [
    torch.autograd.grad(x.float().logsumexp(-1).sum(), y.tok_embeddings.weight)[0]
    for x, y in ((logits, ours), (wanted, theirs))
]
assert launches["varlen_attention_backward/cpu"] == LAYERS
error = (grads[0] - grads[1]).norm() / grads[1].norm()
assert error < 2e-2, error

# Two documents in a row of tokens: each as it is alone.
halves = torch.cat([torch.arange(20), torch.arange(28)]).expand(2, 48)
both = ours(tokens, halves, create_varlen_metadata_for_document(halves))
first = ours(tokens[:, :20], halves[:, :20], create_varlen_metadata_for_document(halves[:, :20]))
torch.testing.assert_close(both[:, :20], first, rtol=2e-2, atol=2e-2)

launches.clear()
compiled = torch.compile(copy.deepcopy(ours), backend="aot_eager", fullgraph=True)
torch.testing.assert_close(compiled(tokens, positions, masks), logits, rtol=2e-2, atol=2e-2)
assert launches["varlen_attention_forward/cpu"] == LAYERS
assert not torch_fdattn.dropins.flash_impl.fallbacks

restore_flash_attention_impl()
with pytest.raises(RuntimeError, match="must be FDATTN, got None"):
    ours(tokens, positions, masks)
print("torchtitan over FDATTN")
