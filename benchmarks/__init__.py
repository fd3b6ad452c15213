"""Benchmarks of torch_fdattn against peers and floors: `python -m benchmarks --help`.

Figures are those of the shipped tables, unless TORCH_FDATTN_TABLES names one of this machine.
"""

import os

os.environ.setdefault("TORCH_FDATTN_TABLES", "")
