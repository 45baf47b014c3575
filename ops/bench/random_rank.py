"""A rank process whose weights are random, made where they are needed: `python -m ops.bench.random_rank …`.

In all else it is `python -m workers.rank`, or `python -m workers.rank.rehearsal` where there is no GPU. Every shard of a tensor
is cut out of the same whole, so that a model answers alike however it is divided.
"""

from __future__ import annotations

import logging
import sys
import zlib
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from gateway.api.checkpoint import Checkpoint
from gateway.api.checkpoint.safetensors_header import read_safetensors_dir
from workers.engines.base import ProgressFn
from workers.engines.torch.cuda import engine
from workers.engines.torch.weights import Cut
from workers.rank.config import parse
from workers.rank.main import end_process, run_on_device

STANDARD_DEVIATION = 0.02


class RandomSource:
    """A `WeightSource`."""

    def __init__(self, directory: Path) -> None:
        self.read_bytes = 0
        self._shapes = {tensor.name: tensor.shape for tensor in read_safetensors_dir(directory)}

    def has(self, name: str) -> bool:
        return name in self._shapes

    def dense(self, name: str, cut: Cut | None = None, transposed: bool = False) -> torch.Tensor:
        shape = self._shapes[name]
        device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
        if len(shape) == 1:
            return torch.ones(shape, dtype=torch.bfloat16, device=device)
        generator = torch.Generator(device).manual_seed(zlib.crc32(name.encode()))
        whole = torch.randn(shape, generator=generator, dtype=torch.bfloat16, device=device).mul_(STANDARD_DEVIATION)
        if cut is None:
            return whole
        start, stop = cut.bounds(whole.shape[cut.axis])
        return whole.narrow(cut.axis, start, stop - start)

    def int4(self, name: str, cut: Cut | None = None) -> None:
        return None


def random_source(checkpoint: Checkpoint, _base_prefix: str, _cache_dir: Path, _progress: ProgressFn) -> RandomSource:
    return RandomSource(checkpoint.path)


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s rank %(process)d %(name)s: %(message)s")
    engine.weight_source = random_source  # pyright: ignore[reportAttributeAccessIssue]
    config = parse()
    if torch.cuda.is_available():
        from workers.rank.gpu import GpuRank as Rank
    else:
        from workers.rank.rehearsal import RehearsedRank as Rank
    end_process(run_on_device(config, Rank(config)))


if __name__ == "__main__":
    main()
