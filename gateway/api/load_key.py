"""Which changes of a model take effect in place, and which need another load. Pure."""

from __future__ import annotations

from gateway.api.config import ModelSpec

# What changes in place; everything else of a spec needs another load.
_IN_PLACE = {
    "canary",
    "load",
    "slo",
    "pools",
    "priority",
    "replicas",
    "scaling",
    "residency",
    "keep_warm_s",
    "idle_park_s",
    "idle_unload_s",
    "chat_template",
}


def load_key(spec: ModelSpec) -> str:
    """Equal for two specs of which one can become the other without loading."""
    plain = spec.model_dump(mode="json", exclude=_IN_PLACE)
    plain["limits"] = {key: value for key, value in plain["limits"].items() if key != "queue"}
    return repr(sorted(plain.items()))
