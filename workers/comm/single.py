"""A worker group of one rank: nothing to say to anyone."""

from __future__ import annotations

import contextlib

import torch


class SingleComm:
    tensor_rank = 0
    tensor_size = 1
    stage = 0
    stages = 1
    taken_bytes = 0

    def connect(self) -> None:
        return

    def quiet(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def send_next(self, tensor: torch.Tensor) -> None:
        raise RuntimeError("a group of one stage has no next stage")

    def recv_previous(self, tensor: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("a group of one stage has no previous stage")

    def close(self) -> None:
        return
