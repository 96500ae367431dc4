"""Folders that a command names: as the worker finds them, and told at once where there is none."""

from __future__ import annotations

import os
from pathlib import Path

from app.commands.output import InputError


def absolute_folder(option: str, given: Path | None) -> str | None:
    """Return a folder as the worker finds it, which runs elsewhere in the tree of folders.

    The folder may be missing: a run makes it. Raises InputError for something that is no folder.
    """
    if given is None:
        return None
    path = os.path.abspath(given.expanduser())  # noqa: PTH100
    if Path(path).exists() and not Path(path).is_dir():
        allowed = "a folder"
        sentence = f"--{option} is '{given}', which is a file: it must be {allowed}."
        raise InputError(option, str(given), allowed, sentence)
    return path


def existing_folder(option: str, given: Path | None) -> str | None:
    """Return a folder that a run reads, as the worker finds it; raises InputError without one."""
    path = absolute_folder(option, given)
    if path is not None and not Path(path).is_dir():
        allowed = "a folder that exists"
        sentence = f"--{option} is '{given}': it must be {allowed}."
        raise InputError(option, str(given), allowed, sentence)
    return path
