"""A model split over MPI ranks gives the tokens that one rank gives."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from random_checkpoints import greedy
from shard_runner import Runner, load

from gateway.api.errors import YardError
from workers.comm.mpi import make_group_comm

HERE = Path(__file__).parent
PROMPTS = [[5, 9, 77, 3], [11] * 21 + [30], [99, 4]]
COUNT = 16
# family, tensor, pipeline, precision. The random Llama has 4 heads and 2 KV heads: 4 shards hold each of these twice.
SPLITS = [
    ("llama", 2, 1, "fp32"),
    ("llama", 1, 2, "fp32"),
    ("llama", 2, 2, "fp32"),
    ("llama", 4, 1, "fp32"),
    ("llama", 1, 2, "int4"),
    ("qwen3", 2, 1, "fp32"),
    ("gemma3", 2, 1, "fp32"),
    ("gemma2", 1, 4, "fp32"),
    ("gpt2", 1, 2, "fp32"),
]


def name_of(split: tuple[str, int, int, str]) -> str:
    return "-".join(map(str, split))


@pytest.fixture(scope="module")
def over_mpi(checkpoints: Callable[[str], Path], cache: Path) -> dict[str, list[list[int]]]:
    """Answers of every split, from one world of 4 ranks; groups smaller than the world leave the other ranks out."""
    jobs: list[dict[str, Any]] = [
        {
            "name": name_of(split),
            "source": str(checkpoints(split[0])),
            "tensor": split[1],
            "pipeline": split[2],
            "prompts": PROMPTS,
            "count": COUNT,
            "spec": {"precision": split[3]},
        }
        for split in SPLITS
    ]
    mpiexec = Path(sys.executable).with_name("mpiexec")
    command = [str(mpiexec), "-n", "4", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none"]
    command += [sys.executable, str(HERE / "mpi_rank.py"), str(cache), json.dumps(jobs)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "MODELYARD_TORCH_THREADS": "1", "OMPI_MCA_mpi_yield_when_idle": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=170, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.strip().splitlines()[-1])


@pytest.mark.parametrize("split", SPLITS, ids=name_of)
def test_a_split_model_answers_like_a_whole_one(split, over_mpi, checkpoints, cache) -> None:
    family, _, _, precision = split
    if precision == "fp32":
        wanted = [greedy(checkpoints(family), prompt, COUNT) for prompt in PROMPTS]
    else:
        runner = Runner(load(checkpoints(family), cache, precision=precision), chunk=6)
        for prompt in PROMPTS:
            runner.add(prompt, COUNT)
        wanted = list(runner.finish().values())
    assert over_mpi[name_of(split)] == wanted


def test_a_group_whose_ranks_do_not_match_its_shape_is_refused() -> None:
    with pytest.raises(ValueError, match="3 ranks for 2 × 1"):
        make_group_comm((0, 1, 2), 2, 1, group_id=1)


class OneOfMany:
    """The end of a group that is never used: loading must refuse before anything is said."""

    stage = 0
    tensor_rank = 0

    def __init__(self, tensor_size: int, stages: int) -> None:
        self.tensor_size = tensor_size
        self.stages = stages


@pytest.mark.parametrize(
    ("family", "tensor", "stages", "message"),
    [
        ("llama", 3, 1, "4 heads and 2 KV heads do not divide by tensor_parallel 3"),
        ("gpt2", 2, 1, "gpt2 has no tensor-parallel plan"),
        ("llama", 1, 5, "5 pipeline stages for 4 layers"),
    ],
)
def test_a_split_that_is_not_possible_says_why(family: str, tensor: int, stages: int, message: str, checkpoints, cache) -> None:
    with pytest.raises(YardError, match=message):
        load(checkpoints(family), cache, comm=OneOfMany(tensor, stages))  # pyright: ignore[reportArgumentType]
