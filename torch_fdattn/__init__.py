"""torch_fdattn: flash attention and flash decode for PyTorch, on one device and over many.

Importing registers the ops under ``torch.ops.fdattn``; it needs no GPU and compiles nothing.
"""

from torch_fdattn import dist, ops
from torch_fdattn.functional import attention, decode, merge_states
from torch_fdattn.version import __version__

__all__ = ["__version__", "attention", "decode", "dist", "merge_states", "ops"]
