"""torchtitan's VarlenAttention over FDATTN: `--override.imports torch_fdattn.dropins.torchtitan.fdattn`.

torchtitan's own activates FA3 or FA4 when a layer is built, over what was active before. This one activates FDATTN,
and has torch choose flash attention, where later versions of torch would send calls to cuDNN, past the registry.
All else (sharding, checkpoints of activations, documents) is torchtitan's. Importing needs torchtitan.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn.attention import (
    SDPBackend,
    activate_flash_attention_impl,
    current_flash_attention_impl,
    sdpa_kernel,
)
from torchtitan.config import derive, override
from torchtitan.models.common.attention import VarlenAttention

_NAME = "FDATTN"


class FdattnVarlenAttention(VarlenAttention):
    @dataclass(kw_only=True, slots=True)
    class Config(VarlenAttention.Config):
        pass

    def __init__(self, config: Config) -> None:
        nn.Module.__init__(self)  # not VarlenAttention's, which activates another implementation
        self.window_size = config.window_size
        activate_flash_attention_impl(_NAME)

    def forward(self, *args: Tensor, **options: object) -> Tensor:
        """As VarlenAttention's: q, k, v (B, L, heads, head_dim); raises RuntimeError where FDATTN is active no longer."""
        if current_flash_attention_impl() != _NAME:
            raise RuntimeError(
                f"the active flash attention implementation must be {_NAME}, got {current_flash_attention_impl()}: "
                "a layer that was built later activated its own; override all of them, or none"
            )
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return super().forward(*args, **options)


@override(target=VarlenAttention.Config, exact=True, description="torch_fdattn's flash attention")
def fdattn(config: VarlenAttention.Config) -> FdattnVarlenAttention.Config:
    """The same layer over FDATTN.

    Source: torchtitan 0.3, `torchtitan/config/override.py`.
    """
    return derive(config, FdattnVarlenAttention.Config)
