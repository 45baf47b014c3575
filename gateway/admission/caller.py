"""Who asks: a tenant by its API key, or by name on sites where no tenant has keys. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field

from gateway.api.config import TenantSpec
from gateway.api.errors import ErrorCode, YardError, invalid, shortened
from gateway.routing.ask import Quality
from gateway.state.view import SiteView

TENANT_HEADER = "modelyard-tenant"
QUALITY_HEADER = "modelyard-quality"
PRIORITY_HEADER = "modelyard-priority"
AUTHORIZATION = "authorization"
_BEARER = "bearer "
_LOWEST_PRIORITY = -100


@dataclass(frozen=True, slots=True)
class Caller:
    """`tenant` is empty when nobody in particular asks. `headers` are those of the request, in lower case."""

    tenant: str = ""
    spec: TenantSpec = field(default_factory=TenantSpec)
    priority: int = 0
    quality: Quality | None = None
    headers: Mapping[str, str] = field(default_factory=dict)

    def may_ask(self, name: str, route: str) -> bool:
        """By the name that it uses or the route's own."""
        return not self.spec.routes or name in self.spec.routes or route in self.spec.routes

    def check_name(self, view: SiteView, name: str) -> None:
        """YardError(DENIED) when the tenant may not ask it. Says the same of names that do not exist."""
        route = view.resolve(name)
        self.check_route(name, route.name if route else name)

    def check_route(self, name: str, route: str) -> None:
        """YardError(DENIED) when the tenant may not ask it, by the name that it used or the route's own."""
        if not self.may_ask(name, route):
            allowed = ", ".join(self.spec.routes)
            raise YardError(
                ErrorCode.DENIED,
                f"tenant `{self.tenant}` may not ask `{shortened(name)}`; it may ask {allowed}; see spec.routes of the Tenant",
                field="model",
            )


def identify(view: SiteView, headers: Mapping[str, str]) -> Caller:
    """1. Once any tenant has keys: the tenant of the key in `authorization: Bearer KEY`, else UNAUTHENTICATED. A tenant named
          beside the key must be the key's (else DENIED).
    2. Otherwise the tenant that `modelyard-tenant` names; DENIED when there is none of that name. Without it: nobody.

    Keys are compared by their SHA-256, and never logged (rule 15).
    """
    named = headers.get(TENANT_HEADER, "")
    if view.needs_key or view.key_owners:
        tenant = key_owner(view, headers.get(AUTHORIZATION, ""))
        if named and named != tenant:
            raise YardError(ErrorCode.DENIED, f"the API key is not one of tenant `{shortened(named)}`", field=TENANT_HEADER)
    else:
        tenant = named
        if tenant and tenant not in view.tenants:
            unknown = f"there is no tenant `{shortened(tenant)}`; apply it, or leave it out"
            raise YardError(ErrorCode.DENIED, unknown, field=TENANT_HEADER)
    spec = view.tenants.get(tenant, TenantSpec())
    return Caller(tenant, spec, _priority(headers, spec), _quality(headers), headers)


def key_owner(view: SiteView, authorization: str) -> str:
    """The tenant of the key in `Bearer KEY`. YardError(UNAUTHENTICATED)."""
    key = authorization[len(_BEARER) :].strip() if authorization[: len(_BEARER)].lower() == _BEARER else ""
    owner = view.key_owners.get(hashlib.sha256(key.encode()).hexdigest()) if key else None
    if owner is None:
        cause = "the API key is not known" if key else "this site asks for an API key"
        raise YardError(
            ErrorCode.UNAUTHENTICATED, f"{cause}; send `authorization: Bearer KEY` with a key of a tenant", field=AUTHORIZATION
        )
    return owner


def _quality(headers: Mapping[str, str]) -> Quality | None:
    match headers.get(QUALITY_HEADER):
        case None | "":
            return None
        case "fast":
            return "fast"
        case "precise":
            return "precise"
        case other:
            raise invalid(f"{QUALITY_HEADER} is {shortened(other)!r}; it must be fast or precise", QUALITY_HEADER)


def _priority(headers: Mapping[str, str], spec: TenantSpec) -> int:
    """What the tenant has, or the less that the request asks for."""
    text = headers.get(PRIORITY_HEADER)
    if not text:
        return spec.priority
    try:
        asked = int(text)
    except ValueError:
        raise invalid(f"{PRIORITY_HEADER} is {shortened(text)!r}; it must be a whole number", PRIORITY_HEADER) from None
    return max(_LOWEST_PRIORITY, min(asked, spec.priority))
