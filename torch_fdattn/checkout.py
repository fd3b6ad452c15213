"""What an installation would tell Python of this package, for a checkout that is only on the path.

`torch.compile(backend="fdattn")` looks its name up among entry points, which are part of an installed package's
metadata. `announce` gives importlib.metadata a finder of its own (its documented way to be extended) that has the
same entry point. Where the package is installed, the installed metadata come first and this one is not used.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from importlib.metadata import Distribution, DistributionFinder
from pathlib import Path

from torch_fdattn.version import __version__

_NAME = "torch-fdattn"
_FILES = {
    "METADATA": f"Metadata-Version: 2.1\nName: {_NAME}\nVersion: {__version__}\n",
    "entry_points.txt": "[torch_dynamo_backends]\nfdattn = torch_fdattn.compile_backend:fdattn\n",
}


class _Checkout(Distribution):
    """The package in this folder; importlib.metadata takes the first distribution of a name."""

    def read_text(self, filename: str) -> str | None:
        return _FILES.get(filename)

    def locate_file(self, path) -> Path:
        return Path(__file__).parents[1] / path


class _CheckoutFinder(DistributionFinder):
    def find_spec(self, *args, **kwargs) -> None:
        return None  # of distributions alone

    def find_distributions(self, context: DistributionFinder.Context) -> Iterable[Distribution]:
        if context.name is None or context.name.lower().replace("_", "-") == _NAME:
            return [_Checkout()]
        return []


def announce() -> None:
    """Makes the entry point known, also to a torch.compile that has looked for entry points before."""
    if not any(isinstance(finder, _CheckoutFinder) for finder in sys.meta_path):
        sys.meta_path.append(_CheckoutFinder())
    registry = sys.modules.get("torch._dynamo.backends.registry")
    search = getattr(registry, "_discover_entrypoint_backends", None)
    if hasattr(search, "cache_info") and search.cache_info().currsize:
        search.cache_clear()
        search()  # a name that is known keeps what was loaded for it
