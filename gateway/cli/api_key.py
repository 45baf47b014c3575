"""--api-key: an option of every command that asks a gateway."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from contextvars import ContextVar
from typing import Annotated, Any

import typer

API_KEY_VARIABLE = "MODELYARD_API_KEY"

_Option = Annotated[
    str | None,
    typer.Option(
        "--api-key",
        envvar=API_KEY_VARIABLE,
        metavar="KEY",
        help="API key of a tenant, where the site asks for one. The variable keeps it out of the process list.",
    ),
]
_ASKS = {"server", "target"}  # parameters of commands that ask a gateway
_given: ContextVar[str | None] = ContextVar("api_key", default=None)


def api_key() -> str | None:
    """Of the command that runs."""
    return _given.get()


def use(app: typer.Typer) -> None:
    """Gives the option to all commands registered by now that ask a gateway."""
    for command in app.registered_commands:
        if command.callback is not None and _asks(command.callback):
            command.callback = _taking_a_key(command.callback)
    for group in app.registered_groups:
        if group.typer_instance is not None:
            use(group.typer_instance)


def _asks(callback: Callable[..., Any]) -> bool:
    return any(given.name in _ASKS and given.default is None for given in inspect.signature(callback).parameters.values())


def _taking_a_key(callback: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(callback)
    def run(*arguments: Any, api_key: str | None = None, **options: Any) -> Any:
        token = _given.set(api_key or None)
        try:
            return callback(*arguments, **options)
        finally:
            _given.reset(token)

    signature = inspect.signature(callback, eval_str=True)
    option = inspect.Parameter("api_key", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=_Option)
    run.__signature__ = signature.replace(parameters=[*signature.parameters.values(), option])  # type: ignore[attr-defined]
    run.__annotations__ = {**callback.__annotations__, "api_key": _Option}
    return run
