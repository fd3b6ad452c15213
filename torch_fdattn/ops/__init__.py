"""The attention ops on one device. Importing this package registers them under `torch.ops.fdattn`."""

from torch_fdattn.ops import flops
from torch_fdattn.ops.append_kv import op as _append_kv  # noqa: F401
from torch_fdattn.ops.attention import derivative_op as _attention_derivatives  # noqa: F401
from torch_fdattn.ops.attention import op as _attention  # noqa: F401
from torch_fdattn.ops.attention_fp8 import op as _attention_fp8  # noqa: F401
from torch_fdattn.ops.decode import op as _decode  # noqa: F401
from torch_fdattn.ops.library import launches
from torch_fdattn.ops.merge_states import op as _merge_states  # noqa: F401
from torch_fdattn.ops.merge_states import tree as _merge_tree  # noqa: F401
from torch_fdattn.ops.varlen_attention import op as _varlen_attention  # noqa: F401

flops.register()

__all__ = ["launches"]
