"""The execution of programs, compiled to machine code by numba.

Compiling takes some ten seconds, once per machine: the result is kept on disk, beside this module or,
where that cannot be written, in the user's cache (NUMBA_CACHE_DIR names another place). Where no
place can be written, every process compiles anew. Loading what is kept takes half a second.
"""

from __future__ import annotations

import inspect
import threading
import zlib
from collections.abc import Callable
from functools import cache
from types import FunctionType
from typing import Any

from planner.memory import allocator, blocks, execution, expandable

_MODULES = (blocks, allocator, expandable, execution)
# Tables are only handed on: without reference counts of them a request takes a fifth of the time.
_OPTIONS: dict[str, Any] = {"_nrt": False, "error_model": "numpy"}
# What most requests go through: a call hands on all tables, and takes as long as what it is for.
_INLINED = frozenset(
    (
        *("class_of", "position", "give", "_list", "_link", "take", "best", "new_block", "drop"),
        *("cut", "join", "is_free", "release", "has_room", "reserve", "has_rows"),
        *("_pool", "_empty", "_count"),
    )
)
_lock = threading.Lock()


def compiled_serve() -> Callable[..., None]:
    """`execution.serve`, to be compiled or loaded as it is first called with a program's tables."""
    with _lock:
        return _compile()


@cache
def _compile() -> Callable[..., None]:
    import numba
    from numba.extending import register_jitable

    for module in _MODULES:
        for name, function in vars(module).items():
            if isinstance(function, FunctionType) and function.__module__ == module.__name__:
                register_jitable(forceinline=name in _INLINED, **_OPTIONS)(function)
    sources = "".join(inspect.getsource(module) for module in _MODULES)
    njit: Any = numba.njit
    serve: Callable[..., None]
    try:
        serve = njit(cache=True, **_OPTIONS)(_entry(zlib.crc32(sources.encode())))
    except RuntimeError:  # no place for the cache can be written
        serve = njit(**_OPTIONS)(_entry(0))
    return serve


def _entry(version: int) -> Callable[..., None]:
    """The function to compile. What is kept on disk of it is of this `version` of all it calls."""
    serve = execution.serve

    def entry(
        heap: Any,
        requests: Any,
        operations: Any,
        num_before: int,
        repeats: int,
        held: Any,
        events: Any,
        capacity_bytes: int,
        is_expandable: bool,
    ) -> None:
        if version >= 0:
            serve(
                heap,
                requests,
                operations,
                num_before,
                repeats,
                held,
                events,
                capacity_bytes,
                is_expandable,
            )

    return entry
