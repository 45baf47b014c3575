"""Why a model cannot answer now, and what happens next: for the error of a request. Pure."""

from __future__ import annotations

from collections.abc import Collection

from gateway.api.records import GroupRecord, PoolRecord
from gateway.state.view import SiteView


def why_absent(view: SiteView, model: str, lately: Collection[str]) -> str:
    """`lately`: pools that held it when they were last heard."""
    groups = view.groups(model)
    if groups:
        stories = ", ".join(_group(view.pools.get(pool), pool, group) for pool, group in groups)
        return f"model `{model}` cannot answer now: {stories}"
    return f"model `{model}` is in no pool now: {_nowhere(view, model, lately)}"


def _group(record: PoolRecord | None, pool: str, group: GroupRecord) -> str:
    if record is not None and record.ranks and not any(rank.alive for rank in record.ranks):
        return f"the ranks of pool `{pool}` are {record.ranks[0].word}{_because(record)}; it is loaded again when they run"
    loading = f" ({group.progress:.0%})" if group.state == "loading" else ""
    return f"{group.state} in pool `{pool}`{loading}" + (f": {group.reason}" if group.reason else "")


def _nowhere(view: SiteView, model: str, lately: Collection[str]) -> str:
    gone = [pool for pool in sorted(lately) if pool in view.desired_pools]
    silent = [pool for pool in gone if pool not in view.pools]
    if silent:
        return f"{_pools(silent)}, where it was, is restarting; the next driver takes over what the ranks hold"
    if gone:
        [first, *_] = gone
        return f"{_pools(gone)}, where it was, has restarted and comes to it{_because(view.pools[first])}"
    if reasons := (view.controller.unplaced if view.controller else {}).get(model):
        return f"{reasons[0]}; `yard describe model {model}` says more"
    if starting := sorted(view.desired_pools.keys() - view.pools.keys()):
        return f"{_pools(starting)} {'is' if len(starting) == 1 else 'are'} starting, and models are placed when that is done"
    return f"it is being placed; `yard describe model {model}` says where, or why not"


def _pools(names: Collection[str]) -> str:
    return f"pool{'s' if len(names) > 1 else ''} {', '.join(f'`{name}`' for name in names)}"


def _because(record: PoolRecord) -> str:
    return f" ({record.message})" if record.message else ""
