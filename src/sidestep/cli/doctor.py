"""`sidestep doctor`: what would fail silently, with the fix: a table, plain lines or JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from sidestep.config.loading import load_config
from sidestep.config.recipes import QUICKSTART, find_recipe
from sidestep.doctor import Finding, diagnose

FOUND = 1
STYLES = {"error": "bold red", "warning": "yellow"}


def run_doctor(recipe: str | None, overrides: Sequence[str], as_json: bool) -> None:
    """Examine a recipe and print what is found; typer.Exit with 1 if anything is.

    Raises UsageError if the recipe cannot be read.
    """
    file = find_recipe(recipe or QUICKSTART)
    findings = diagnose(load_config(file, overrides, any_combination=True))
    if as_json:
        print(json.dumps([finding.as_dict() for finding in findings], indent=1))
    else:
        print_findings(findings, str(file))
    if findings:
        raise typer.Exit(FOUND)


def print_findings(
    findings: Sequence[Finding], subject: str, console: Console | None = None
) -> None:
    """A table on a terminal, else two lines each."""
    console = console or Console()
    if not findings:
        console.print(Text(f"{subject}: nothing found"), soft_wrap=True)
        return
    if console.is_terminal and not console.is_dumb_terminal:
        console.print(_table(findings, subject))
        return
    for one in findings:
        console.print(Text(f"{one.severity}: {one.code}: {one.message}"), soft_wrap=True)
        console.print(Text(f"  fix: {one.fix}"), soft_wrap=True)
    console.print(Text(f"{subject}: {_count(findings)}"), soft_wrap=True)


def _table(findings: Sequence[Finding], subject: str) -> Table:
    table = Table(
        title=Text(f"{subject}: {_count(findings)}"), title_justify="left", show_lines=True
    )
    for heading in ("", "found", "what happens", "fix"):
        table.add_column(heading, overflow="fold")
    for one in findings:
        severity = Text(one.severity, style=STYLES[one.severity])
        table.add_row(severity, Text(one.code), Text(one.message), Text(one.fix))
    return table


def _count(findings: Sequence[Finding]) -> str:
    errors = sum(one.severity == "error" for one in findings)
    warnings = len(findings) - errors
    parts = [(errors, "error"), (warnings, "warning")]
    return ", ".join(f"{n} {word}{'s' if n > 1 else ''}" for n, word in parts if n)
