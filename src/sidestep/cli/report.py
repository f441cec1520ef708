"""`sidestep report`: a run folder to one HTML file."""

from __future__ import annotations

from pathlib import Path

from sidestep.diagnostics.report import write_report


def print_report(run_dir: Path) -> None:
    """Write the report of a run and print its path; raises UsageError if there is no run."""
    print(write_report(run_dir))
