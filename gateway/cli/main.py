"""Where `yard` begins. Imports the commands; where a package that they need is not as it must be, says which and what to do."""

from __future__ import annotations

import os
import sys
from typing import NoReturn

DEBUG_VARIABLE = "MODELYARD_DEBUG"


def main() -> NoReturn:
    try:
        from gateway.cli.app import run
    except Exception as error:
        if os.environ.get(DEBUG_VARIABLE):
            raise
        from gateway.site.requirements import explanation

        cause = f"cannot start: {type(error).__name__}: {' '.join(str(error).split())}"
        print(
            f"yard: {explanation() or f'{cause}; remove .venv and run `./yard` again ({DEBUG_VARIABLE}=1 shows where)'}",
            file=sys.stderr,
        )
        sys.exit(1)
    run()
