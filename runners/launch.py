"""How a job is started: its command, and the few variables that it sees of our environment."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from planner.traced import FOLDER_VARIABLE, own_folder
from runners.contract import SPEC_FILE, JobKind, JobSpec, World
from runners.process_tree import TAG_VARIABLE

RANK_LOGS = "ranks"
MAX_RANKS = 16

_ALLOWED_NAMES = frozenset(
    {
        "HF_HOME",
        "HOME",
        "LANG",
        "LD_LIBRARY_PATH",
        "OMP_NUM_THREADS",
        "PATH",
        "PYTHONPATH",
        "TMPDIR",
        "VIRTUAL_ENV",
    }
)
_ALLOWED_PREFIXES = ("CUDA_", "NCCL_", "NVIDIA_", "NVSHMEM_", "PYTORCH_", "TORCH_", "TRITON_")


def num_ranks(spec: JobSpec) -> int:
    """Return how many processes a job has: `solo` plays one rank of many alone.

    Raises ValueError for more than one host can hold.
    """
    spread = (
        (spec.plan or {}).get("parallelism", {}) if spec.calibration is None else spec.calibration
    )
    if spec.world is World.SOLO:
        return 1
    ranks = int(spread.get("world_size", 1))
    if not 1 <= ranks <= MAX_RANKS:
        raise ValueError(
            f"the world {spec.world} starts every rank on this machine: world_size is {ranks}, "
            f"it must be from 1 to {MAX_RANKS}, or use the world solo"
        )
    return ranks


def job_command(spec: JobSpec, run_directory: Path) -> list[str]:
    """Return the command of a job: one Python, or torchrun where the world has several ranks.

    A search for a limit is one process, which starts the ranks of each of its runs.
    """
    module = f"runners.jobs.{spec.kind}"
    arguments = [str(run_directory / SPEC_FILE), str(run_directory)]
    ranks = 1 if spec.kind is JobKind.LIMIT else num_ranks(spec)
    if ranks == 1:
        return [sys.executable, "-m", module, *arguments]
    torchrun = [
        *(sys.executable, "-m", "torch.distributed.run"),
        *("--standalone", "--nproc-per-node", str(ranks)),
        *("--log-dir", str(run_directory / RANK_LOGS), "--redirects", "3"),
    ]
    return [*torchrun, "-m", module, *arguments]


def job_environment(
    run_id: str, gpu_uuids: Sequence[str] | None, parent: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """Return the environment of a job: what is allowed of ours, the run's id, its GPUs, the traces.

    `gpu_uuids` are the GPUs it may see; None leaves that to our own CUDA_VISIBLE_DEVICES.

    A job never reaches the network: the model is built from the config in its spec.
    """
    environment = {
        name: value
        for name, value in parent.items()
        if name in _ALLOWED_NAMES or name.startswith(_ALLOWED_PREFIXES)
    }
    environment |= {TAG_VARIABLE: run_id, "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
    # By its name, for a job does not know the database beside which it is.
    environment[FOLDER_VARIABLE] = str(own_folder(parent).resolve())
    if gpu_uuids is not None:
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(gpu_uuids)
    return environment
