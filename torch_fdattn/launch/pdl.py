"""Kernels that start before the one ahead of them in the stream has ended (programmatic dependent launch, from sm_90 on).

The earlier kernel calls `pdl_trigger`; once all its programs have, or have ended, the dependent one (launched with
launch_pdl=True) begins wherever an SM has free resources. What it needs of the earlier one it reads behind
`await_previous`. The next kernel of the stream waits for the dependent one alone, so at least one of its programs
must have waited, even where it needs nothing.

A kernel that may itself start early calls `pdl_trigger` behind its own wait: so what is older than it has ended when the
dependent one begins. That, and that alone, may the dependent one read before it waits, and from the L2 (FROM_L2, or
volatile loads): the L1 of its SM may hold what was there before.
"""

from __future__ import annotations

import triton
import triton.language as tl

from torch_fdattn.environment import INTERPRET

try:
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
except ImportError:  # a build of Triton for AMD alone, where PDL is never set
    gdc_launch_dependents = gdc_wait = None

_CAPABILITY = (9, 0)
#: The cache modifier of loads ahead of the wait.
FROM_L2 = tl.constexpr(".cg")


def supports_pdl(capability: tuple[int, int]) -> bool:
    """Whether a device of this compute capability knows dependent launches."""
    return capability >= _CAPABILITY and not INTERPRET


@triton.jit
def pdl_trigger(PDL: tl.constexpr):
    """Lets the dependent kernel start as soon as every program of this one is here, or has ended."""
    if PDL:
        gdc_launch_dependents()


@triton.jit
def await_previous(PDL: tl.constexpr):
    """Waits for the kernel before, where this one may start earlier."""
    if PDL:
        gdc_wait()
