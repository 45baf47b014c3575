"""Options that several commands share, and the client that they lead to."""

from __future__ import annotations

import difflib
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from gateway.api.errors import invalid, unavailable
from gateway.cli.api_key import api_key

if TYPE_CHECKING:
    from gateway.site.client import SiteClient

DEFAULT_SERVER = "127.0.0.1:50051"
KINDS = ("Model", "Route", "Pool", "Tenant")


class Output(StrEnum):
    table = "table"
    json = "json"
    yaml = "yaml"


OutputOption = Annotated[Output, typer.Option("--output", "-o", help="How to print.")]
ServerOption = Annotated[
    str | None,
    typer.Option(
        "--server",
        envvar="MODELYARD_SERVER",
        metavar="HOST:PORT",
        help=f"Gateway to ask. Default: this machine's site, else {DEFAULT_SERVER}.",
    ),
]
ForceOption = Annotated[bool, typer.Option("--force", help="Skip the safety checks of the operation.")]


def connect(server: str | None) -> SiteClient:
    """A client of `server`; of the site that runs in this home when none is named, with its secret.

    YardError when that site is down: whoever listens where it did, or at the default address, is another one.
    """
    from gateway.site import state
    from gateway.site.client import SiteClient
    from gateway.site.client_tls import of_environment
    from gateway.site.home import Home

    home = Home.from_environment()
    local = state.load(home)
    if local is not None and server in (None, local.grpc_address):
        return SiteClient(local.grpc_address, home.secrets().site, tls=local.tls, api_key=api_key())
    if server is None and (stopped := home.last_site()):
        raise unavailable(
            f"site {stopped} is down; start it with `yard up`, or name another site's gateway with --server HOST:PORT"
        )
    return SiteClient(server or DEFAULT_SERVER, tls=of_environment(), api_key=api_key())


def kind_of(word: str) -> str:
    """`model`, `models` and `Model` are all the kind Model."""
    names = {form: kind for kind in KINDS for form in (kind.lower(), f"{kind.lower()}s")}
    kind = names.get(word.lower())
    if kind is None:
        nearest = difflib.get_close_matches(word.lower(), names, n=1)
        hint = f"did you mean {nearest[0]}?" if nearest else f"known are {', '.join(kind.lower() for kind in KINDS)}"
        raise invalid(f"unknown kind {word!r}; {hint}")
    return kind
