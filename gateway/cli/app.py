"""Assembles the commands, and turns every error into one line and an exit code."""

from __future__ import annotations

import os
import sys
from typing import NoReturn

import typer

from gateway.api.errors import YardError
from gateway.cli import (
    api_key,
    ask,
    backups,
    dashboards,
    doctor,
    engine,
    house,
    load,
    objects,
    residency,
    routes,
    simulate,
    top,
    watch,
)
from gateway.cli.exit_codes import EXIT_CODES, INTERRUPTED
from gateway.cli.main import DEBUG_VARIABLE

app = typer.Typer(
    name="yard",
    help="Runs and operates a Modelyard site: many language models on few GPUs behind one gRPC and OpenAI address.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120},
    epilog="Exit codes: 0 done, 1 failed, 2 bad input, 3 not found, 4 unavailable, 5 conflict, 6 full, 7 no access, 8 too late. "
    "`yard test` runs the checks and tests of the checkout.",
)
for commands in (house, objects, routes, residency, engine, simulate, backups, ask, load, watch, dashboards, doctor, top):
    commands.register(app)
api_key.use(app)


def run() -> NoReturn:
    if doctor.COMPLETE_VARIABLE in os.environ:
        from typer.completion import completion_init  # pyright: ignore[reportPrivateImportUsage]

        completion_init()
    try:
        app(prog_name="yard")
    except YardError as error:
        _fail(error.message, EXIT_CODES[error.code])
    except KeyboardInterrupt:
        _fail("interrupted", INTERRUPTED)
    except BrokenPipeError:
        # The reader of our output left. Keep the interpreter from complaining when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
    except Exception as error:
        # The last resort of a command: a line instead of a traceback.
        if os.environ.get(DEBUG_VARIABLE):
            raise
        from gateway.site.requirements import explanation

        unexpected = f"unexpected {type(error).__name__}: {' '.join(str(error).split())}"
        packages = explanation()
        _fail(f"{packages} ({unexpected})" if packages else f"{unexpected} (set {DEBUG_VARIABLE}=1 to see where)", 1)
    sys.exit(0)


def _fail(message: str, code: int) -> NoReturn:
    sys.stdout.flush()
    print(f"yard: {message}", file=sys.stderr)
    sys.exit(code)
