"""A model whose weights give NaN, in real ranks with the built-in engine, beside one that is well."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from conftest import MIB, Pool, until
from transformers import LlamaConfig, LlamaForCausalLM

from gateway.api.config import KvSpec, LimitsSpec, ModelSpec
from gateway.api.proto import pool_pb2
from workers.driver.effects import ModelFacts
from workers.driver.local_ranks import LocalRanks
from workers.driver.reader import CheckpointReader
from workers.driver.replica import PoolDriverReplica

BAD_TOKEN = 77
BAD_PROMPT = [3, 5, BAD_TOKEN]
GOOD_PROMPT = [3, 5, 9]


class AnyAnswer:
    """Reads checkpoints, and takes each canary's answer for right: random models have no tokenizer and no text."""

    def __init__(self, directory: Path) -> None:
        self._reader = CheckpointReader(directory, None)  # pyright: ignore[reportArgumentType] - no answers are kept

    def facts(self, model: str, spec: ModelSpec) -> ModelFacts:
        return self._reader.facts(model, spec)

    def canary_prompt(self, spec: ModelSpec) -> tuple[int, ...]:
        return (1, 4, 6)

    async def judge(self, model: str, spec: ModelSpec, placement: str, tokens: Sequence[int]) -> str:
        return ""


class TorchPool(Pool):
    def new_driver(self) -> PoolDriverReplica:
        config = PoolDriverReplica.rank_config(self.runtime, "p", self.spec)
        self.driver = PoolDriverReplica(
            self.runtime,
            "p",
            self.spec.model_dump_json(),
            launcher=LocalRanks(config, self.devices),
            reader=AnyAnswer(Path(self.runtime.cache_dir)),
        )
        return self.driver


def save(directory: Path, *, damaged: bool) -> str:
    config = LlamaConfig(
        vocab_size=160,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        eos_token_id=159,
    )
    torch.manual_seed(1)
    model = LlamaForCausalLM(config)
    if damaged:
        with torch.no_grad():
            model.get_input_embeddings().weight[BAD_TOKEN, 3] = float("nan")
    model.save_pretrained(directory)
    return f"file:{directory}"


def assigned(model: str, source: str, ranks: tuple[int, ...]) -> pool_pb2.Assignment:
    spec = ModelSpec(
        source=source, precision="fp32", context=128, kv=KvSpec(floor=MIB), limits=LimitsSpec(concurrency=4, batch_tokens=32)
    )
    group = pool_pb2.Group(ranks=ranks, tensor_parallel=1, pipeline_parallel=len(ranks))
    return pool_pb2.Assignment(model=model, generation=1, spec_json=spec.model_dump_json(), groups=[group])


@pytest.mark.parametrize("ranks", [(0,), (0, 1)], ids=["one rank", "two stages"])
async def test_weights_that_give_nan_fail_their_model_alone(ranks: tuple[int, ...], tmp_path: Path) -> None:
    """Rule 7, rule 11: the ranks are healthy, so they stay, and the model beside it goes on."""
    bad, well = save(tmp_path / "bad", damaged=True), save(tmp_path / "well", damaged=False)
    pool = TorchPool(tmp_path, len(ranks))
    try:
        await pool.start(assigned("bad", bad, ranks), assigned("well", well, (0,)))
        pids = pool.pids
        link = await pool.link()
        first = await link.end_of(await link.submit(GOOD_PROMPT, model="bad"))
        assert first.finish_reason == "length", "only one token's row is damaged"

        long = await link.submit(GOOD_PROMPT, max_tokens=100, model="well")
        mate = await link.submit(GOOD_PROMPT, max_tokens=100, model="bad")
        while mate not in link.tokens:
            await link.next()
        hurt = await link.submit(BAD_PROMPT, model="bad")
        for number in (hurt, mate):
            end = await link.end_of(number)
            assert end.error_code == "unavailable"
            assert "model `bad`" in end.error_message
            assert "weights gave NaN" in end.error_message
        state = {group.model: group for group in pool.driver.record().groups}["bad"]
        assert (state.state, "weights gave NaN" in state.reason) == ("failed", True)

        assert (await link.end_of(long)).completion_tokens == 100
        assert (await link.end_of(await link.submit(GOOD_PROMPT, model="well"))).finish_reason == "length"
        await until(lambda: pool._all_in("ready"), pool.driver.record)  # loaded anew after its pause
        again = await link.end_of(await link.submit(GOOD_PROMPT, model="bad"))
        assert again.finish_reason == "length"
        assert pool.pids == pids
        pool.driver.loop.core.state.check()
    finally:
        await pool.stop(end_ranks=True)
