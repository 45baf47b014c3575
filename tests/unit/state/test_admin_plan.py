"""What a plan says, with the controller's own decision behind it and a checkpoint on disk."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file
from site_documents import model, pool

from gateway.api.config import Manifest
from gateway.api.proto.admin_pb2 import Placement
from gateway.api.records import DesiredObject, GroupRecord, PoolRecord, RankRecord
from gateway.controller.pool_digest import deployment_name
from gateway.servers.admin_plan import Planner, after_writes
from gateway.state.snapshot import ObjectKey, Snapshot
from placement.types import PlacedGroup


@pytest.fixture
def checkpoint(tmp_path: Path) -> str:
    """A Llama of two layers."""
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 128,
        "vocab_size": 256,
        "max_position_embeddings": 128,
        "tie_word_embeddings": True,
    }
    shapes = {"model.embed_tokens.weight": (256, 64), "model.norm.weight": (64,)}
    for layer in range(2):
        inside = {
            "self_attn.q_proj": (64, 64),
            "self_attn.k_proj": (32, 64),
            "self_attn.v_proj": (32, 64),
            "self_attn.o_proj": (64, 64),
            "mlp.gate_proj": (128, 64),
            "mlp.up_proj": (128, 64),
            "mlp.down_proj": (64, 128),
            "input_layernorm": (64,),
            "post_attention_layernorm": (64,),
        }
        shapes |= {f"model.layers.{layer}.{name}.weight": shape for name, shape in inside.items()}
    folder = tmp_path / "llama"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: np.zeros(shape, dtype=np.float32) for name, shape in shapes.items()}, folder / "model.safetensors")
    return f"file:{folder}"


def snapshot(*documents: dict) -> Snapshot:
    objects = {}
    for document in documents:
        key = ObjectKey(document["kind"], document["metadata"]["name"])
        objects[key] = DesiredObject(*key, 1, 1, document, 0.0)
    return Snapshot(1, objects)


def changed(before: Snapshot, *documents: dict) -> Snapshot:
    return after_writes(before, {ObjectKey(item["kind"], item["metadata"]["name"]): item for item in documents})


def rows(placements: list[Placement]) -> list[tuple[str, str, list[int], str]]:
    return [(row.model, row.pool, list(row.ranks), row.action) for row in placements]


def record(*groups: GroupRecord) -> dict[str, PoolRecord]:
    ranks = tuple(RankRecord(index, "node-1", 1, "cpu", 2**31) for index in range(2))
    return {"p": PoolRecord("p", "e", "i", "node-1", 1, "cpu", 1, 1, 0.0, ranks=ranks, groups=groups)}


async def test_a_plan_of_a_new_site_places_on_pools_that_do_not_run_yet(tmp_path: Path, checkpoint: str) -> None:
    after = changed(Snapshot(), pool("p"), model("m", source=checkpoint, tensor_parallel=2, pipeline_parallel=1))
    plan = await Planner(tmp_path).plan(Snapshot(), after, {}, None)
    assert rows(plan) == [("m", "p", [0, 1], "load")]
    assert "its seconds begin when the ranks of pool `p` run, which start first" in plan[0].reasons


async def test_a_plan_keeps_what_is_placed_and_says_what_comes_and_goes(tmp_path: Path, checkpoint: str) -> None:
    one = {"source": checkpoint, "tensor_parallel": 1, "pipeline_parallel": 1}
    before = snapshot(pool("p"), model("m", **one), model("old", **one))
    groups = [GroupRecord(name, 1, number, (0,), 1, 1, "ready") for number, name in enumerate(("m", "old"))]
    placed = tuple(PlacedGroup(name, "p", (0,), 1, 1, (1,)) for name in ("m", "old"))
    after = changed(before, model("m", **one, context=64), model("old", **one, replicas=0), model("new", **one))
    plan = await Planner(tmp_path).plan(before, after, record(*groups), placed)
    assert rows(plan) == [("m", "p", [0], "keep"), ("new", "p", [1], "load"), ("old", "p", [0], "unload")]
    assert "its specification changes" in plan[0].reasons[0]
    assert not plan[1].reasons


async def test_a_plan_says_why_something_fits_nowhere(tmp_path: Path, checkpoint: str) -> None:
    after = changed(
        snapshot(pool("p")),
        model("big", source=checkpoint, tensor_parallel=1, pipeline_parallel=1, kv={"floor": "3GiB"}),
        model("odd", source=checkpoint, tensor_parallel=3),
        model("long", source=checkpoint, context=129),
    )
    plan = {row.model: row for row in await Planner(tmp_path).plan(Snapshot(), after, record(), ())}
    assert (plan["big"].action, plan["big"].pool) == ("none", "")
    assert "needs 1 × 3.1 GiB, largest free device in pool `p` has 2.0 GiB" in plan["big"].reasons[0]
    assert "heads" in plan["odd"].reasons[0]
    assert "spec.context is 129, and file:" in plan["long"].reasons[0]
    assert "takes at most 128 tokens" in plan["long"].reasons[0]


async def test_a_pool_of_unknown_size_is_said_to_be_so(tmp_path: Path, checkpoint: str) -> None:
    after = changed(Snapshot(), pool("g", device="cuda", memory=None), model("m", source=checkpoint))
    (row,) = await Planner(tmp_path).plan(Snapshot(), after, {}, None)
    assert row.action == "none"
    assert any("give `memory` to plan before that" in reason for reason in row.reasons)


async def test_a_description_says_why_a_model_is_where_it_is(tmp_path: Path, checkpoint: str) -> None:
    site = snapshot(pool("p"), model("m", source=checkpoint, tensor_parallel="auto", pipeline_parallel=1))
    placed = (PlacedGroup("m", "p", (1,), 1, 1, (1,)),)
    held = record(GroupRecord("m", 1, 1, (1,), 1, 1, "ready"))
    lines = await Planner(tmp_path).why("m", site, held, placed)
    assert lines[0].startswith("rank 1 of pool `p`: takes ")
    assert any("is the smallest that fits" in line for line in lines)
    assert any("not rank 0 of pool `p`: fits too" in line for line in lines)
    assert await Planner(tmp_path).why("unknown", site, held, placed) == []


async def test_a_plan_shows_that_a_changed_pool_starts_anew_with_all_its_models(tmp_path: Path, checkpoint: str) -> None:
    before = snapshot(pool("p"), model("m", source=checkpoint, tensor_parallel=1, pipeline_parallel=1))
    held = record(GroupRecord("m", 1, 1, (0,), 1, 1, "ready"))
    placed = (PlacedGroup("m", "p", (0,), 1, 1, (1,)),)
    for change in ({"memory": "1GiB"}, {"devices": 1}, {"node_labels": {"rack": "a"}}):
        plan = await Planner(tmp_path).plan(before, changed(before, pool("p", **change)), held, placed)
        assert rows(plan) == [("m", "p", [0], "unload"), ("m", "p", [0], "load")], change
        assert all(f"pool `p` restarts, because spec.{next(iter(change))} changes" in row.reasons for row in plan)
        assert plan[1].seconds > 0
    small = await Planner(tmp_path).plan(before, changed(before, pool("p", memory="1MiB")), held, placed)
    assert rows(small) == [("m", "p", [0], "unload"), ("m", "", [], "none")]


async def test_what_a_pool_looks_at_later_restarts_nothing(tmp_path: Path, checkpoint: str) -> None:
    before = snapshot(pool("p"), model("m", source=checkpoint, tensor_parallel=1, pipeline_parallel=1))
    held = record(GroupRecord("m", 1, 1, (0,), 1, 1, "ready"))
    for change in ({"rank_grace_s": 61}, {"standby": "1GiB"}, {"cordoned": [1]}):
        plan = await Planner(tmp_path).plan(before, changed(before, pool("p", **change)), held, None)
        assert rows(plan) == [("m", "p", [0], "keep")], change
        specs = [Manifest.model_validate(document).spec for document in (pool("p"), pool("p", **change))]
        assert deployment_name(specs[0]) == deployment_name(specs[1]), "the controller would close the pool"


async def test_models_of_a_pool_that_starts_anew_move_where_there_is_room(tmp_path: Path, checkpoint: str) -> None:
    before = snapshot(pool("p"), pool("q"), model("m", source=checkpoint, tensor_parallel=1, pipeline_parallel=1))
    running = record(GroupRecord("m", 1, 1, (0,), 1, 1, "ready"))
    running["q"] = PoolRecord("q", "e", "i", "node-2", 1, "cpu", 1, 1, 0.0, ranks=running["p"].ranks)
    placed = (PlacedGroup("m", "p", (0,), 1, 1, (1,)),)
    plan = await Planner(tmp_path).plan(before, changed(before, pool("p", memory="1GiB")), running, placed)
    assert rows(plan) == [("m", "q", [0], "move")]


async def test_a_change_in_place_is_not_said_to_load_anything(tmp_path: Path, checkpoint: str) -> None:
    one = {"source": checkpoint, "tensor_parallel": 1, "pipeline_parallel": 1}
    before = snapshot(pool("p"), model("m", **one))
    held = record(GroupRecord("m", 1, 1, (0,), 1, 1, "ready"))
    placed = (PlacedGroup("m", "p", (0,), 1, 1, (1,)),)
    (row,) = await Planner(tmp_path).plan(before, changed(before, model("m", **one, priority=5)), held, placed)
    assert (row.action, list(row.reasons)) == ("keep", [])
    (row,) = await Planner(tmp_path).plan(before, changed(before, model("m", **one, context=64)), held, placed)
    assert "loaded beside it" in row.reasons[0]
