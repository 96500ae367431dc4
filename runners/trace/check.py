"""Compare stored templates with what tracing the installed transformers gives today."""

from __future__ import annotations

import hashlib
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any, TypeVar

import transformers

from planner.memory.kinds import kind_set, wider_contexts
from planner.memory.sections import COMPONENTS, MARKS
from runners.trace.patterns import Pattern, traced_patterns
from runners.trace.step import trace_step
from runners.trace.template import pattern_parts, united
from runners.trace.variants import Variant

Template = Mapping[str, Mapping[str, Any]]
Chosen = TypeVar("Chosen")
_FOLDER = Path(__file__).parent


def variant_differences(variant: Variant, stored: Template) -> Iterator[str]:
    """Trace a variant with all its patterns; yield every difference from its `stored` template."""
    for pattern in traced_patterns(variant):
        yield from pattern_differences(variant, pattern, stored)


def pattern_differences(
    variant: Variant,
    pattern: Pattern,
    stored: Template,
    trace: Callable[..., Any] = trace_step,
) -> Iterator[str]:
    """Trace a variant with one pattern of layers; yield what of it the template says otherwise.

    A difference names part, section, the number of the row, and both tensors.
    """
    parts, holders = pattern_parts(variant, pattern, trace)
    known = stored.get(kind_set(pattern))
    where = f"{variant.family} {variant.key}, {kind_set(pattern)}"
    if known is None:
        yield f"{where}: these kinds of layers are not stored"
        return
    for part, sections in parts.items():
        for name, traced in sections.items():
            found = _look_up(known[part], name)
            yield from (f"{where}: {part} {name} {text}" for text in _differences(found, traced))
    for number, kind in holders.items():
        if kind not in known["holders"].get(str(number), ()):
            yield f"{where}: tensor {number} of embed is now held by layers '{kind}'"


def _look_up(sections: Mapping[str, Any], name: str) -> Any:
    """The stored section of a context, or of a wider one; None if there is none."""
    section, context = name.split(" ")
    names = (f"{section} {wider}" for wider in wider_contexts(context))
    return next((sections[wider] for wider in names if wider in sections), None)


def _differences(stored: Any, traced: Any) -> Iterator[str]:
    if stored is None:
        if traced:
            yield "is not stored"
    elif united(stored, traced) != stored:
        if isinstance(stored, Mapping):
            yield f"{stored} -> {traced}"
            return
        for index, (old, new) in enumerate(zip_longest(stored, traced)):
            if old != new:
                yield f"row {index}: {row_words(old)} -> {row_words(new)}"


def row_words(row: Sequence[Any] | None) -> str:
    """Say what a row of a template is: an allocation by component and size, a release, a mark."""
    if row is None:
        return "nothing"
    if len(row) == 6:
        module, operation, shape, dtype, monomial, size_bytes = row
        shown = ", ".join(shape)
        return f"{module} {operation} [{shown}] {dtype}, {monomial or 'one'} x {size_bytes} B"
    if len(row) == 3:
        return f"{COMPONENTS[row[0]]} {row[1] or 'one'} x {row[2]} B"
    if len(row) == 2:
        return f"release of {row[0]}, {row[1]}"
    return str(MARKS[row[0]])


def rotation_seed() -> str:
    """What chooses the variants that a test run traces again: the same for the same commit.

    Without a repository, the tracing code and the version of transformers.
    """
    command = ("git", "-C", str(_FOLDER), "rev-parse", "HEAD")
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        sources = b"".join(path.read_bytes() for path in sorted(_FOLDER.glob("*.py")))
        return hashlib.sha256(sources + transformers.__version__.encode()).hexdigest()


def choice(candidates: Sequence[Chosen], seed: str) -> Chosen:
    """Choose one of several by a seed, alike on every machine."""
    number = int.from_bytes(hashlib.sha256(seed.encode()).digest())
    return candidates[number % len(candidates)]
