"""`python -m tests.golden [--write | NAME]`: see `__init__.py`."""

from __future__ import annotations

import os
import sys
from pathlib import Path

FILE = Path(__file__).with_name("launches.txt")


def main(arguments: list[str]) -> int:
    from tests.golden import book, device
    from tests.golden.run import launches

    if arguments and not arguments[0].startswith("-"):
        for name, made in launches(arguments[0]).items():
            print(f"call {name}")
            for launch in made:
                print(f"  kernel {launch.kernel}")
                print("\n".join(f"    {key}={value}" for key, value in launch.values.items()))
        return 0
    today = launches()
    missing = device.kernels() - {x.kernel for made in today.values() for x in made}
    if missing:
        print(f"no call launches {', '.join(sorted(missing))}: add one to tests/golden/calls")
        return 1
    if arguments == ["--write"]:
        FILE.write_text(book.written(today))
        print(f"{len(today)} calls, {sum(map(len, today.values()))} launches: {FILE.name}")
        return 0
    found = list(book.differences(book.read(FILE.read_text()), today))
    print("\n".join(found) or f"all {len(today)} calls launch what {FILE.name} has")
    return int(bool(found))


if __name__ == "__main__":
    # Before anything of the package is imported: real kernels, settings by default, no GPU.
    os.environ.pop("TRITON_INTERPRET", None)
    for name in [x for x in os.environ if "FDATTN" in x]:
        del os.environ[name]
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    sys.exit(main(sys.argv[1:]))
