"""The site directory: the Site document with what the command line overrides, and the desired objects beside it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from pydantic import ValidationError

from gateway.api.config import DESIRED_KINDS, ListenSpec, ModelSpec, PoolSpec, SiteSpec
from gateway.api.errors import invalid
from gateway.api.manifest import Located, read
from gateway.api.runtime import TlsFiles

DEFAULT_SITE = Path(__file__).resolve().parents[2] / "configs" / "local"


@dataclass(frozen=True, slots=True)
class SiteFiles:
    directory: Path
    name: str
    spec: SiteSpec
    documents: tuple[Located, ...]  # desired objects, in the order they are applied
    given: frozenset[str] = frozenset()  # fields of spec.listen that the command line gave, not site.yaml
    written_listen: ListenSpec = field(default_factory=ListenSpec)  # as site.yaml has it

    @property
    def is_loopback(self) -> bool:
        return self.spec.listen.host in ("127.0.0.1", "localhost", "::1")

    @property
    def tls_files(self) -> TlsFiles | None:
        tls = self.spec.listen.tls
        if tls is None:
            return None
        return TlsFiles(*(str(self.directory / path) if path else "" for path in (tls.cert, tls.key, tls.client_ca)))

    @property
    def has_internal_tls(self) -> bool:
        return not self.is_loopback if self.spec.internal_tls is None else self.spec.internal_tls

    @property
    def default_route(self) -> str | None:
        """The first route of the directory: where `yard up` sends its canary prompt."""
        return next((document.manifest.name for document in self.documents if document.manifest.kind == "Route"), None)

    def without(self, objects: Collection[str]) -> SiteFiles:
        """`objects`: each as `Kind name`."""
        left = tuple(document for document in self.documents if " ".join(document.key) not in objects)
        return replace(self, documents=left)

    def replicas(self) -> dict[str, int]:
        """Model -> worker groups that must be ready. Servers that run elsewhere are not this site's to wait for."""
        return {
            document.manifest.name: document.manifest.spec.replicas
            for document in self.documents
            if isinstance(document.manifest.spec, ModelSpec) and document.manifest.spec.is_managed
        }

    def pools(self) -> dict[str, PoolSpec]:
        return {d.manifest.name: d.manifest.spec for d in self.documents if isinstance(d.manifest.spec, PoolSpec)}


def _explained(error: ValidationError) -> str:
    """`--grpc-port: 99999 is above 65535`: only what the command line gave can be wrong here."""
    first = error.errors(include_url=False)[0]
    option, context = f"--{str(first['loc'][-1]).replace('_', '-')}", first.get("ctx", {})
    match first["type"]:
        case "less_than_equal":
            return f"{option}: {first['input']} is above {context['le']}"
        case "greater_than_equal":
            return f"{option}: {first['input']} is below {context['ge']}"
    return f"{option}: {first['input']!r}: {first['msg']}"


def read_site(directory: Path, listen: Mapping[str, object], redis: str | None, gateways: int | None = None) -> SiteFiles:
    """`listen`, `redis` and `gateways` override site.yaml where they are given. YardError says what is wrong and where."""
    if not directory.is_dir():
        raise invalid(f"{directory}: no such site directory; name one with --site")
    documents = read([directory])
    sites = [document for document in documents if document.manifest.kind == "Site"]
    if len(sites) != 1:
        raise invalid(f"{directory}: a site directory holds exactly one document of kind Site, this one {len(sites)}")
    spec: SiteSpec = sites[0].manifest.spec
    given = {name: value for name, value in listen.items() if value is not None}
    whole = {**spec.model_dump(), "redis": redis or spec.redis, "gateways": spec.gateways if gateways is None else gateways}
    written_listen = spec.listen
    try:
        spec = SiteSpec.model_validate({**whole, "listen": {**spec.listen.model_dump(), **given}})
    except ValidationError as error:
        raise invalid(_explained(error)) from error
    order = {kind: index for index, kind in enumerate(DESIRED_KINDS)}
    desired = sorted((d for d in documents if d.manifest.kind in order), key=lambda d: order[d.manifest.kind])
    return SiteFiles(directory.resolve(), sites[0].manifest.name, spec, tuple(desired), frozenset(given), written_listen)
