"""A site whose callers need keys is not opened to everybody by a change that looks harmless. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from gateway.api.errors import ErrorCode, YardError
from gateway.state.edits import Write
from gateway.state.snapshot import ObjectKey, Snapshot


def has_keys(kind: str, document: dict | None) -> bool:
    """Whether a stored document is a tenant's with keys, also one that this version cannot read."""
    spec = document.get("spec") if document and kind == "Tenant" else None
    return isinstance(spec, dict) and bool(spec.get("key_hashes"))


def needs_key(snapshot: Snapshot) -> bool:
    """Once any tenant has keys every request needs one."""
    return any(has_keys(key.kind, stored.manifest) for key, stored in snapshot.objects.items())


def first_keys(snapshot: Snapshot, writes: Iterable[Write]) -> frozenset[ObjectKey]:
    """The tenants by which a site that needed no key comes to need one."""
    given = frozenset(write.key for write in writes if has_keys(write.key.kind, write.document))
    return frozenset() if needs_key(snapshot) else given


def kept_closed(edit: Callable[[Snapshot], Sequence[Write]]) -> Callable[[Snapshot], Sequence[Write]]:
    """The same edit, refused with YardError(CONFLICT) when the site's last keys would go with it."""

    def checked(snapshot: Snapshot) -> Sequence[Write]:
        writes = edit(snapshot)
        after = {key: stored.manifest for key, stored in snapshot.objects.items()}
        after |= {write.key: write.document for write in writes}
        if needs_key(snapshot) and not any(has_keys(key.kind, document) for key, document in after.items()):
            last = next(write.key for write in writes if write.before and has_keys(write.key.kind, write.before.manifest))
            raise YardError(
                ErrorCode.CONFLICT,
                f"{last} has the last API keys of the site: without them every request passes without a key, whoever sends it; "
                "give another tenant keys first, or use --force to open the site",
                field=f"{last}: spec.key_hashes",
            )
        return writes

    return checked
