"""One pipeline stage of a model, defined by `transformers` and filled with this shard's weights.

The model is constructed without memory (meta device); layers of other stages are dropped; the leaves that hold weights are
then replaced by this package's own, so that its forward pass is transformers' code over our linears, norms and attention.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from gateway.api.errors import invalid
from placement.split import stage_layers
from workers.engines.torch.attention import ATTENTION


@dataclass(frozen=True)
class _Names:
    """Where a family keeps its parts, below its base model."""

    layers: str
    embedding: str
    norm: str
    positions: str | None = None  # learned position embedding


_USUAL = _Names("layers", "embed_tokens", "norm")
_NAMES = {"gpt2": _Names("h", "wte", "ln_f", "wpe")}


@dataclass(frozen=True)
class StageModel:
    """`model` with this stage's layers only, still without weights. Names in it map to checkpoint names by `checkpoint_name`."""

    model: PreTrainedModel
    names: _Names
    first_layer: int
    layers: int
    is_first: bool
    is_last: bool

    @property
    def base(self) -> Any:
        return self.model.base_model

    @property
    def base_prefix(self) -> str:
        return self.model.base_model_prefix

    def checkpoint_name(self, name: str) -> str:
        """Layers count from 0 in a stage and from its first layer in the checkpoint."""
        prefix = f"{self.base_prefix}.{self.names.layers}."
        if not name.startswith(prefix):
            return name
        index, _, rest = name.removeprefix(prefix).partition(".")
        return f"{prefix}{int(index) + self.first_layer}.{rest}"

    def plan_name(self, name: str) -> str:
        """As transformers' parallel plans write it: below the base model, `*` for the layer."""
        parts = name.removeprefix(self.base_prefix + ".").split(".")
        return ".".join("*" if part.isdigit() else part for part in parts)


class Absent(nn.Module):
    """Stands for what another stage computes: `identity` parts pass their input on, the others add nothing."""

    def __init__(self, identity: bool) -> None:
        super().__init__()
        self._identity = identity

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x if self._identity else torch.zeros(())


class Layers(nn.ModuleList):
    """Models iterate over `layers[:n]` in every step, for which a plain ModuleList builds another one."""

    def __getitem__(self, index: int | slice) -> Any:
        return list(self._modules.values())[index]


def shorten_lookups(model: nn.Module) -> None:
    """Python finds parts of a module only after its own attributes; with hundreds a step, put them there, once all is built."""
    for module in model.modules():
        module.__dict__.update(module._modules)


def build_stage(config_content: dict[str, Any], stage: int, stages: int, dtype: torch.dtype) -> StageModel:
    """YardError(INVALID) for a family that transformers has no causal model of, or with fewer layers than stages."""
    content = dict(config_content)
    family = str(content.pop("model_type", ""))
    try:
        config = AutoConfig.for_model(family, **content)
    except ValueError as error:
        raise invalid(f"model_type {family!r} is not known to transformers: {error}", field="source") from error
    config._attn_implementation = ATTENTION
    if stages > config.num_hidden_layers:
        raise invalid(
            f"{stages} pipeline stages for {config.num_hidden_layers} layers; use at most one per layer",
            field="pipeline_parallel",
        )
    layers = stage_layers(config.num_hidden_layers, stages, stage)
    first, count = layers.start, len(layers)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=ATTENTION)
    model.eval().requires_grad_(False)
    names = _NAMES.get(family, _USUAL)
    base = model.base_model
    if not hasattr(base, names.layers):
        raise invalid(f"the torch engine does not know the layout of {family} models; use another engine", field="engine")
    result = StageModel(model, names, first, count, stage == 0, stage == stages - 1)
    _keep_layers(base, names.layers, first, count)
    _restore_buffers(model)
    if not result.is_first:
        setattr(base, names.embedding, Absent(identity=True))
        if names.positions:
            setattr(base, names.positions, Absent(identity=False))
    if not result.is_last:
        setattr(base, names.norm, Absent(identity=True))
        model.set_output_embeddings(Absent(identity=True))
    return result


def _keep_layers(base: Any, attribute: str, first: int, count: int) -> None:
    setattr(base, attribute, Layers(list(getattr(base, attribute))[first : first + count]))
    config = base.config
    config.num_hidden_layers = count
    if getattr(config, "layer_types", None):
        config.layer_types = list(config.layer_types)[first : first + count]


def _restore_buffers(model: PreTrainedModel) -> None:
    """Rotary frequencies and the like have values although nothing is loaded: transformers' own initialisation gives them."""
    for module in model.modules():
        held = [name for name, buffer in module.named_buffers(recurse=False) if buffer.is_meta]
        if not held:
            continue
        for name in held:
            setattr(module, name, torch.empty_like(getattr(module, name), device="cpu"))
        model._init_weights(module)
