"""How an optional dependency is installed, as errors and the doctor say it; without torch, like `environment`."""

from __future__ import annotations


def install_command(extra: str) -> str:
    """The remedy where the packages of an extra are missing; no package index has torch_fdattn."""
    return f"pip install -e '.[{extra}]' in torch_fdattn's checkout"
