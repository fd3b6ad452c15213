"""`install`: `import flash_attn` gives this package's functions, in this process, until `uninstall`.

Python is told in its own documented ways: a finder on sys.meta_path has specs of the modules, and importlib.metadata
finds distributions by the names that code looks for (transformers asks for "flash-attn" and its version).
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys
import types
from collections.abc import Iterable, Sequence
from importlib.machinery import ModuleSpec
from importlib.metadata import Distribution, DistributionFinder
from pathlib import Path

from torch_fdattn.dropins.flash_attn import bert_padding, interface_2, interface_3

#: The versions whose interfaces these are.
VERSION_2, VERSION_3 = "2.8.3", "3.0.0"
#: By name: where a module's names come from, which they are, and its version.
_MODULES = {
    "flash_attn": (interface_2, interface_2.FUNCTIONS, VERSION_2),
    "flash_attn.bert_padding": (bert_padding, bert_padding.__all__, VERSION_2),
    "flash_attn.flash_attn_interface": (interface_2, interface_2.__all__, VERSION_2),
    "flash_attn_interface": (interface_3, interface_3.__all__, VERSION_3),
}
#: By the names of distributions: version, and the module that each brings.
_DISTRIBUTIONS = {
    "flash-attn": (VERSION_2, "flash_attn"),
    "flash-attn-3": (VERSION_3, "flash_attn_interface"),
}


class _Distribution(Distribution):
    def __init__(self, name: str) -> None:
        version, module = _DISTRIBUTIONS[name]
        self._files = {
            "METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
            "top_level.txt": f"{module}\n",
        }

    def read_text(self, filename: str) -> str | None:
        return self._files.get(filename)

    def locate_file(self, path) -> Path:
        return Path(__file__).parent / path


class _ModuleFinder(DistributionFinder, importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds, loads and describes the modules; `replaced`: what stood under their names."""

    def __init__(self, replaced: dict[str, types.ModuleType]) -> None:
        self.replaced = replaced

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None
    ) -> ModuleSpec | None:  # fmt: skip
        if fullname not in _MODULES:
            return None
        origin = _MODULES[fullname][0].__file__
        return ModuleSpec(fullname, self, origin=origin, is_package=fullname == "flash_attn")

    def create_module(self, spec: ModuleSpec) -> None:
        return None

    def exec_module(self, module: types.ModuleType) -> None:
        source, names, module.__version__ = _MODULES[module.__name__]
        module.__doc__ = f"{module.__name__} by torch_fdattn.dropins.flash_attn."
        module.__all__ = [name for name in names if not name.startswith("_")]
        for name in names:
            setattr(module, name, getattr(source, name))

    def find_distributions(
        self, context: DistributionFinder.Context | None = None
    ) -> Iterable[Distribution]:
        asked = context.name if context is not None else None
        return [
            _Distribution(name)
            for name in _DISTRIBUTIONS
            if asked is None or asked.lower().replace("_", "-") == name
        ]


def install(replace: bool = False) -> None:
    """Makes `import flash_attn` and `import flash_attn_interface` find our functions, in this process.

    The modules are flash_attn, flash_attn.bert_padding, flash_attn.flash_attn_interface and flash_attn_interface (the
    names of FlashAttention-3). Call it before whatever imports them: names that a module holds already stay theirs, and
    transformers remembers its first answer to whether flash_attn is there. A second call changes nothing.

    Args:
        replace: take the place of a FlashAttention that is installed or imported.

    Raises:
        RuntimeError: there is one, and replace is False.

    Examples:
        >>> torch_fdattn.dropins.flash_attn.install()
        >>> import flash_attn
        >>> flash_attn.flash_attn_func(*torch.randn(3, 2, 10, 8, 64), causal=True).shape
        torch.Size([2, 10, 8, 64])
        >>> torch_fdattn.dropins.flash_attn.uninstall()
    """
    if type(replace) is not bool:
        raise TypeError(f"replace must be a bool, got {replace!r}")
    if any(isinstance(finder, _ModuleFinder) for finder in sys.meta_path):
        return
    for name in ("flash_attn", "flash_attn_interface"):
        if not replace and (name in sys.modules or importlib.util.find_spec(name) is not None):
            state = "imported" if name in sys.modules else "installed"
            raise RuntimeError(
                f"install must not take the place of {name}, which is {state}, unless replace is True, got replace=False"
            )
    replaced = {name: sys.modules.pop(name) for name in list(sys.modules) if _is_theirs(name)}
    sys.meta_path.insert(0, _ModuleFinder(replaced))
    for name in _MODULES:
        importlib.import_module(name)


def uninstall() -> None:
    """Takes `install` back, and gives the names to what they stood for before. Names that others hold stay ours.

    Examples:
        >>> torch_fdattn.dropins.flash_attn.uninstall()  # of nothing: changes nothing
    """
    finder = next((x for x in sys.meta_path if isinstance(x, _ModuleFinder)), None)
    if finder is None:
        return
    sys.meta_path.remove(finder)
    for name in [x for x in sys.modules if _is_theirs(x)]:
        del sys.modules[name]
    sys.modules.update(finder.replaced)


def _is_theirs(name: str) -> bool:
    return name.partition(".")[0] in ("flash_attn", "flash_attn_interface")
