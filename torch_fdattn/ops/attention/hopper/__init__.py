"""Attention for Hopper's tensor cores, in Gluon: imported where a kernel of it is compiled, and nowhere else."""

import functools
import warnings


@functools.cache
def is_importable() -> bool:
    """Whether this Triton has what the kernels are written with: Gluon's names are not stable. Warns once where not."""
    try:
        from torch_fdattn.ops.attention.hopper.backward.launch import takes  # noqa: F401
        from torch_fdattn.ops.attention.hopper.fp8 import fp8_launches  # noqa: F401
    except (ImportError, AttributeError) as error:
        warnings.warn(
            f"attention runs the portable kernels, which are slower on this GPU: Hopper's need triton 3.6 or 3.7 ({error})",
            stacklevel=2,
        )
        return False
    return True
