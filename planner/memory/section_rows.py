"""Checks of a template's rows that come from a file of somebody's: form, indices and bounds."""

from __future__ import annotations

from typing import Any

from planner.memory.partial_sums import is_partial_sums

# How many of each `planner.memory.sections` knows; imported from there they would need the families.
NUM_COMPONENTS, NUM_MARKS, NUM_SECTIONS = 5, 6, 7
KNOWN_FACTORS = frozenset(("batch", "seq", "half_seq_and_one", "vocab", "width"))
_MOST_SECTIONS, _MOST_ROWS = 200_000, 200_000
_LARGEST_BYTES = 2**60
_LOWEST_CODE = -9
_PARTS = ("forward", "kept", "added", "saved", "kept_exports", "added_exports", "late")


def check_sections(monomials: Any, sections: Any, templates: Any) -> None:
    """Raise ValueError where these are not monomials, sections and their index by key and kinds."""
    if not isinstance(monomials, list) or not isinstance(sections, list):
        raise ValueError("monomials and sections must be lists")
    if not isinstance(templates, dict) or len(sections) > _MOST_SECTIONS:
        raise ValueError("templates must be an object, and the sections not that many")
    for monomial in monomials:
        if not isinstance(monomial, str) or len(monomial) > 100:
            raise ValueError("a monomial is no text")
        if not _is_known(monomial):
            raise ValueError(f"the monomial {monomial!r} has unknown factors")
    for section in sections:
        _check_section(section, len(monomials))
    for by_kinds in templates.values():
        for parts in by_kinds.values() if isinstance(by_kinds, dict) else [None]:
            _check_index(parts, len(sections))


def _is_known(monomial: str) -> bool:
    if is_partial_sums(monomial):
        *products, element_bytes = monomial.split(":")[1:]
        factors = {name for product in products for name in product.split("*")}
        numbers = {name for name in factors if name.isdigit() and len(name) < 16}
        return len(products) == 2 and element_bytes in "248" and factors - numbers <= KNOWN_FACTORS
    return set(filter(None, monomial.split("*"))) <= KNOWN_FACTORS


def _check_index(parts: Any, num_sections: int) -> None:
    if not isinstance(parts, dict) or set(parts) != {*_PARTS, "holders"}:
        raise ValueError("a template lacks a part")
    for part in _PARTS:
        numbers = parts[part].values() if isinstance(parts[part], dict) else [None]
        if not all(_is_index(number, num_sections) for number in numbers):
            raise ValueError(f"a template's {part} names a section that is not there")
    for number, kinds in parts["holders"].items():
        if not number.isdigit() or not isinstance(kinds, list):
            raise ValueError("a template's holders are malformed")


def _check_section(section: Any, num_monomials: int) -> None:
    if isinstance(section, dict):  # exports: numbers by code or section
        numbers = [n for found in section.values() for n in found]
        if not all(_is_index(number, _MOST_ROWS) for number in numbers):
            raise ValueError("an export is no number")
        return
    if not isinstance(section, list) or len(section) > _MOST_ROWS:
        raise ValueError("a section is no list of rows")
    for row in section:
        if not isinstance(row, list) or not _is_row(row, num_monomials):
            raise ValueError(f"a row is malformed: {str(row)[:80]}")


def _is_row(row: list[Any], num_monomials: int) -> bool:
    if len(row) == 6:
        *texts, monomial, size_bytes = (row[0], row[1], row[3], row[4], row[5])
        named = isinstance(row[2], list) and all(
            isinstance(text, str) for text in (*texts, *row[2])
        )
        return bool(named) and _is_index(monomial, num_monomials) and _is_index(size_bytes)
    return all(type(number) is int for number in row) and _is_step(row, num_monomials)


def _is_step(row: list[int], num_monomials: int) -> bool:
    if len(row) == 1:
        return 0 <= row[0] < NUM_MARKS
    if len(row) == 2:
        return _LOWEST_CODE <= row[0] < NUM_SECTIONS and _is_index(row[1], _MOST_ROWS)
    if len(row) != 3 or not 0 <= row[0] < NUM_COMPONENTS:
        return False
    return _is_index(row[1], num_monomials) and _is_index(row[2])


def _is_index(number: Any, end: int = _LARGEST_BYTES) -> bool:
    return isinstance(number, int) and not isinstance(number, bool) and 0 <= number < end
