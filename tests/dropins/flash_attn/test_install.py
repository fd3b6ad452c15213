"""`install` and `uninstall`, each in a process of its own: what `import flash_attn` finds, and what is refused."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


def run(script: str, path: Path | None = None) -> None:
    """The script in a fresh Python, which must end without an error; `path` comes first on its path."""
    begin = f"import sys; sys.path[:0] = {[*([str(path)] if path else []), str(ROOT)]!r}\n"
    done = subprocess.run([sys.executable, "-c", begin + script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.fixture
def theirs(tmp_path: Path) -> Path:
    """A folder with some other flash_attn on the path."""
    (tmp_path / "flash_attn").mkdir()
    (tmp_path / "flash_attn" / "__init__.py").write_text("WHOSE = 'theirs'\n")
    (tmp_path / "flash_attn" / "layers.py").write_text("")
    return tmp_path


def test_importing_installs_nothing() -> None:
    run(
        "import torch_fdattn, importlib.util\n"
        "torch_fdattn.dropins.flash_attn\n"
        "assert 'flash_attn' not in sys.modules and importlib.util.find_spec('flash_attn') is None\n"
    )


def test_what_is_found() -> None:
    run(
        "import importlib.metadata as metadata, importlib.util, inspect, torch_fdattn\n"
        "drop = torch_fdattn.dropins.flash_attn\n"
        "drop.install()\n"
        "drop.install()\n"  # twice is once
        "names = 'flash_attn', 'flash_attn.bert_padding', 'flash_attn.flash_attn_interface', 'flash_attn_interface'\n"
        "assert all(name in sys.modules and importlib.util.find_spec(name) for name in names)\n"
        "import flash_attn, flash_attn_interface\n"
        "from flash_attn import flash_attn_func, flash_attn_varlen_qkvpacked_func, flash_attn_with_kvcache\n"
        "from flash_attn.bert_padding import index_first_axis, pad_input, unpad_input\n"
        "from flash_attn.flash_attn_interface import flash_attn_func as same\n"
        "from flash_attn_interface import flash_attn_combine\n"
        "assert flash_attn_func is same is drop.flash_attn_func\n"
        "assert flash_attn_interface.flash_attn_func is not same\n"
        "assert 'window_size' in inspect.signature(flash_attn_func).parameters\n"
        "assert flash_attn.__version__ == metadata.version('flash_attn') == metadata.version('flash-attn')\n"
        "assert flash_attn_interface.__version__ == metadata.version('flash_attn_3')\n"
        "assert metadata.packages_distributions()['flash_attn'] == ['flash-attn']\n"
        "drop.uninstall()\n"
        "drop.uninstall()\n"
        "assert not any(name in sys.modules or name.startswith('flash_attn.') for name in names[:1])\n"
        "assert importlib.util.find_spec('flash_attn') is None\n"
        "assert not any('flash' in (x.name or '') for x in metadata.distributions())\n"
    )


@pytest.mark.parametrize("imported", [pytest.param(False, marks=pytest.mark.slow), True])
def test_another_is_not_replaced_unless_asked(theirs: Path, imported: bool) -> None:
    state = "imported" if imported else "installed"
    run(
        f"{'import flash_attn, flash_attn.layers' if imported else ''}\n"
        "import importlib.util, torch_fdattn\n"
        "drop = torch_fdattn.dropins.flash_attn\n"
        "try:\n"
        "    drop.install()\n"
        "    raise SystemExit('not refused')\n"
        "except RuntimeError as error:\n"
        f"    assert 'flash_attn, which is {state}, unless replace is True, got replace=False' in str(error), error\n"
        "import flash_attn\n"
        "assert flash_attn.WHOSE == 'theirs'\n"
        "drop.install(replace=True)\n"
        "import flash_attn\n"
        "assert flash_attn.flash_attn_func is drop.flash_attn_func\n"
        "assert 'flash_attn.layers' not in sys.modules\n"
        "drop.uninstall()\n"
        "import flash_attn\n"
        "assert flash_attn.WHOSE == 'theirs'\n"
        f"assert ('flash_attn.layers' in sys.modules) is {imported}\n",
        theirs,
    )


def test_replace_is_a_bool() -> None:
    from torch_fdattn.dropins.flash_attn import install

    with pytest.raises(TypeError, match="replace must be a bool, got 1"):
        install(1)
