"""Write the planner's templates: `python -m runners.trace.build [FAMILY ...]`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import transformers

import planner.memory
from runners.trace.graft import loss_templates
from runners.trace.template import build_template
from runners.trace.variants import FAMILIES, adapter_variants, variants

FOLDER = Path(planner.memory.__file__).parent / "templates"


def write_family(family: str, folder: Path = FOLDER) -> Path:
    """Trace every variant of a family and write its template file; returns the path."""
    traced = {variant: build_template(variant) for variant in variants(family)}
    traced |= loss_templates(traced, build_template)
    traced |= {variant: build_template(variant) for variant in adapter_variants(family)}
    templates = {variant.key: template for variant, template in traced.items()}
    return write_templates(family, templates, folder)


def write_templates(family: str, templates: dict[str, dict[str, Any]], folder: Path) -> Path:
    """Write a family's templates by key, each distinct section and monomial once."""
    path = folder / f"{family}.json"
    head = {
        "family": family,
        "transformers": transformers.__version__,
        "torch": torch.__version__.split("+")[0],
    }
    pool, names = _Pool(), _Pool()
    index = {
        key: {kinds: _indexed(template, pool, names) for kinds, template in by_kinds.items()}
        for key, by_kinds in templates.items()
    }
    lines = ",\n".join(f"{json.dumps(key)}: {_compact(value)}" for key, value in index.items())
    sections = ",\n".join(pool.items)
    path.write_text(
        f'{json.dumps(head)[:-1]}, "monomials": [{", ".join(names.items)}],\n'
        f'"sections": [\n{sections}\n], "templates": {{\n{lines}\n}}}}\n'
    )
    return path


def _indexed(template: dict[str, Any], pool: _Pool, names: _Pool) -> dict[str, Any]:
    """Replace every section of a template by its number in the pool."""
    numbered: dict[str, Any] = {"holders": template["holders"]}
    for part in ("forward", "kept", "added", "saved"):
        sections = template[part].items()
        numbered[part] = {name: pool.add(_numbered(rows, names)) for name, rows in sections}
    for part in ("kept_exports", "added_exports", "late"):
        numbered[part] = {name: pool.add(found) for name, found in template[part].items()}
    return numbered


class _Pool:
    """Numbers distinct values: variants share most of their sections and monomials."""

    def __init__(self) -> None:
        self.items: dict[str, int] = {}

    def add(self, value: Any) -> int:
        """The number of `value`, new or known."""
        return self.items.setdefault(_compact(value), len(self.items))


def _numbered(rows: list[list[Any]], names: _Pool) -> list[list[Any]]:
    """Replace the monomials of a section's or of saved tensors' rows by their numbers."""
    out = []
    for row in rows:
        if len(row) == 6:
            row = [*row[:4], names.add(row[4]), row[5]]
        elif len(row) == 3:
            row = [row[0], names.add(row[1]), row[2]]
        out.append(row)
    return out


def _compact(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))


def main(families: list[str]) -> None:
    """Write the named families, or all."""
    for family in families or FAMILIES:
        path = write_family(family)
        print(f"{family}: {path.stat().st_size} bytes", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
