"""The command: `main` runs it, and what a user can mend is one line."""

import sys

from vicinal.cli import data
from vicinal.cli.adapt import adapt_command
from vicinal.cli.bench import bench_command
from vicinal.cli.compare import compare_command
from vicinal.cli.console import out
from vicinal.cli.report import report_command
from vicinal.cli.reproduce import reproduce_command
from vicinal.cli.results import results_command
from vicinal.cli.run import app
from vicinal.errors import VicinalError

__all__ = ["app", "main", "out"]

app.command("adapt")(adapt_command)
app.command("bench")(bench_command)
app.command("compare")(compare_command)
app.command("report")(report_command)
app.command("reproduce")(reproduce_command)
app.command("results")(results_command)
app.add_typer(data.app, name="data")


def main() -> None:
    """Run the command; what a user can mend is one line and exit code 2."""
    try:
        app()
    except (VicinalError, OSError) as error:
        print(f"vicinal: {' '.join(str(error).split())}", file=sys.stderr)
        raise SystemExit(2) from None
    except (KeyboardInterrupt, SystemExit) as ended:
        interrupt = _interrupt_behind(ended)
        if interrupt is None:
            raise
        print(f"vicinal: {interrupt}", file=sys.stderr)
        raise SystemExit(130) from None


def _interrupt_behind(ended: BaseException) -> str | None:
    """Return what an interrupt says of itself; None for another end. Typer turns interrupts into exits."""
    found: BaseException | None = ended
    while found is not None and not isinstance(found, KeyboardInterrupt):
        found = found.__cause__ or found.__context__
    return None if found is None else str(found) or "interrupted"
