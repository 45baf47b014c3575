"""The torch engine for GPUs gives transformers' own tokens: on a GPU with its kernels and graphs, and on a CPU without them."""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "unit" / "engine"))

import random_checkpoints
from random_checkpoints import FAMILIES, VOCABULARY, save_random
from transformers import AutoModelForCausalLM, PreTrainedConfig

from workers.comm.single import SingleComm
from workers.engines.torch.cuda.engine import GpuEngine
from workers.engines.torch.cuda.residency import ParkingSpace
from workers.engines.torch.cuda.shard import GpuShard
from workers.engines.torch.cuda.steps import GraphSteps, batch_sizes
from workers.memory.arena import HostArena
from workers.messages import LoadShard, NewSequence, SampledToken, Sampling, SequenceStep, Step

BLOCK_TOKENS = 16
BLOCKS = 64
COUNT = 24
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass
class Machine:
    """Where the engine runs, with room for some small models."""

    device: torch.device
    arena: object
    engine: GpuEngine
    close: Callable[[], None] = lambda: None
    shards: list[GpuShard] = field(default_factory=list)
    loads: int = 0

    def load(self, directory: Path, **spec: object) -> GpuShard:
        self.loads += 1
        document = {"source": str(directory), "limits": {"concurrency": 6}, **spec}
        command = LoadShard(1, self.loads, "m", json.dumps(document), (0,), 1, 1, BLOCK_TOKENS, BLOCKS, 2 * BLOCKS, {})
        shard = self.engine.load(command, 0, self.arena, SingleComm(), lambda *_: None)  # type: ignore[arg-type]
        self.shards.append(shard)
        return shard

    def close_shards(self) -> None:
        while self.shards:
            self.shards.pop().close()


def cpu(cache: Path) -> Machine:
    device = torch.device("cpu")
    return Machine(device, HostArena(2**30), GpuEngine(cache, device))


def gpu(cache: Path) -> Machine:
    from workers.memory.copy_engine import CopyEngine
    from workers.memory.cuda_arena import CudaArena
    from workers.memory.cuda_driver import CudaDriver
    from workers.memory.lanes import lanes_of
    from workers.memory.pinned import PinnedPool

    arena = CudaArena(0, 4 * 2**30)
    driver = arena.driver
    assert isinstance(driver, CudaDriver)
    pinned = PinnedPool(2**30, arena.pages.page_bytes, driver.pin, driver.unpin, driver.make_current)
    copies = CopyEngine(lanes_of(arena))
    device = torch.device("cuda", 0)

    def close() -> None:
        copies.close()
        arena.check()
        arena.close()
        pinned.close()

    return Machine(device, arena, GpuEngine(cache, device, ParkingSpace(pinned, copies)), close)


@pytest.fixture(scope="module", params=[pytest.param(cpu, id="cpu"), pytest.param(gpu, id="gpu", marks=pytest.mark.gpu)])
def machine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    made = request.param(tmp_path_factory.mktemp("cache"))
    yield made
    made.close()


@pytest.fixture(autouse=True)
def _close_shards(request: pytest.FixtureRequest):
    yield
    if "machine" in request.fixturenames:
        request.getfixturevalue("machine").close_shards()


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory):
    """Directory of a random checkpoint by family name, made on first use. Heads as FlashInfer has them."""
    made: dict[str, Path] = {}

    def get(family: str) -> Path:
        if family not in made:
            with pytest.MonkeyPatch.context() as patch:
                patch.setitem(random_checkpoints.FAMILIES, family, with_wide_heads(FAMILIES[family]))
                made[family] = save_random(family, tmp_path_factory.mktemp("checkpoints") / family)
        return made[family]

    return get


def with_wide_heads(config: PreTrainedConfig) -> PreTrainedConfig:
    """Heads of 64, the smallest that FlashInfer computes; families that cannot have them keep theirs."""
    if not hasattr(config, "head_dim"):
        return config
    wide = copy.deepcopy(config)
    wide.head_dim = 64
    return wide


def greedy(machine: Machine, directory: Path, prompt: list[int], dtype: torch.dtype = torch.float32) -> list[int]:
    """transformers' own answer on the same device; it never stops early."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype).to(machine.device).eval()
    model.generation_config.eos_token_id = None
    ids = torch.tensor([prompt], device=machine.device)
    with torch.no_grad():
        found = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=COUNT, do_sample=False)
    return found[0, len(prompt) :].tolist()


def prompts(lengths: tuple[int, ...] = (5, 41, 1, 17)) -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(3, VOCABULARY, (length,), generator=generator).tolist() for length in lengths]


@dataclass
class _Running:
    prompt: list[int]
    wanted: int
    sampling: Sampling
    generated: tuple[int, ...] = ()
    enqueued: int = 0  # tokens
    blocks: int = 0
    asked: int = 0  # samples
    answer: list[SampledToken] = field(default_factory=list)


class Driver:
    """Sends steps as a pool driver does, `ahead` of the results, with scattered block ids."""

    def __init__(self, shard: GpuShard, chunk: int = 512, ahead: int = 1) -> None:
        self.shard = shard
        self._chunk = chunk
        self._ahead = ahead
        self._free = sorted(range(BLOCKS), key=lambda block: (block * 37) % BLOCKS)
        self._running: dict[int, _Running] = {}
        self._pending: list = []
        self._released: list[int] = []
        self._steps = 0

    def add(self, prompt: list[int], wanted: int, sampling: Sampling | None = None, generated: tuple[int, ...] = ()) -> int:
        number = len(self._running) + 1
        self._running[number] = _Running([*prompt, *generated], wanted, sampling or Sampling(), generated)
        return number

    def step(self) -> None:
        parts = [self._part(number, one) for number, one in self._running.items() if one.asked < one.wanted]
        if parts:
            self._steps += 1
            released, self._released = tuple(self._released), []
            self._pending.append(self.shard.begin(Step(self._steps, 1, tuple(parts), released)))
        while len(self._pending) > (self._ahead if parts else 0):
            done = self._pending.pop(0).result()
            assert not done.error
            for sampled in done.sampled:
                self._running[sampled.sequence].answer.append(sampled)

    def _part(self, number: int, one: _Running) -> SequenceStep:
        new = None
        if not one.enqueued:
            whole = tuple(one.prompt[: len(one.prompt) - len(one.generated)])
            new = NewSequence(one.sampling, one.generated, whole if one.sampling.repetition_penalty != 1.0 else ())
        start = one.enqueued
        tokens = tuple(one.prompt[start : start + self._chunk])
        one.enqueued += max(len(tokens), 1)
        wanted_blocks = -(-one.enqueued // BLOCK_TOKENS)
        blocks = tuple(self._free.pop(0) for _ in range(wanted_blocks - one.blocks))
        one.blocks = wanted_blocks
        sample = one.enqueued >= len(one.prompt)
        one.asked += sample
        return SequenceStep(number, tokens, start, blocks, sample, new)

    def finish(self) -> list[list[SampledToken]]:
        while any(len(one.answer) < one.wanted for one in self._running.values()):
            self.step()
        self.shard.begin(Step(self._steps + 1, 1, (), tuple(self._running)))
        return [one.answer for one in self._running.values()]


def tokens_of(answers: list[list[SampledToken]]) -> list[list[int]]:
    return [[one.token for one in answer] for answer in answers]


def answer(shard: GpuShard, prompt: list[int], sampling: Sampling | None = None, count: int = COUNT, **options: int) -> list[int]:
    driver = Driver(shard, **options)
    driver.add(prompt, count, sampling)
    return tokens_of(driver.finish())[0]


def agree(found: list[int], wanted: list[int], precision: str) -> bool:
    """In 16 bits a near tie may fall to the other side, and all after it differs: most of the answers must be the same."""
    return found == wanted if precision == "fp32" else found[:8] == wanted[:8]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_same_greedy_tokens_as_transformers(machine: Machine, family: str, precision: str, checkpoints) -> None:
    if precision == "bf16" and machine.device.type == "cpu":
        pytest.skip("half the mantissa, twice the time; fp32 shows the same on a CPU")
    directory = checkpoints(family)
    wanted = [greedy(machine, directory, prompt, DTYPES[precision]) for prompt in prompts()]
    shard = machine.load(directory, precision=precision)
    found = [answer(shard, prompt) for prompt in prompts()]
    same = [agree(one, other, precision) for one, other in zip(found, wanted, strict=True)]
    assert sum(same) >= (4 if precision == "fp32" else 3), (found, wanted)

    chunked = Driver(shard, chunk=7)
    for prompt in prompts()[:2]:
        chunked.add(prompt, COUNT)
    for _ in range(9):  # the others join while these decode
        chunked.step()
    for prompt in prompts()[2:]:
        chunked.add(prompt, COUNT)
    together = tokens_of(chunked.finish())
    same = [agree(one, other, precision) for one, other in zip(together, wanted, strict=True)]
    assert sum(same) >= (4 if precision == "fp32" else 3), (together, wanted)


@pytest.mark.parametrize("ahead", [0, 1, 3])
def test_a_step_need_not_wait_for_the_tokens_of_the_one_before(machine: Machine, ahead: int, checkpoints) -> None:
    shard = machine.load(checkpoints("llama"), precision="fp32")
    wanted = [greedy(machine, checkpoints("llama"), prompt) for prompt in prompts()]
    driver = Driver(shard, ahead=ahead)
    for prompt in prompts():
        driver.add(prompt, COUNT)
    assert tokens_of(driver.finish()) == wanted


def test_eight_bit_weights_answer_like_their_widened_values(machine: Machine, checkpoints) -> None:
    exact = machine.load(checkpoints("llama"), precision="bf16")
    wanted = [answer(exact, prompt, count=8) for prompt in prompts()]
    for precision in ("int8", "fp8"):
        shard = machine.load(checkpoints("llama"), precision=precision)
        found = [answer(shard, prompt, count=8) for prompt in prompts()]
        assert sum(one[:1] == other[:1] for one, other in zip(found, wanted, strict=True)) >= 3, (precision, found, wanted)


def test_sampling_is_reproducible_and_its_seed_counts(machine: Machine, checkpoints) -> None:
    shard = machine.load(checkpoints("qwen2"), precision="fp32")
    ways = [Sampling(temperature=1.5, seed=seed, top_k=top_k, top_p=0.9) for seed, top_k in ((1, 0), (2, 0), (1, 20))]
    alone = [answer(shard, prompts()[1], way) for way in ways]
    assert alone == [answer(shard, prompts()[1], way) for way in ways]
    assert len({tuple(tokens) for tokens in alone}) == 3
    driver = Driver(shard)
    for way in (*ways, Sampling(), Sampling(temperature=0.7, min_p=0.1, seed=9)):
        driver.add(prompts()[1], COUNT, way)
    together = tokens_of(driver.finish())
    assert together[:3] == alone, "a batch changes nothing"
    assert together[3] == greedy(machine, checkpoints("qwen2"), prompts()[1])
    # A preemption keeps what was generated and draws on from there.
    driver = Driver(shard)
    driver.add(prompts()[1], COUNT - 10, ways[0], tuple(alone[0][:10]))
    assert tokens_of(driver.finish())[0] == alone[0][10:]


def test_penalties_see_tokens_that_the_host_has_not(machine: Machine, checkpoints) -> None:
    shard = machine.load(checkpoints("llama"), precision="fp32")
    plain = answer(shard, prompts()[0])
    hard = Sampling(frequency_penalty=1e4)
    assert len(set(answer(shard, prompts()[0], hard))) == COUNT, "no token comes twice"
    assert answer(shard, prompts()[0], Sampling(repetition_penalty=1.0001)) == plain
    never = answer(shard, prompts()[0], Sampling(repetition_penalty=1e6))
    assert not set(never) & set(prompts()[0])


def test_log_probabilities_are_those_of_the_model(machine: Machine, checkpoints) -> None:
    shard = machine.load(checkpoints("llama"), precision="fp32")
    driver = Driver(shard)
    driver.add(prompts()[1], 4, Sampling(logprobs=3))
    driver.add(prompts()[0], 4)
    told, silent = driver.finish()
    for one in told:
        assert one.alternative_ids[0] == one.token
        assert one.alternative_logprobs[0] == pytest.approx(one.logprob)
        assert list(one.alternative_logprobs) == sorted(one.alternative_logprobs, reverse=True)
        assert len(one.alternative_ids) == 3
    assert all(not one.alternative_ids for one in silent)


def test_kv_grows_and_shrinks_while_sequences_go_on(machine: Machine, checkpoints) -> None:
    shard = machine.load(checkpoints("llama"), precision="fp32")
    wanted = [greedy(machine, checkpoints("llama"), prompt) for prompt in prompts()]
    driver = Driver(shard)
    for prompt in prompts():
        driver.add(prompt, COUNT)
    for blocks in (2 * BLOCKS, BLOCKS, BLOCKS + 1, BLOCKS):
        for _ in range(4):
            driver.step()
        shard.grow_kv(blocks)
        assert shard.held().kv_blocks == blocks
    assert tokens_of(driver.finish()) == wanted
    with pytest.raises(MemoryError, match="reserved"):
        shard.grow_kv(2 * BLOCKS + 1)


def test_what_a_step_must_not_say(machine: Machine, checkpoints) -> None:
    shard = machine.load(checkpoints("llama"), precision="fp32")
    new = NewSequence(Sampling())
    for part, says in (
        (SequenceStep(1, (5,), 0, (0,), True), "first step must describe it"),
        (SequenceStep(1, (5,), 0, (BLOCKS,), True, new), "mapped ones"),
        (SequenceStep(2, (), 0, (0,), True, new), "has no last sample"),
        (SequenceStep(3, (5,) * 17, 0, (0,), True, new), "too few"),
    ):
        with pytest.raises(ValueError, match=says):
            shard.begin(Step(1, 1, (part,)))


def test_closing_gives_everything_back(machine: Machine, checkpoints) -> None:
    before = dict(machine.arena.regions())  # type: ignore[attr-defined]
    shard = machine.load(checkpoints("mistral"), precision="fp32")
    assert shard.held().bytes["weights"] > 0
    machine.close_shards()
    assert machine.arena.regions() == before  # type: ignore[attr-defined]


def test_batch_sizes_end_with_the_concurrency() -> None:
    assert batch_sizes(1) == [1]
    assert batch_sizes(6) == [1, 2, 4, 6]
    assert batch_sizes(8) == [1, 2, 4, 8]
    assert batch_sizes(130)[-3:] == [96, 128, 130]
    assert batch_sizes(4096)[-1] == 512


# ---------------------------------------------------------------- what only a GPU has


@pytest.mark.gpu
@pytest.mark.parametrize("machine", [gpu], indirect=True)
@pytest.mark.parametrize("family", ["llama", "qwen2", "mistral", "qwen3", "gemma"])
def test_parked_models_answer_as_before_once_they_wake(machine: Machine, family: str, checkpoints) -> None:
    shard = machine.load(checkpoints(family), precision="bf16")
    before = [answer(shard, prompt) for prompt in prompts()]
    half = [tokens[: COUNT // 2] for tokens in before]
    again = Driver(shard)
    for prompt in prompts():
        again.add(prompt, COUNT // 2)
    assert tokens_of(again.finish()) == half
    shard.save()
    for _ in range(3):
        shard.park()
        assert shard.held().bytes["weights"] == shard.held().bytes["kv"] == 0
        with pytest.raises(ValueError, match="is parked"):
            shard.begin(Step(1, 1, (SequenceStep(1, (5,), 0, (), True, NewSequence(Sampling())),)))
        shard.begin(Step(1, 1, (), (1,)))
        filler = machine.arena.reserve("filler", 2**30)  # type: ignore[attr-defined]
        filler.commit(2**30)
        filler.tensor(torch.uint8, (2**30,)).fill_(255)
        torch.cuda.synchronize()
        filler.close()
        shard.wake(BLOCKS)  # steps follow at once, layer by layer
        rest = Driver(shard)
        for prompt, tokens in zip(prompts(), half, strict=True):
            rest.add(prompt, COUNT - COUNT // 2, generated=tuple(tokens))
        found = [[*first, *more] for first, more in zip(half, tokens_of(rest.finish()), strict=True)]
        same = [agree(one, other, "bf16") for one, other in zip(found, before, strict=True)]
        assert all(same), (found, before)
        assert [answer(shard, prompt) for prompt in prompts()] == before


@pytest.mark.gpu
@pytest.mark.parametrize("machine", [gpu], indirect=True)
def test_parking_waits_for_sequences(machine: Machine, checkpoints) -> None:
    """Rule 5."""
    shard = machine.load(checkpoints("llama"), precision="bf16")
    driver = Driver(shard)
    driver.add(prompts()[1], COUNT)
    for _ in range(3):
        driver.step()
    with pytest.raises(ValueError, match="1 sequences"):
        shard.park()
    driver.finish()
    shard.park()


@pytest.mark.gpu
@pytest.mark.parametrize("machine", [gpu], indirect=True)
def test_decode_runs_as_graphs_where_kernels_take_the_model(machine: Machine, checkpoints, monkeypatch) -> None:
    used: list[int] = []
    run = GraphSteps.run

    def counted(self: GraphSteps, parts):
        used.append(len(parts))
        return run(self, parts)

    monkeypatch.setattr(GraphSteps, "run", counted)
    for family in ("llama", "gemma"):
        shard = machine.load(checkpoints(family), precision="bf16")
        used.clear()
        driver = Driver(shard)
        for prompt in prompts()[:3]:
            driver.add(prompt, COUNT)
        driver.finish()
        assert used.count(3) >= COUNT - 2, family


@pytest.mark.gpu
@pytest.mark.parametrize("machine", [gpu], indirect=True)
def test_several_models_share_a_gpu_and_its_graph_memory(machine: Machine, checkpoints) -> None:
    families = ("llama", "qwen2", "mistral")
    shards = [machine.load(checkpoints(family), precision="bf16") for family in families]
    alone = [[answer(shard, prompt) for prompt in prompts()] for shard in shards]
    drivers = [Driver(shard) for shard in shards]
    for driver in drivers:
        for prompt in prompts():
            driver.add(prompt, COUNT)
    for _ in range(COUNT + 2):
        for driver in drivers:
            driver.step()
    together = [tokens_of(driver.finish()) for driver in drivers]
    for one, other in zip(together, alone, strict=True):
        assert sum(agree(left, right, "bf16") for left, right in zip(one, other, strict=True)) >= 3, (one, other)
