"""For tests that start processes with TRITON_INTERPRET=1, and for those of the interpreter alone."""

from __future__ import annotations

import numpy
import pytest
import triton

from torch_fdattn.doctor.software import interpreter_trap
from torch_fdattn.ops.library import INTERPRET

_TRAP = interpreter_trap(triton.__version__, numpy.__version__)
needs_interpreter = pytest.mark.skipif(_TRAP is not None, reason=_TRAP or "")
needs_interpret = pytest.mark.skipif(
    not INTERPRET, reason="tests a kernel: needs a CUDA device or TRITON_INTERPRET=1"
)
