"""Trace a model of any architecture: `python -m runners.trace.any_model SPEC OUT`.

SPEC is a JSON file with the configuration and the variants that are wanted, OUT the trace file to
write. Progress and refusals go to stdout as JSON lines: {"done": 1, "of": 4, "what": "..."} or
{"error": "one sentence"}. Nothing is downloaded, no weights are read, no code of a repository runs.
"""

from __future__ import annotations

import json
import os
import resource
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from planner.units import GIB_BYTES

REFUSED = 2
# What tracing may take on top of the libraries: meta tensors own no memory.
_MEMORY_BYTES = 12 * GIB_BYTES


class RefusedError(Exception):
    """A model or machine that cannot be traced; `str()` is one sentence."""


def report(**fields: Any) -> None:
    """Write one JSON line for whoever watches."""
    sys.stdout.write(json.dumps(fields) + "\n")
    sys.stdout.flush()


@contextmanager
def _sentences() -> Iterator[None]:
    """Turn what transformers and torch raise for a model of somebody's into one sentence."""
    try:
        yield
    except RefusedError:
        raise
    except ImportError as error:
        missing = error.name or str(error)
        raise RefusedError(f"Tracing needs {missing}: pip install 'peakmark' brings it.") from error
    except MemoryError as error:
        limit = _MEMORY_BYTES // GIB_BYTES
        raise RefusedError(f"The model needs more than {limit} GiB to be traced.") from error
    except Exception as error:
        # A stranger's configuration meets a stranger's code: any exception is a refusal.
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        text = (" ".join(lines[:2]) or type(error).__name__)[:300].rstrip(".:")
        if type(error).__name__ == "UntraceableError":
            raise RefusedError(str(error)) from error
        raise RefusedError(
            f"transformers cannot run this model on the meta device: {text}."
        ) from error


def trace(spec: Mapping[str, Any], out: Path) -> None:
    """Trace what `spec` names and write it to `out`, beside what is in it already."""
    report(done=0, of=1, what="loading transformers")
    with _sentences():
        from runners.trace.own_file import trace_model

        _limit_memory()
        text = trace_model(
            spec["config"],
            attentions=tuple(spec["attention"]),
            computes=tuple(spec["compute"]),
            checkpointings=tuple(spec["checkpointing"]),
            known=out,
            watch=lambda done, of, what: report(done=done, of=of, what=what),
        )
    partial = out.with_suffix(f".{os.getpid()}.partial")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(text)
        partial.replace(out)
    except OSError as error:
        raise RefusedError(f"The trace cannot be written to {out}: {error.strerror}.") from error


def _limit_memory() -> None:
    """Let this process have only so much more address space than the libraries have taken."""
    pages = int(Path("/proc/self/statm").read_text().split()[0]) if sys.platform == "linux" else 0
    if pages:
        limit = pages * resource.getpagesize() + _MEMORY_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))


def main(arguments: Sequence[str]) -> int:
    """Run one trace; the exit code is 0 or, with a sentence on stdout, REFUSED."""
    spec_path, out_path = map(Path, arguments)
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        os.environ[name] = "1"
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"
    try:
        trace(json.loads(spec_path.read_text()), out_path)
    except RefusedError as error:
        report(error=str(error))
        return REFUSED
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
