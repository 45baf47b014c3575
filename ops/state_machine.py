"""The life of a worker group, drawn from its table into ARCHITECTURE.md by `python ops/state_machine.py --write`.

Without `--write` it says whether it is; a test runs that.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from workers.driver.residency import TRANSITIONS, Transition  # noqa: E402

DOCUMENT = ROOT / "ARCHITECTURE.md"
BEGIN = "<!-- states: made by ops/state_machine.py -->\n"
END = "<!-- end of states -->\n"


def drawing() -> str:
    """A state diagram (GitHub and editors draw it), one line a transition: event, [guards], / effect."""
    lines = ["```mermaid", "stateDiagram-v2", "  [*] --> waiting"]
    lines += [f"  {transition.source} --> {transition.target}: {_label(transition)}" for transition in TRANSITIONS]
    return "\n".join([*lines, "  draining --> [*]", "```\n"])


def _label(transition: Transition) -> str:
    guards = f" [{', '.join(guard.__name__ for guard in transition.guards)}]" if transition.guards else ""
    return f"{transition.event}{guards}" + (f" / {transition.effect}" if transition.effect else "")


def replaced(document: str) -> str:
    before, rest = document.split(BEGIN)
    return f"{before}{BEGIN}{drawing()}{END}{rest.split(END)[1]}"


def main() -> int:
    document = DOCUMENT.read_text()
    if "--write" in sys.argv:
        DOCUMENT.write_text(replaced(document))
        return 0
    if replaced(document) != document:
        print("ARCHITECTURE.md draws other states than there are; run `python ops/state_machine.py --write`", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
