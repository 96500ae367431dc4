"""One run at a time on a GPU: prepared processes queue on a lock file, in no other way connected."""

from __future__ import annotations

import fcntl
import os
import re
import tempfile
from collections.abc import Sequence
from pathlib import Path


def lock_path(gpu_name: str) -> Path:
    """Return the lock file of the GPU with this UUID or driver index."""
    safe = re.sub(r"[^A-Za-z0-9-]", "_", gpu_name)
    return Path(tempfile.gettempdir()) / f"peakmark-gpu-{safe}.lock"


def take_gpus(gpu_names: Sequence[str]) -> None:
    """Wait for all the named GPUs and hold them until this process ends.

    Not a context: the next run must not start while this one's memory is still on the card, and
    the driver frees that only when the process is gone. Always locked in sorted order, so that two
    runs over several GPUs cannot wait for each other.
    """
    for name in sorted(gpu_names):
        # Readable and writable by all: any user's run on this machine takes the same lock.
        descriptor = os.open(lock_path(name), os.O_RDWR | os.O_CREAT, 0o666)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
