"""The Grafana dashboards of a site, as JSON beside this file: `python ops/grafana/build.py --write` makes them anew."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
WIDTH, HEIGHT = 12, 8
DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}


@dataclass(frozen=True)
class Panel:
    """`queries`: legend -> PromQL. `red` is drawn as a line."""

    title: str
    queries: dict[str, str]
    unit: str = "short"
    red: float | None = None
    stacked: bool = False


_QUANTILE = "histogram_quantile({q}, sum by ({by}, le) (rate({name}_bucket[$__rate_interval])))"


def quantile(q: float, name: str, by: str) -> str:
    return _QUANTILE.format(q=q, name=name, by=by)


def computed(what: str) -> str:
    return f"sum by (model) (max by (pool, model) (rate(modelyard_pool_{what}_tokens_total[$__rate_interval])))"


REQUESTS = "rate(modelyard_requests_total[$__rate_interval])"
DASHBOARDS: dict[str, tuple[str, list[Panel]]] = {
    "capacity": (
        "Modelyard: capacity",
        [
            Panel(
                "Pool memory by kind",
                {"{{pool}} {{kind}}": "sum by (pool, kind) (max by (pool, rank, kind) (modelyard_pool_memory_bytes))"},
                "bytes",
                stacked=True,
            ),
            Panel(
                "Free, least of the pool's devices",
                {"{{pool}}": 'min by (pool) (max by (pool, rank) (modelyard_pool_memory_bytes{kind="free"}))'},
                "bytes",
            ),
            Panel(
                "Devices busy",
                {"{{pool}} / {{rank}}": "max by (pool, rank) (modelyard_device_utilization_ratio)"},
                "percentunit",
                0.6,
            ),
            Panel("Device memory in use", {"{{pool}} / {{rank}}": "max by (pool, rank) (modelyard_device_used_bytes)"}, "bytes"),
            Panel("KV fragmentation", {"{{pool}}": "max by (pool) (modelyard_kv_fragmentation_ratio)"}, "percentunit", 0.3),
            Panel(
                "Standing by in host memory",
                {"{{model}}": "sum by (model) (max by (pool, model) (modelyard_standby_bytes))"},
                "bytes",
            ),
            Panel("Models that fit nowhere", {"models": "max(modelyard_unplaced_models)"}, red=1),
            Panel("Pools up", {"{{pool}}": "max by (pool) (modelyard_pool_up)"}),
        ],
    ),
    "models": (
        "Modelyard: models",
        [
            Panel(
                "Groups by state",
                {"{{model}} {{state}}": "sum by (model, state) (max by (pool, model, state) (modelyard_model_groups)) > 0"},
            ),
            Panel("Running", {"{{model}}": "sum by (model) (max by (pool, model) (modelyard_pool_running))"}),
            Panel("Waiting", {"{{model}}": "sum by (model) (max by (pool, model) (modelyard_pool_waiting))"}),
            Panel(
                "Tokens generated",
                {"{{model}}": "sum by (model) (rate(modelyard_completion_tokens_total[$__rate_interval]))"},
                "ops",
            ),
            Panel(
                "Prompt tokens", {"{{model}}": "sum by (model) (rate(modelyard_prompt_tokens_total[$__rate_interval]))"}, "ops"
            ),
            Panel(
                "KV hit rate",
                {"{{model}}": f"{computed('cached')} / ({computed('prompt')} > 0)"},
                "percentunit",
            ),
            Panel(
                "KV memory by use",
                {"{{model}} {{use}}": "sum by (model, use) (max by (pool, model, use) (modelyard_kv_bytes))"},
                "bytes",
            ),
            Panel(
                "Sequences that failed",
                {"{{model}}": "sum by (model) (max by (pool, model) (rate(modelyard_pool_failed_total[$__rate_interval])))"},
                "ops",
            ),
        ],
    ),
    "gateways": (
        "Modelyard: gateways",
        [
            Panel(
                "Requests by outcome",
                {"{{code}}": f"sum by (code) ({REQUESTS})"},
                "reqps",
                stacked=True,
            ),
            Panel("Requests by route", {"{{route}}": f"sum by (route) ({REQUESTS})"}, "reqps"),
            Panel(
                "First token, P50 and P99",
                {f"{{{{route}}}} P{int(q * 100)}": quantile(q, "modelyard_first_token_seconds", "route") for q in (0.5, 0.99)},
                "s",
                1.5,
            ),
            Panel(
                "Between tokens, P50 and P99",
                {f"{{{{route}}}} P{int(q * 100)}": quantile(q, "modelyard_token_seconds", "route") for q in (0.5, 0.99)},
                "s",
            ),
            Panel("Whole request, P99", {"{{route}}": quantile(0.99, "modelyard_request_seconds", "route")}, "s"),
            Panel(
                "Waiting for their turn, and in flight",
                {"waiting": "sum(modelyard_requests_queued)", "in flight": "sum(modelyard_requests_in_flight)"},
            ),
            Panel("Held for their model", {"{{pool}}": "max by (pool) (modelyard_pool_held)"}),
            Panel("Redis degraded", {"gateway {{gateway}} of {{instance}}": "modelyard_degraded"}, red=1),
        ],
    ),
    "switches": (
        "Modelyard: switches",
        [
            Panel(
                "Switches by path, P50 and P99",
                {
                    f"{{{{path}}}} P{int(q * 100)}": f"histogram_quantile({q}, sum by (path, le) "
                    "(max by (pool, path, le) (rate(modelyard_switch_seconds_bucket[$__rate_interval]))))"
                    for q in (0.5, 0.99)
                },
                "s",
            ),
            Panel(
                "Switches a minute",
                {"{{path}}": "60 * sum by (path) (max by (pool, path) (rate(modelyard_switch_seconds_count[$__rate_interval])))"},
            ),
            Panel(
                "Bytes moved",
                {"{{path}}": "sum by (path) (max by (pool, path) (rate(modelyard_switch_bytes_total[$__rate_interval])))"},
                "Bps",
            ),
            Panel(
                "Share of the link",
                {"{{pool}} {{path}}": "max by (pool, path) (modelyard_switch_link_ratio)"},
                "percentunit",
                0.6,
            ),
            Panel("Routes flipped", {"{{route}}": "max by (route) (increase(modelyard_route_flips_total[$__rate_interval]))"}),
            Panel(
                "Ranks started anew",
                {"{{pool}}": "max by (pool) (increase(modelyard_rank_restarts_total[$__rate_interval]))"},
                red=1,
            ),
        ],
    ),
}


def dashboard(name: str) -> dict[str, Any]:
    title, panels = DASHBOARDS[name]
    return {
        "uid": f"modelyard-{name}",
        "title": title,
        "tags": ["modelyard"],
        "timezone": "browser",
        "schemaVersion": 39,
        "refresh": "5s",
        "time": {"from": "now-30m", "to": "now"},
        "templating": {"list": [{"name": "datasource", "type": "datasource", "query": "prometheus", "current": {}}]},
        "links": [{"type": "dashboards", "tags": ["modelyard"], "title": "Modelyard", "asDropdown": True}],
        "panels": [_panel(number, panel) for number, panel in enumerate(panels)],
    }


def _panel(number: int, panel: Panel) -> dict[str, Any]:
    steps: list[dict[str, Any]] = [{"color": "green", "value": None}]
    if panel.red is not None:
        steps.append({"color": "red", "value": panel.red})
    custom = {
        "fillOpacity": 30 if panel.stacked else 5,
        "stacking": {"mode": "normal" if panel.stacked else "none"},
        "thresholdsStyle": {"mode": "off" if panel.red is None else "line"},
    }
    return {
        "id": number + 1,
        "type": "timeseries",
        "title": panel.title,
        "datasource": DATASOURCE,
        "gridPos": {"x": number % 2 * WIDTH, "y": number // 2 * HEIGHT, "w": WIDTH, "h": HEIGHT},
        "fieldConfig": {
            "defaults": {"unit": panel.unit, "min": 0, "custom": custom, "thresholds": {"mode": "absolute", "steps": steps}},
            "overrides": [],
        },
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}},
        "targets": [
            {"refId": chr(ord("A") + index), "expr": query, "legendFormat": legend, "datasource": DATASOURCE}
            for index, (legend, query) in enumerate(panel.queries.items())
        ],
    }


def text(name: str) -> str:
    return json.dumps(dashboard(name), indent=1, ensure_ascii=False) + "\n"


def main() -> int:
    stale = [name for name in DASHBOARDS if not (file := HERE / f"{name}.json").exists() or file.read_text() != text(name)]
    if "--write" in sys.argv:
        for name in stale:
            (HERE / f"{name}.json").write_text(text(name))
    elif stale:
        print(f"not up to date: {', '.join(stale)}; run `python ops/grafana/build.py --write`", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
