"""`peakmark worker`: execute queued runs on this machine."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from app.commands.output import JsonFlag, print_json


def worker_command(
    once: Annotated[bool, typer.Option("--once", help="Stop when the queue is empty.")] = False,
    json: JsonFlag = False,
) -> None:
    """Execute queued runs until stopped (Ctrl-C); --json only names the command."""
    command = [sys.executable, "-m", "runners.worker", *(["--once"] if once else [])]
    if json:
        print_json({"command": command})
        return
    sys.stdout.flush()
    os.execv(command[0], command)
