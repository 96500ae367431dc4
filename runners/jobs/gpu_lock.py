"""One run at a time on a GPU: prepared processes queue on a lock file, in no other way connected."""

from __future__ import annotations

import fcntl
import os
import re
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path


def lock_path(gpu_name: str) -> Path:
    """Return the lock file of the GPU with this UUID or driver index."""
    safe = re.sub(r"[^A-Za-z0-9-]", "_", gpu_name)
    return Path(tempfile.gettempdir()) / f"peakmark-gpu-{safe}.lock"


@contextmanager
def hold_gpus(gpu_names: Sequence[str]) -> Iterator[None]:
    """Wait for all the named GPUs and hold them; the kernel releases them if the process dies.

    Always locked in sorted order, so that two runs over several GPUs cannot wait for each other.
    """
    with ExitStack() as stack:
        for name in sorted(gpu_names):
            # Readable and writable by all: any user's run on this machine takes the same lock.
            descriptor = os.open(lock_path(name), os.O_RDWR | os.O_CREAT, 0o666)
            stack.callback(os.close, descriptor)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
