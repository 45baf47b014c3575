"""How a shard's linears are cut, from transformers' own tensor-parallel plan (`base_model_tp_plan`)."""

from __future__ import annotations

from enum import Enum

from gateway.api.errors import invalid
from workers.engines.torch.stage import StageModel
from workers.engines.torch.weights import Cut


class Style(Enum):
    WHOLE = "whole"  # every shard computes all of it
    OUTPUTS = "outputs"  # a slice of the output features, kept
    INPUTS = "inputs"  # a slice of the input features, partial products summed
    GATHERED = "gathered"  # a slice of the output features, all gathered


_STYLES = {
    "colwise": Style.OUTPUTS,
    "rowwise": Style.INPUTS,
    "colwise_rep": Style.GATHERED,
    "colwise_gather_output": Style.GATHERED,
    "replicated": Style.WHOLE,
    "replicated_with_grad_allreduce": Style.WHOLE,
}


_KV_PROJECTIONS = ("k_proj", "v_proj")


class ParallelPlan:
    """The style of each linear of a stage, for `count` shards of which this is number `index`."""

    def __init__(self, stage: StageModel, index: int, count: int) -> None:
        self._stage = stage
        self.index = index
        self.count = count
        config = stage.base.config
        self._plan: dict[str, str] = dict(getattr(config, "base_model_tp_plan", None) or {})
        self._plan |= getattr(type(stage.model), "_tp_plan", None) or {}
        self._kv_heads: int = getattr(config, "num_key_value_heads", None) or getattr(config, "num_attention_heads", 1)
        if count > 1:
            self._check(config)

    def _check(self, config: object) -> None:
        family = getattr(config, "model_type", "?")
        if not any(style == "rowwise" for style in self._plan.values()):
            raise invalid(
                f"{family} has no tensor-parallel plan in transformers; set tensor_parallel: 1 (pipeline_parallel works)",
                field="tensor_parallel",
            )
        heads = getattr(config, "num_attention_heads", 0)
        if heads % self.count or (self._kv_heads % self.count and self.count % self._kv_heads):
            raise invalid(
                f"{heads} heads and {self._kv_heads} KV heads do not divide by tensor_parallel {self.count}",
                field="tensor_parallel",
            )

    def style(self, name: str, outputs: int) -> Style:
        """Of the linear `name` (in the stage) with that many output features."""
        if self.count == 1:
            return Style.WHOLE
        planned = self._plan.get(self._stage.plan_name(name))
        if planned is None:
            return Style.WHOLE
        if planned not in _STYLES:
            raise invalid(f"the tensor-parallel style {planned!r} of {name} is not supported; set tensor_parallel: 1")
        style = _STYLES[planned]
        return Style.WHOLE if style is Style.GATHERED and outputs % self.count else style

    def cut(self, style: Style, name: str = "") -> Cut | None:
        """What this shard holds of the linear `name`; with more shards than KV heads, several hold the same one."""
        if style is Style.WHOLE:
            return None
        if style is Style.INPUTS:
            return Cut(1, self.index, self.count)
        if name.rpartition(".")[2] in _KV_PROJECTIONS and self._kv_heads < self.count:
            return Cut(0, self.index * self._kv_heads // self.count, self._kv_heads)
        return Cut(0, self.index, self.count)
