"""`python -m torch_fdattn.doctor [--json]`, also under torchrun."""

from __future__ import annotations

import argparse
import sys

from . import main

parser = argparse.ArgumentParser(prog="python -m torch_fdattn.doctor", description=main.__doc__)
parser.add_argument("--json", action="store_true", help="print the findings as JSON")
sys.exit(main(json=parser.parse_args().json))
