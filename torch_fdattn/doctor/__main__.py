"""`python -m torch_fdattn.doctor [--json]`, also under torchrun."""

from __future__ import annotations

import argparse
import sys

from torch_fdattn.stdout import unwritable_is_one_line

from . import main

parser = argparse.ArgumentParser(prog="python -m torch_fdattn.doctor", description=main.__doc__)
parser.add_argument("--json", action="store_true", help="print the findings as JSON")
with unwritable_is_one_line():
    sys.exit(main(json=parser.parse_args().json))
