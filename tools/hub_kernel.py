"""The ops in the layout of Hugging Face's `kernels` package: `python -m tools.hub_kernel FOLDER`.

    FOLDER/build/torch-cpu/      __init__.py, metadata.json, LICENSE, and the package's modules below its ops
    FOLDER/build/torch-cuda/     the same sources under other names

`kernels` takes the variant of the backend that torch was built for, and imports it under the id in its metadata.
Several versions may be loaded in one process, beside an installed torch_fdattn: imports become relative, and the ops
of each copy are registered under a name of its own, `torch.ops.fdattn_<backend>_<hash of the sources>`.

A copy has what one device computes. What torch or transformers know by a fixed name (FDATTN, attn_implementation
"fdattn", the compile backend) is left out: two versions cannot both have the name.

Source: the layout of github.com/huggingface/kernels 0.17 (kernels/variants.py, importer.py).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import shutil
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "torch_fdattn"
BACKENDS = ("cpu", "cuda")
#: Modules and folders of the package that a copy has; `_relative` raises if one of them needs another.
PARTS = (
    "ops", "launch", "tables", "functional.py", "decode_plan.py", "checks.py", "environment.py", "sources.py", "version.py",
    "py.typed",
)  # fmt: skip
_IMPORT = re.compile(r"^(?P<indent> *)from torch_fdattn(?P<path>[\w.]*) import ", re.MULTILINE)
#: An import of another form, which would find an installed torch_fdattn, or none.
_OTHER_IMPORT = re.compile(
    r"^ *import torch_fdattn\b|import_module\(f?\"torch_fdattn", re.MULTILINE
)
_NAMESPACE = 'NAMESPACE = "fdattn"\n'

_INIT = '''"""{summary}

torch_fdattn {version}, copied for the kernels package. The ops are torch.ops.{namespace}.
"""

from .decode_plan import plan_decode, plan_paged_decode
from .functional import *
from .functional import __all__ as _functional
from .ops.attention.tuning import autotune, tiles
from .ops.determinism import set_deterministic
from .ops.library import NAMESPACE
from .version import __version__

__all__ = [
    *_functional,
    "NAMESPACE",
    "__version__",
    "autotune",
    "plan_decode",
    "plan_paged_decode",
    "set_deterministic",
    "tiles",
]
'''
_SUMMARY = "Flash attention and flash decode as PyTorch ops, in Python and Triton."


def sources(package: Path = PACKAGE) -> dict[str, str]:
    """The text of every file of a copy, by its path in the package."""
    found = {}
    for part in PARTS:
        top = package / part
        for path in sorted(top.rglob("*")) if top.is_dir() else [top]:
            if path.suffix in (".py", ".json", ".typed"):
                found[path.relative_to(package).as_posix()] = path.read_text(encoding="utf-8")
    return found


def version_hash(files: dict[str, str]) -> str:
    """Ten hexadecimal digits that every change of the sources, or of this tool, changes."""
    digest = hashlib.sha256(Path(__file__).read_bytes())
    for name, text in sorted(files.items()):
        digest.update(f"{name}\0{text}\0".encode())
    return digest.hexdigest()[:10]


def _has(files: dict[str, str], module: list[str]) -> bool:
    path = "/".join(module)
    return not module or f"{path}.py" in files or any(x.startswith(f"{path}/") for x in files)


def _relative(name: str, files: dict[str, str]) -> str:
    """The text of a file with imports that do not depend on what its package is called."""
    text = files[name]
    if other := _OTHER_IMPORT.search(text):
        raise ValueError(
            f"{name}: expected `from torch_fdattn… import …`, which can be made relative, got "
            f"{other.group().strip()!r}"
        )
    dots = "." * len(Path(name).parts)

    def relative(match: re.Match) -> str:
        module = [x for x in match["path"].split(".") if x]
        if not _has(files, module):
            raise ValueError(
                f"{name}: imports torch_fdattn{match['path']}, which a copy does not have: add it to PARTS of "
                "tools/hub_kernel.py"
            )
        return f"{match['indent']}from {dots}{'.'.join(module)} import "

    return _IMPORT.sub(relative, text)


def write_variant(folder: Path, backend: str, files: dict[str, str]) -> str:
    """Writes FOLDER/build/torch-BACKEND; returns its namespace of ops."""
    digest = version_hash(files)
    namespace = f"fdattn_{backend}_{digest}"
    target = folder / "build" / f"torch-{backend}"
    for name in files:
        text = _relative(name, files) if name.endswith(".py") else files[name]
        text = re.sub(r"\bops\.fdattn\b", f"ops.{namespace}", text)
        if name == "ops/library.py":
            if text.count(_NAMESPACE) != 1:
                raise ValueError(f"{name}: expected one line {_NAMESPACE.strip()!r}")
            text = text.replace(_NAMESPACE, f'NAMESPACE = "{namespace}"\n')
        path = target / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    version = re.search(r'__version__ = "(.*)"', files["version.py"]).group(1)
    init = _INIT.format(summary=_SUMMARY, version=version, namespace=namespace)
    (target / "__init__.py").write_text(init, encoding="utf-8")
    metadata = {
        "id": f"_torch_fdattn_{backend}_{digest}",
        "name": "torch-fdattn",
        "version": 0,  # of the interface, which is not final before 0.1.0
        "license": "Apache-2.0",
        "python-depends": [],
        "backend": {"type": backend},
    }
    (target / "metadata.json").write_text(json.dumps(metadata, indent=2) + "\n", encoding="utf-8")
    shutil.copy(ROOT / "LICENSE", target)
    return namespace


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tools.hub_kernel", description=__doc__.split("\n")[0]
    )
    parser.add_argument("folder", type=Path, help="a new or empty folder outside of the checkout")
    folder = parser.parse_args().folder.resolve()
    if folder.is_relative_to(ROOT):
        parser.error(f"folder must lie outside of the checkout, got {folder}")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        parser.error(f"folder must be new or empty, got {folder}")
    files = sources()
    for backend in BACKENDS:
        namespace = write_variant(folder, backend, files)
        print(f"{folder / 'build' / f'torch-{backend}'}: torch.ops.{namespace}")


if __name__ == "__main__":
    main()
