"""What one installed TensorRT-LLM has, as its own interpreter found out (`workers/engines/trtllm/probe.py`)."""

from __future__ import annotations

from typing import Literal

import msgspec

SUPPORTED = ((1, 2), (1, 3), (1, 4))


class Features(msgspec.Struct, frozen=True):
    """Never derived from the version: its releases add, rename and drop arguments between candidates of one number."""

    version: str
    python: str = ""
    # Fields of TorchLlmArgs: what the constructor of `LLM` takes.
    arguments: tuple[str, ...] = ()
    # Field of TorchLlmArgs -> fields of the configuration class that it takes.
    configs: dict[str, tuple[str, ...]] = {}
    # Public methods of `LLM`, and of `AsyncLLM` where there is one.
    llm: tuple[str, ...] = ()
    async_llm: tuple[str, ...] = ()
    generate: tuple[str, ...] = ()  # parameters of LLM.generate_async
    sampling: tuple[str, ...] = ()  # fields of SamplingParams
    mpi_session: tuple[str, ...] = ()  # parameters of MpiPoolSession
    ray: str = ""  # version of Ray in its environment
    cuda: str = ""
    compute_capability: str = ""  # of the first GPU, such as 9.0
    modelopt: str = ""
    commands: tuple[str, ...] = ()  # trtllm-build and the like, beside its interpreter

    def has(self, argument: str, field: str = "") -> bool:
        """Whether the constructor takes the argument, and its configuration class the field."""
        return argument in self.arguments and (not field or field in self.configs.get(argument, ()))

    @property
    def release(self) -> tuple[int, int]:
        """1.4.0rc1 is (1, 4). (0, 0) when the version is not written so."""
        parts = self.version.split(".")
        return (int(parts[0]), int(parts[1])) if len(parts) > 1 and parts[0].isdigit() and parts[1].isdigit() else (0, 0)

    @property
    def is_supported(self) -> bool:
        return self.release in SUPPORTED

    @property
    def builds_engines(self) -> bool:
        """The TensorRT backend went in the course of 1.3."""
        return self.release == (1, 2) and "trtllm-build" in self.commands


ParkMethod = Literal["release", "async_release", "reload"]


def park_method(features: Features, *, world: int, orchestrator: str, wanted: str = "auto") -> ParkMethod:
    """How a group of so many ranks leaves the GPU.

    `sleep_config` came with releases that all ranks agree on. The older `enable_sleep` raises for several ranks outside of the
    Ray orchestrator, whose `AsyncLLM` has methods of its own.
    """
    if wanted == "reload":
        return "reload"
    can = "release" in features.llm and "resume" in features.llm
    if can and (features.has("sleep_config") or (features.has("enable_sleep") and world == 1)):
        return "release"
    sleeps = features.has("sleep_config") or features.has("enable_sleep")
    if sleeps and orchestrator == "ray" and {"release", "resume"} <= set(features.async_llm):
        return "async_release"
    return "reload"
