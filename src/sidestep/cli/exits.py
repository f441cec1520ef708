"""Exit codes, and the one line that says why.

0 done | 1 the run failed | 2 wrong use or input | 130 interrupted. Whatever is not raised on
purpose is a bug in Sidestep: Python shows its traceback and exits with 1.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

import typer

from sidestep.errors import Interrupted, SidestepError, UsageError

FAILED = 1
WRONG_USE = 2
INTERRUPTED = 130
TRACEBACK_VARIABLE = "SIDESTEP_TRACEBACK"


@contextmanager
def exit_codes() -> Iterator[None]:
    """Turn errors raised on purpose into a last line on stderr and typer.Exit with the code.

    SIDESTEP_TRACEBACK=1 prints the traceback before that line.
    """
    try:
        yield
    except UsageError as error:
        _say(error)
        raise typer.Exit(WRONG_USE) from error
    except Interrupted as error:
        _say(error)
        raise typer.Exit(INTERRUPTED) from error
    except SidestepError as error:
        _say(error)
        raise typer.Exit(FAILED) from error
    except KeyboardInterrupt as error:
        # Outside the run, which turns Ctrl-C into Interrupted: nothing is half done.
        print("interrupted", file=sys.stderr)
        raise typer.Exit(INTERRUPTED) from error


def _say(error: SidestepError) -> None:
    if os.environ.get(TRACEBACK_VARIABLE) == "1":
        traceback.print_exception(error)
    # A reward function's own error text may have several lines; the last must say it all.
    print(" ".join(str(error).splitlines()), file=sys.stderr)
