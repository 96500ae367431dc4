"""Write the planner's templates: `python -m runners.trace.build [--check | --older] [FAMILY[=KEY] ...]`."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

import planner.memory
from planner.memory.templates import with_parts
from runners.trace.check import variant_differences
from runners.trace.graft import loss_templates
from runners.trace.template import build_template
from runners.trace.variants import FAMILIES, adapter_variants, variants

FOLDER = Path(planner.memory.__file__).parent / "templates"
# What recorded rows ran that newer transformers runs otherwise (`planner.as_run`).
OLDER_FOLDER = FOLDER / "older"


def write_family(family: str, keys: Sequence[str] = (), folder: Path = FOLDER) -> Path:
    """Trace a family's variants and write its template file; returns the path.

    With `keys`, only these variants and their losses are traced; the file keeps its others.
    """
    every = (*variants(family), *adapter_variants(family))
    chosen = [variant for variant in every if not keys or variant.key in keys]
    traced = {variant: build_template(variant) for variant in chosen}
    with_losses = {variant: t for variant, t in traced.items() if variant.has_other_losses}
    traced |= loss_templates(with_losses, build_template)
    templates = read_templates(folder / f"{family}.json") if keys else {}
    templates |= {variant.key: template for variant, template in traced.items()}
    return write_templates(family, templates, folder)


def write_older(family: str, keys: Sequence[str], folder: Path = OLDER_FOLDER) -> Path:
    """Trace single variants with an older transformers and put them beside those that are there."""
    path = folder / f"{family}.json"
    templates = read_templates(path) if path.is_file() else {}
    every = (*variants(family), *adapter_variants(family))
    templates |= {v.key: build_template(v) for v in every if v.key in keys}
    return write_templates(family, templates, folder)


def read_templates(path: Path) -> dict[str, dict[str, Any]]:
    """Read a template file back into what `build_template` returns, by key."""
    data = with_parts(json.loads(path.read_text()))
    sections, monomials = data["sections"], data["monomials"]

    def part(name: str, indices: Any) -> Any:
        if name == "holders":
            return indices
        return {key: _named(sections[index], monomials) for key, index in indices.items()}

    return {
        key: {
            kinds: {name: part(name, indices) for name, indices in parts.items()}
            for kinds, parts in by_kinds.items()
        }
        for key, by_kinds in data["templates"].items()
    }


def write_templates(family: str, templates: dict[str, dict[str, Any]], folder: Path) -> Path:
    """Write a family's templates by key, each distinct section and monomial once."""
    path = folder / f"{family}.json"
    head = {
        "family": family,
        "transformers": transformers.__version__,
        "torch": torch.__version__.split("+")[0],
    }
    text = _with_each_part_once(json.loads(templates_text(head, templates)))
    # In one step: a planner that reads meanwhile sees the file as it was or as it is.
    partial = path.with_suffix(".partial")
    partial.write_text(text)
    partial.replace(path)
    return path


def _with_each_part_once(data: Mapping[str, Any]) -> str:
    """Return a template file's JSON in which templates name parts, and sections rows, by number."""
    pool, lines_of = _Pool(), _Pool()
    index = {
        key: {
            kinds: {name: pool.add(part) for name, part in parts.items()}
            for kinds, parts in by_kinds.items()
        }
        for key, by_kinds in data["templates"].items()
    }
    sections = [
        section if isinstance(section, dict) else [lines_of.add(row) for row in section]
        for section in data["sections"]
    ]
    tables = {"rows": lines_of, "parts": pool}
    whole = {name: list(map(json.loads, table.items)) for name, table in tables.items()}
    whole |= {"sections": sections}
    values = {name: value for name, value in data.items() if isinstance(value, str)}
    lines = [json.dumps(values)[1:-1], f'"monomials": {_compact(data["monomials"])}']
    for name in ("rows", "sections", "parts"):
        rows = ",\n".join(map(_compact, whole[name]))
        lines.append(f'"{name}": [\n{rows}\n]')
    rows = ",\n".join(f"{_compact(key)}: {_compact(value)}" for key, value in index.items())
    return "{" + ",\n".join((*lines, f'"templates": {{\n{rows}\n}}')) + "}\n"


def templates_text(head: Mapping[str, Any], templates: Mapping[str, dict[str, Any]]) -> str:
    """Return the JSON of templates by key behind what `head` says of them."""
    pool, names = _Pool(), _Pool()
    index = {
        key: {kinds: _indexed(template, pool, names) for kinds, template in by_kinds.items()}
        for key, by_kinds in templates.items()
    }
    lines = ",\n".join(f"{json.dumps(key)}: {_compact(value)}" for key, value in index.items())
    sections = ",\n".join(pool.items)
    return (
        f'{json.dumps(head)[:-1]}, "monomials": [{", ".join(names.items)}],\n'
        f'"sections": [\n{sections}\n], "templates": {{\n{lines}\n}}}}\n'
    )


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


def _named(section: Any, monomials: list[str]) -> Any:
    """Undo `_numbered`; what is no list of rows stays."""
    if isinstance(section, dict):
        return section
    at = {3: 1, 6: 4}
    return [
        [*row[:i], monomials[row[i]], *row[i + 1 :]] if (i := at.get(len(row))) else row
        for row in section
    ]


def _compact(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))


def check_family(family: str, keys: Sequence[str] = (), folder: Path = FOLDER) -> Iterator[str]:
    """Trace a family's variants, or those of `keys`, and yield every difference from its file.

    Losses other than Hugging Face's are not traced: a test traces them by themselves.
    """
    templates = read_templates(folder / f"{family}.json")
    for variant in (*variants(family), *adapter_variants(family)):
        if keys and variant.key not in keys:
            continue
        if variant.key in templates:
            yield from variant_differences(variant, templates[variant.key])
        else:
            yield f"{family} {variant.key}: is not stored"


def main(arguments: list[str]) -> None:
    """Write the named families, or all; "llama=sdpa/bf16/none" writes one variant of llama.

    With "--check" nothing is written: differences are printed, and the exit status is 1 if there
    is one. With "--older", under transformers 5.17, the variants that are named are written for
    recorded rows.
    """
    is_check = "--check" in arguments
    write = write_older if "--older" in arguments else write_family
    keys: dict[str, list[str]] = {}
    for argument in [a for a in arguments if a not in ("--check", "--older")] or FAMILIES:
        family, _, key = argument.partition("=")
        keys.setdefault(family, []).extend([key] if key else [])
    num_differences = 0
    for family, chosen in keys.items():
        if not is_check:
            path = write(family, chosen)
            print(f"{family}: {path.stat().st_size} bytes", flush=True)
            continue
        before = num_differences
        for difference in check_family(family, chosen):
            print(difference, flush=True)
            num_differences += 1
        print(f"{family}: {num_differences - before} differences", flush=True)
    if num_differences:
        sys.exit(1)


if __name__ == "__main__":
    main(sys.argv[1:])
