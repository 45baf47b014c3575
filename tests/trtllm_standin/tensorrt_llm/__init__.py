"""Stands in for TensorRT-LLM, which cannot be installed here: its names, its checks of arguments, its ways to fail.

What it accepts is made of `llm_api.json`, the facts about its API, for the version in `standin.json` of the environment.
It computes nothing: an answer repeats its prompt.
"""

from __future__ import annotations

import time

from tensorrt_llm_standin_gpu import SETTINGS

time.sleep(SETTINGS.get("import_s", 0.05))

__version__ = SETTINGS["version"]

from tensorrt_llm.llmapi.llm import LLM
from tensorrt_llm.llmapi.sampling import SamplingParams

__all__ = ["LLM", "SamplingParams", "__version__"]

if SETTINGS["version"] >= "1.3":
    from tensorrt_llm.llmapi.async_llm import AsyncLLM

    __all__ += ["AsyncLLM"]
