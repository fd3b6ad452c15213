"""Reading the files of a model's folder: regular ones alone, each within a limit of bytes.

A named pipe blocks whoever opens it, and a device may have no end. Links are followed: Hugging Face's cache is made of
them.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from torch_fdattn.models.errors import ModelError

#: Of a JSON file or a chat template; the index of a model of ten thousand tensors takes one MiB.
MAX_JSON_BYTES = 2**25
#: Of tokenizer.json and tokenizer.model; a vocabulary of 256k tokens takes 32 MiB.
MAX_TOKENIZER_BYTES = 2**27

_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
}


def has_file(path: Path) -> bool:
    """Whether there is a regular file at `path`, or a link to one.

    Raises:
        ModelError: there is something else, or it cannot be said.
    """
    try:
        mode = os.stat(path).st_mode
    except (FileNotFoundError, NotADirectoryError, ValueError):  # ValueError: a name with a NUL
        return False
    except OSError as error:
        raise ModelError(f"{path}: cannot be read ({error.strerror})") from None
    if not stat.S_ISREG(mode):
        kind = _KINDS.get(stat.S_IFMT(mode), "something else")
        raise ModelError(f"{path}: must be a regular file, got {kind}")
    return True


def read_file(path: Path, limit: int = MAX_JSON_BYTES) -> bytes:
    """The bytes of a regular file.

    Raises:
        ModelError: there is no such file, it is no regular file, larger than `limit` bytes, or cannot be read.
    """
    if not has_file(path):
        raise ModelError(f"{path}: no such file")
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size > limit:
                raise ModelError(f"{path}: must have at most {limit} bytes, got {size}")
            return file.read(size)  # not to the end: a file of /proc says 0 and may go on for ever
    except OSError as error:
        raise ModelError(f"{path}: cannot be read ({error.strerror})") from None
