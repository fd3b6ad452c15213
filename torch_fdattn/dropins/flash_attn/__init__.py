"""FlashAttention's Python interface on our ops: call it here, or `install()` it under the name flash_attn.

Importing this module changes nothing. `install` makes `import flash_attn` find these functions, for code that stays as
it is; the names of FlashAttention-3 are in `interface_3`.
"""

from torch_fdattn.dropins.flash_attn.functions import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
)
from torch_fdattn.dropins.flash_attn.install import install, uninstall
from torch_fdattn.dropins.flash_attn.kvcache import flash_attn_with_kvcache
from torch_fdattn.dropins.flash_attn.varlen import (
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
)

__all__ = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
    "install",
    "uninstall",
]
