"""Known failures of drivers, compilers and process groups, and what mends them."""

from __future__ import annotations

NEWER_DRIVER = "update the NVIDIA driver, or install torch for an older CUDA"

# Part of the message in lower case -> what to do. The first match counts.
_REMEDIES: tuple[tuple[str, str], ...] = (
    (
        "no kernel image",
        "this torch build has no code for this GPU: install a torch wheel for its CUDA version",
    ),
    ("driver version is insufficient", NEWER_DRIVER),
    ("driver on your system is too old", NEWER_DRIVER),
    (
        "illegal memory access",
        "run again with CUDA_LAUNCH_BLOCKING=1 to see the kernel, and report it with that output",
    ),
    ("out of memory", "another program holds the GPU's memory: nvidia-smi lists it"),
    (
        "no nvidia driver",
        "install the NVIDIA driver; in Docker start the container with --gpus all",
    ),
    ("duplicate gpu", "start at most one process per GPU: torchrun --nproc-per-node <GPUs>"),
    ("no space left", "enlarge /dev/shm: docker run --ipc=host, or --shm-size=8g"),
    ("creating shared memory segment", "enlarge /dev/shm: docker run --ipc=host, or --shm-size=8g"),
    (
        "address already in use",
        "another job holds MASTER_PORT: end it, or choose another port (torchrun --master-port)",
    ),
    ("eaddrinuse", "another job holds MASTER_PORT: end it, or choose another port"),
    ("libcuda", "the driver's library is missing: in Docker start the container with --gpus all"),
    (
        "python.h",
        "Triton compiles its launcher with a C compiler: install gcc and the Python headers",
    ),
    ("c compiler", "Triton compiles its launcher with a C compiler: install gcc, or set CC"),
)


def remedy_for(error: str, default: str = "") -> str:
    lowered = error.lower()
    return next((remedy for part, remedy in _REMEDIES if part in lowered), default)
