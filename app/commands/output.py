"""What every command prints through: JSON on stdout, or tables; errors as one sentence."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text

JsonFlag = Annotated[bool, typer.Option("--json", help="Print JSON on stdout instead of tables.")]
_MAX_SHOWN = 60
_SHOULD_BE = "Input should be "
_OPTION_OF_FIELD = {
    "workload.sequence_length": "--seq",
    "workload.context_length": "--context",
    "parallelism.zero_stage": "--zero",
    "parallelism.world_size": "--gpus",
}
VERDICT_STYLES = {"fits": "green", "tight": "yellow", "does_not_fit": "red"}


class InputError(Exception):
    """A wrong input of a command, with the fields of the JSON error; `str()` is one sentence."""

    def __init__(self, field: str, value: object, allowed: str, sentence: str) -> None:
        super().__init__(sentence)
        self.field = field
        self.value = value
        self.allowed = allowed


def print_json(document: Any) -> None:
    """Print one JSON document on stdout."""
    json.dump(document, sys.stdout, indent=2, allow_nan=False)
    sys.stdout.write("\n")


def styled(text: str, style: str) -> Text:
    """Return text in a colour, for a line or a cell of a table."""
    from rich.text import Text

    return Text(text, style=style)


def print_line(line: str | Text) -> None:
    """Print a line on stdout, as it is: brackets in it are no markup."""
    from rich.console import Console

    Console(highlight=False).print(_verbatim(line))


def _verbatim(text: str | Text) -> Text:
    from rich.text import Text

    return Text(text) if isinstance(text, str) else text


def print_table(table: Table) -> None:
    """Print a table on stdout, as wide as it needs to be when stdout is no terminal."""
    from rich.console import Console

    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=160)
    console.print(table)


def make_table(
    title: str | None,
    words: Sequence[str],
    numbers: Sequence[str],
    rows: Iterable[Sequence[str | Text]],
) -> Table:
    """Build a table: the columns of `words` first, then those of `numbers`, set to the right."""
    from rich import box
    from rich.markup import escape
    from rich.table import Table

    table = Table(
        title=None if title is None else escape(title), title_justify="left", box=box.SIMPLE_HEAD
    )
    for name in words:
        table.add_column(name)
    for name in numbers:
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(*map(_verbatim, row))
    return table


def describe(error: Exception) -> dict[str, Any] | None:
    """Return field, value, allowed and message of a foreseen error; None for a bug."""
    # By name: a command that needs neither planner nor database does not pay for their import.
    if type(error).__name__ in {"InputError", "PlanError", "RecordError", "DatabaseProblem"}:
        parts = {name: getattr(error, name, None) for name in ("field", "value", "allowed")}
        if type(error).__name__ == "DatabaseProblem":
            parts["field"] = "database"
        return {**parts, "message": _with_options(str(error))}
    # Typer brings its own copy of click's exceptions in some versions, click itself in others.
    format_message = getattr(error, "format_message", None)
    if format_message is None:
        return None
    parameter = getattr(error, "param", None)
    field = getattr(parameter, "name", None) or getattr(error, "option_name", None)
    unread = _unread_value(error)
    if field is None or unread is None:
        return {"field": field, "value": None, "allowed": None, "message": format_message()}
    value, allowed = unread
    message = f"--{field.replace('_', '-')} is {value!r}: it must be {allowed}."
    return {"field": field, "value": value, "allowed": allowed, "message": message}


def _with_options(sentence: str) -> str:
    """Name beside each field of a plan the option that sets it, where it has another name."""
    for field, option in _OPTION_OF_FIELD.items():
        sentence = sentence.replace(field, f"{field} ({option})", 1)
    return sentence


def _unread_value(error: Exception) -> tuple[str, str] | None:
    """Return a value that typer refused and what it should be, from what pydantic told it."""
    find = getattr(error.__cause__, "errors", None)
    found = find()[0] if find is not None else {}
    if not found.get("msg", "").startswith(_SHOULD_BE):
        return None
    kinds = {"int_parsing": "a whole number", "float_parsing": "a number"}
    allowed = kinds.get(found["type"], found["msg"].removeprefix(_SHOULD_BE))
    return str(found["input"])[:_MAX_SHOWN], allowed


def fail_with(error: Exception, *, as_json: bool) -> int:
    """Report an error and return the exit code 2; an error that nobody foresaw is raised again."""
    described = describe(error)
    if described is None:
        raise error
    if type(error).__name__ == "NoArgsIsHelpError":
        sys.stdout.write(described["message"] + "\n")
        return 2
    sys.stderr.write(f"peakmark: {described['message']}\n")
    if as_json:
        sys.stdout.write(json.dumps({"error": described}, default=repr) + "\n")
    return 2
