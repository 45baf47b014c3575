"""A model split over MPI ranks gives the tokens that one rank gives."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from random_checkpoints import greedy
from shard_runner import Runner, load

from workers.comm.mpi import make_group_comm

HERE = Path(__file__).parent
PROMPTS = [[5, 9, 77, 3], [11] * 21 + [30], [99, 4]]
COUNT = 16


def over_mpi(tensor: int, pipeline: int, source: Path, cache: Path, **spec: object) -> dict:
    mpiexec = Path(sys.executable).with_name("mpiexec")
    command = [str(mpiexec), "-n", str(tensor * pipeline), "--allow-run-as-root", "--oversubscribe", "--bind-to", "none"]
    command += [sys.executable, str(HERE / "mpi_rank.py"), str(tensor), str(pipeline), str(source), str(cache), json.dumps(spec)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "MODELYARD_TORCH_THREADS": "1", "OMPI_MCA_mpi_yield_when_idle": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=150, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.strip().splitlines()[-1])


@pytest.mark.parametrize(("tensor", "pipeline"), [(2, 1), (1, 2), (2, 2)])
def test_llama_over_ranks_answers_like_one(tensor: int, pipeline: int, checkpoints, cache) -> None:
    directory = checkpoints("llama")
    wanted = [greedy(directory, prompt, COUNT) for prompt in PROMPTS]
    found = over_mpi(tensor, pipeline, directory, cache, precision="fp32")
    assert found["answers"] == wanted


@pytest.mark.parametrize(("family", "tensor", "pipeline"), [("gemma3", 2, 1), ("qwen3", 2, 1), ("gemma2", 1, 2), ("gpt2", 1, 2)])
def test_other_families_over_ranks(family: str, tensor: int, pipeline: int, checkpoints, cache) -> None:
    directory = checkpoints(family)
    wanted = [greedy(directory, prompt, COUNT) for prompt in PROMPTS]
    assert over_mpi(tensor, pipeline, directory, cache, precision="fp32")["answers"] == wanted


def test_four_bit_weights_split_over_two_stages(checkpoints, cache) -> None:
    directory = checkpoints("llama")
    runner = Runner(load(directory, cache, precision="int4"), chunk=6)
    for prompt in PROMPTS:
        runner.add(prompt, COUNT)
    assert over_mpi(1, 2, directory, cache, precision="int4")["answers"] == list(runner.finish().values())


def test_a_group_whose_ranks_do_not_match_its_shape_is_refused() -> None:
    with pytest.raises(ValueError, match="3 ranks for 2 × 1"):
        make_group_comm((0, 1, 2), 2, 1, group_id=1)
