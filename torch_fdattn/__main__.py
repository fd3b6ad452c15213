"""`python -m torch_fdattn …` and the command `fdattn …`."""

from __future__ import annotations

import sys

from torch_fdattn.extras import install_command
from torch_fdattn.stdout import unwritable_is_one_line


def main() -> None:
    with unwritable_is_one_line():
        _main()


def _main() -> None:
    try:
        from torch_fdattn.cli import app
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in ("typer", "rich"):
            raise
        if sys.argv[1:2] == ["doctor"]:  # it says what is missing, so it must not need it
            from torch_fdattn import doctor

            raise SystemExit(doctor.main(json="--json" in sys.argv[2:])) from None
        print(
            f"fdattn: the command line needs the package {missing}: {install_command('cli')}",
            file=sys.stderr,
        )
        raise SystemExit(2) from None
    app(prog_name="fdattn")


if __name__ == "__main__":
    main()
