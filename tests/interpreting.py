"""For tests that start processes with TRITON_INTERPRET=1."""

from __future__ import annotations

import numpy
import pytest
import triton

from torch_fdattn.doctor.software import interpreter_trap

_TRAP = interpreter_trap(triton.__version__, numpy.__version__)
needs_interpreter = pytest.mark.skipif(_TRAP is not None, reason=_TRAP or "")
