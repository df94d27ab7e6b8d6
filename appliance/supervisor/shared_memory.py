"""Size of /dev/shm, which the libraries of several ranks share. Containers get 64 MiB of it by default."""

import os
from pathlib import Path

from appliance.supervisor.supervise import Service

FOLDER = Path("/dev/shm")
NEEDED = 2**30
"""Bytes that rendered deployments give the service."""


def warning(service: Service, folder: Path = FOLDER) -> str:
    """Return a warning if models with several ranks have less shared memory than rendered deployments give them, else
    an empty text."""
    if all(engine.parallelism.tensor == 1 for engine in service.engines):
        return ""
    try:
        found = os.statvfs(folder)
    except OSError:
        return ""
    size = found.f_blocks * found.f_frsize
    if size >= NEEDED or not size:  # 0: the file system has no limit
        return ""
    return (
        f"{folder} has {size // 2**20} MiB, and ranks of a model need up to {NEEDED // 2**20} MiB: start the container "
        "with `docker run --shm-size 1g`, or mount an emptyDir with medium: Memory"
    )
