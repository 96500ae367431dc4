"""Scripts and jobs run in processes that already have torch and the models: forked, not started.

To start Python, torch and transformers takes five seconds of a processor for every rank, and nothing that
these tests assert. One process that has begun no work of its own imports them once (multiprocessing's
fork server), and every other is its copy. Jobs that are started as the product starts them are in
test_worker, test_record and test_saved_steps.
"""

from __future__ import annotations

import os
import runpy
import socket
import sys
from collections.abc import Mapping, Sequence
from multiprocessing import get_context
from multiprocessing.context import ForkServerProcess
from pathlib import Path

_CONTEXT = get_context("forkserver")
_CONTEXT.set_forkserver_preload(["tests.runners.preloaded"])


def begin(
    arguments: Sequence[str], log: Path, variables: Mapping[str, str] | None = None
) -> ForkServerProcess:
    """Begin `python ARGUMENTS`, of a script or of `-m` and a module, with its output in `log`.

    It sees this process's environment of now, with `variables` and one thread.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **(variables or {})}
    process = _CONTEXT.Process(
        target=_play, args=(list(arguments), str(log), environment), daemon=True
    )
    process.start()
    return process


def finish(process: ForkServerProcess, timeout_s: float) -> int:
    """Wait for a process and return its exit code; ends one that takes longer and raises TimeoutError."""
    process.join(timeout_s)
    if process.exitcode is None:
        process.kill()
        process.join()
        raise TimeoutError(f"a forked process took more than {timeout_s:.0f} s")
    return process.exitcode


def run_ranks(arguments: Sequence[str], world_size: int, log: Path, timeout_s: float) -> list[int]:
    """Run every rank of a world, told of it as torchrun tells; return their exit codes."""
    variables = {"WORLD_SIZE": str(world_size), "MASTER_ADDR": "127.0.0.1"}
    variables |= {"LOCAL_WORLD_SIZE": str(world_size), "MASTER_PORT": str(_free_port())}
    ranks = [
        begin(
            arguments,
            log.with_name(f"{log.name}.{rank}"),
            {**variables, "RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(world_size)
    ]
    return [finish(process, timeout_s) for process in ranks]


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def _play(arguments: list[str], log: str, environment: dict[str, str]) -> None:
    """Become `python ARGUMENTS`."""
    os.environ.clear()
    os.environ.update(environment)
    with Path(log).open("w") as out:
        os.dup2(out.fileno(), 1)
        os.dup2(out.fileno(), 2)
    if arguments[0] == "-m":
        sys.argv = arguments[1:]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = arguments
        sys.path.insert(0, str(Path(arguments[0]).parent))
        runpy.run_path(arguments[0], run_name="__main__")
