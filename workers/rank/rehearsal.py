"""A rank of a cuda pool on a machine without a GPU: `python -m workers.rank.rehearsal …` in place of `python -m workers.rank`.

Host memory stands for the GPU's and gloo for NCCL; driver, processes, messages, engine and groups are the same. For tests, and
to rehearse a benchmark before it takes a machine. The pool's `memory` must be given.
"""

from __future__ import annotations

import logging

import torch

from workers.memory.arena import HostArena
from workers.messages import DeviceMemory
from workers.rank.config import RankConfig, parse
from workers.rank.device import DeviceRank
from workers.rank.main import end_process, run_on_device


class RehearsedRank(DeviceRank):
    def __init__(self, config: RankConfig) -> None:
        torch.set_num_threads(1)
        arena = HostArena(config.capacity_bytes)

        def memory() -> DeviceMemory:
            capacity = config.capacity_bytes
            return DeviceMemory(capacity, capacity, capacity - arena.committed_bytes, 0, 0, 0)

        super().__init__(config, torch.device("cpu"), arena, memory, lambda: 0, lambda: None)


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s rank %(process)d %(name)s: %(message)s")
    config = parse()
    end_process(run_on_device(config, RehearsedRank(config)))


if __name__ == "__main__":
    main()
