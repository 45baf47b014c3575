"""The life of a worker group as data: states, events, guards, effects. Pure; `lifecycle` and `switching` act on it.

 cold ──want──▶ waiting ──load──▶ loading ──loaded──▶ checking ──answered──▶ ready ──park──▶ parking ──parked──▶ parked
  ▲                ▲                  │                   │                    ▲ ▲               │                │  │
  │              retry               fail               fail                   │ └──park_failed──┘              wake │
  │                └──── failed ◀─────┴───────────────────┘                    └──────woken────── waking ◀────────┘  │
  └──────────────────────────────────────────────drop───────────────────────────────────────────────────────────────┘

`ready` is resident; `parked` has its weights standing by outside the pool's memory; `cold` has them on disk only. What is not
wanted any more drains and is gone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

State = Literal["cold", "waiting", "loading", "checking", "ready", "parking", "parked", "waking", "draining", "failed"]
Event = Literal[
    "want",
    "stand_back",
    "load",
    "loaded",
    "answered",
    "park",
    "parked",
    "park_failed",
    "wake",
    "woken",
    "drop",
    "drain",
    "fail",
    "retry",
]
Effect = Literal["", "load", "check", "serve", "hold_new", "give_back", "wake", "unload", "unload_when_quiet"]

STANDING_BY: tuple[State, ...] = ("parking", "parked", "waking", "cold")
"""Not resident, or about to be so no more; a request brings it back."""

COMING: tuple[State, ...] = ("waiting", "loading", "checking", *STANDING_BY)
"""Requests for these are held."""


@dataclass(frozen=True)
class Situation:
    """What guards look at, besides the state."""

    pinned: bool = False  # residency: resident
    parkable: bool = True  # by its engine, on all its ranks
    operating: bool = False  # a lifecycle operation of this model is under way
    asked: bool = True  # somebody waits for it, or an operator asked for it
    bringing: bool = False  # another group of the model is on its way already


Guard = Callable[[Situation], str]
"""Empty, or why not."""


def not_pinned(situation: Situation) -> str:
    return "its spec says residency: resident" if situation.pinned else ""


def able(situation: Situation) -> str:
    return "" if situation.parkable else "its engine cannot park on this device"


def serial(situation: Situation) -> str:
    """Rule 5: lifecycle operations of one model are serial."""
    return "another operation of this model is under way" if situation.operating else ""


def asked_for(situation: Situation) -> str:
    return "" if situation.asked else "nobody asks for it"


def not_asked_for(situation: Situation) -> str:
    return "somebody asks for it" if situation.asked else ""


def once(situation: Situation) -> str:
    """Rule 6: it is brought in once, however many ask."""
    return "it is on its way already" if situation.bringing else ""


@dataclass(frozen=True)
class Transition:
    source: State
    event: Event
    target: State
    guards: tuple[Guard, ...] = ()
    effect: Effect = ""


# One that computes fails when its weights give no numbers, or when its engine's own processes go.
_COMPUTING: tuple[State, ...] = ("checking", "ready", "parking", "draining")
_CAN_FAIL: tuple[State, ...] = ("waiting", "loading", "waking", "parked", "cold", *_COMPUTING)

TRANSITIONS: tuple[Transition, ...] = (
    Transition("cold", "want", "waiting", (asked_for, once)),
    # What is in memory is worth more, and nobody asks for it yet.
    Transition("waiting", "stand_back", "cold", (not_asked_for,)),
    Transition("waiting", "load", "loading", (serial,), "load"),
    Transition("loading", "loaded", "checking", (), "check"),
    Transition("checking", "answered", "ready", (), "serve"),
    # From here on new requests are held; what is in flight ends first (rule 5).
    Transition("ready", "park", "parking", (not_pinned, able), "hold_new"),
    Transition("parking", "parked", "parked", (), "give_back"),
    Transition("parking", "park_failed", "ready", (), "serve"),
    Transition("parked", "wake", "waking", (serial, asked_for, once), "wake"),
    # Some ranks parked and some could not: all come back.
    Transition("parking", "wake", "waking", (), "wake"),
    Transition("waking", "woken", "ready", (), "serve"),
    Transition("parked", "drop", "cold", (not_pinned, serial), "unload"),
    Transition("parking", "drop", "cold", (not_pinned,), "unload"),
    *(Transition(state, "drain", "draining", (), "unload_when_quiet") for state in ("checking", "ready", "parking", "parked")),
    *(Transition(state, "fail", "failed", (), "unload") for state in _CAN_FAIL),
    Transition("failed", "retry", "waiting"),
)

_BY_EVENT = {(transition.source, transition.event): transition for transition in TRANSITIONS}
_ALLOWED = {(transition.source, transition.target) for transition in TRANSITIONS}


def decide(state: State, event: Event, situation: Situation) -> Transition | str:
    """The transition, or why there is none now."""
    transition = _BY_EVENT.get((state, event))
    if transition is None:
        return f"a group that is {state} cannot {event}"
    return next((why for guard in transition.guards if (why := guard(situation))), "") or transition


def allowed(source: State, target: State) -> bool:
    return source == target or (source, target) in _ALLOWED
