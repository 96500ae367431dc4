"""Reading a JSON file that a person named: bounded, and what is wrong with it as one sentence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from app.commands.output import InputError

MAX_FILE_BYTES = 64_000_000


def read_json_file(field: str, path: Path, said: str, allowed: str) -> Any:
    """Return the document in `path`; raises InputError, whose sentence begins with `said`.

    No more than the largest file is read, so that a device or a pipe does not fill the memory.
    """
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
        if len(data) <= MAX_FILE_BYTES:
            return json.loads(data)
        reason = f"it has more than {MAX_FILE_BYTES:,} bytes"
    except OSError as error:
        reason = error.strerror or type(error).__name__
    except UnicodeDecodeError:
        reason = "it is not UTF-8 text"
    except (ValueError, RecursionError):
        reason = "it is not JSON"
    raise InputError(field, str(path), allowed, f"{said}: {reason}.")
