"""The admin service over a real gRPC server and a real Valkey."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import grpc
import msgspec
import pytest
from site_documents import model, pool, route, tenant
from valkey_server import ValkeyServer
from watching import until

from gateway.api.proto import admin_pb2 as pb
from gateway.api.proto.admin_pb2_grpc import AdminStub, add_AdminServicer_to_server
from gateway.api.records import (
    ControllerRecord,
    GatewayRecord,
    GroupRecord,
    NodeRecord,
    PoolRecord,
    RankRecord,
    SiteStatus,
)
from gateway.api.runtime import Runtime
from gateway.api.tasks import cancelled
from gateway.servers.admin_service import AdminService
from gateway.state.feed import SiteFeed
from gateway.state.history import History
from gateway.state.snapshot import Backup
from gateway.state.store import SiteStore
from gateway.state.view import SiteView

ACTOR = (("modelyard-actor", "ann"),)


@dataclass
class Admin:
    stub: AdminStub
    store: SiteStore
    view: SiteView

    async def apply(self, *documents: dict, force: bool = False) -> pb.ApplyResponse:
        return await self.stub.Apply(pb.ApplyRequest(objects=[obj(item) for item in documents], force=force), metadata=ACTOR)

    async def switch(self, to_model: str, *, generation: int = 0, force: bool = False) -> pb.SwitchRouteResponse:
        request = pb.SwitchRouteRequest(route="chat", to_model=to_model, generation=generation, force=force)
        return await self.stub.SwitchRoute(request, metadata=ACTOR)

    async def observe(self, *groups: GroupRecord, message: str = "", ledger: tuple[tuple[str, str, int], ...] = ()) -> None:
        ranks = tuple(RankRecord(index, "node-1", 1, "cpu", 2**31, ledger) for index in range(2))
        record = PoolRecord("p", "127.0.0.1:1", "i", "node-1", 1, "cpu", 1, 1, 0.0, ranks=ranks, groups=groups, message=message)
        await self.store.redis.set(self.store.keys.pool("p"), msgspec.json.encode(record))
        await self.store.redis.sadd(self.store.keys.pools, "p")

    async def report(self, *nodes: NodeRecord, **unplaced: tuple[str, ...]) -> None:
        record = ControllerRecord("controller-1", 1, 1, 0.0, unplaced=unplaced, nodes=nodes)
        await self.store.redis.set(self.store.keys.controller, msgspec.json.encode(record))


@pytest.fixture
async def admin(own_valkey: ValkeyServer, site: str, tmp_path: Path) -> AsyncIterator[Admin]:
    store, view = SiteStore(own_valkey.url, site), SiteView()
    feed = asyncio.create_task(SiteFeed(view, store).run())
    runtime = Runtime(site, own_valkey.url, "s", str(tmp_path), str(tmp_path), "127.0.0.1", ray_grows=False)
    server = grpc.aio.server()
    add_AdminServicer_to_server(AdminService(store, view, runtime), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield Admin(AdminStub(channel), store, view)
    await server.stop(0)
    await cancelled([feed])
    await store.close()


def obj(document: dict, generation: int = 0) -> pb.Object:
    return pb.Object(
        kind=document["kind"],
        name=document["metadata"]["name"],
        generation=generation,
        manifest_json=json.dumps(document),
    )


def group(name: str, state: str = "ready", generation: int = 1, rank: int = 0, reason: str = "") -> GroupRecord:
    return GroupRecord(name, generation, rank + 1, (rank,), 1, 1, state, reason)  # type: ignore[arg-type]


async def test_apply_says_what_changed_as_a_diff(admin: Admin) -> None:
    created = await admin.apply(pool("p"), model("m"))
    assert [(change.action, change.generation) for change in created.changes] == [("created", 1), ("created", 1)]
    changed = await admin.apply(pool("p"), model("m", replicas=2))
    assert [change.action for change in changed.changes] == ["unchanged", "changed"]
    assert "+  replicas: 2" in changed.changes[1].diff
    assert changed.revision == 2
    assert not changed.changes[0].diff


async def test_a_pool_that_no_node_can_hold_beside_the_others_is_refused(admin: Admin) -> None:
    """Rule 16: what is said to be taken on can be. Ray's nodes are what the controller last saw of them."""
    cpu = {"device": "cpu", "devices": 2}
    await admin.apply(pool("p", **cpu, memory="3GiB"))
    await admin.report(NodeRecord("a", 8 * 1024, 0), NodeRecord("b", 4 * 1024, 2, {"zone": "z"}))
    await admin.apply(pool("q", **cpu, memory="1GiB"))
    with pytest.raises(grpc.aio.AioRpcError, match=r"Pool/r asks for 64 × 400.0 GiB on one node; the largest node has 8.0 GiB"):
        await admin.apply(pool("r", device="cpu", devices=64, memory="400GiB"))
    with pytest.raises(grpc.aio.AioRpcError, match=r"Pool/p asks for 2 × 4.5 GiB .* other pools leave at most 8.0 GiB"):
        await admin.apply(pool("p", **cpu, memory="4.5GiB"))
    with pytest.raises(grpc.aio.AioRpcError, match=r"labels \{'zone': 'y'\}; the largest node has 0.0 GiB"):
        await admin.apply(pool("r", **cpu, memory="1GiB", node_labels={"zone": "y"}))
    with pytest.raises(grpc.aio.AioRpcError, match=r"Pool/g asks for 3 GPUs; this site has 2, and the other pools leave 2"):
        await admin.stub.Plan(pb.ApplyRequest(objects=[obj(pool("g", device="cuda", devices=3))]))
    await admin.apply(pool("g", device="cuda", devices=2), pool("p", **cpu, memory="4GiB"))
    await admin.apply(pool("r", device="cpu", devices=64, memory="400GiB"), force=True)
    await admin.apply(pool("p", **cpu, memory="2GiB"))  # asks for less: whatever else is wrong, that is no reason


async def test_get_gives_back_what_was_applied_and_a_generation_guards_the_next_write(admin: Admin) -> None:
    await admin.apply(pool("p"), model("m"))
    await admin.apply(model("m", replicas=2))
    got = await admin.stub.Get(pb.GetRequest(kind="Model", name="m"))
    assert json.loads(got.objects[0].manifest_json) == model("m", replicas=2)
    everything = await admin.stub.Get(pb.GetRequest())
    assert [(item.kind, item.name) for item in everything.objects] == [("Pool", "p"), ("Model", "m")]
    with pytest.raises(grpc.aio.AioRpcError, match=r"generation 1 was given, the store has 2 .written by ann") as caught:
        await admin.stub.Apply(pb.ApplyRequest(objects=[obj(model("m", replicas=3), generation=1)]))
    assert caught.value.code() == grpc.StatusCode.FAILED_PRECONDITION


async def test_a_server_that_runs_elsewhere_is_shown_and_not_managed(admin: Admin) -> None:
    source = "openai+http://trt.example:8000/v1#llama-70b"
    await admin.apply(pool("p"), model("m"))
    await admin.observe(group("m"))
    planned = await admin.stub.Plan(pb.ApplyRequest(objects=[obj(model("far", source=source)), obj(route("chat", "far"))]))
    row = next(row for row in planned.placements if row.model == "far")
    assert (row.action, row.pool, list(row.reasons)) == ("external", "", [f"not managed: requests go to {source}"])
    await admin.apply(model("far", source=source), route("chat", "m"))
    described = await admin.stub.Describe(pb.DescribeRequest(kind="Model", name="far"))
    assert "no gateway asks it" in described.reasons
    for state, reason in (("failed", "refused"), ("ready", "")):
        seen = GroupRecord("far", 1, 0, (), 0, 0, state, reason)  # type: ignore[arg-type]
        record = GatewayRecord("g", "node-1", 1, "", "", 1, 0.0, servers=(seen,))
        await admin.store.redis.set(admin.store.keys.gateway("g"), msgspec.json.encode(record))
        await admin.store.redis.sadd(admin.store.keys.gateways, "g")
        if state == "failed":
            with pytest.raises(grpc.aio.AioRpcError, match=r"its server is failed .refused."):
                await admin.switch("far")
    described = await admin.stub.Describe(pb.DescribeRequest(kind="Model", name="far"))
    assert json.loads(described.observed_json)["gateways"]["g"]["state"] == "ready"
    assert described.reasons[0].startswith("it is a server that runs elsewhere, so it is asked and not managed")
    await admin.switch("far")
    with pytest.raises(grpc.aio.AioRpcError, match="nothing of it is in memory here"):
        await admin.stub.SetResidency(pb.SetResidencyRequest(model="far", residency="parked"))
    answer = await admin.stub.Delete(pb.DeleteRequest(kind="Pool", name="p", force=True))
    assert answer.change.action == "deleted"


async def test_odd_documents_are_bad_requests(admin: Admin) -> None:
    """Whatever is sent as a document, the caller is told what is wrong with it."""
    deep = "[" * 400 + "]" * 400
    named = '{"apiVersion": "modelyard/v1", "kind": "Model", "metadata": {"name": "m"}, "spec": %s}'
    texts = [
        "", "null", "[]", "{}", "NaN", deep, '{"a": ' + deep + "}", "[" * 50_000, '{"kind": []}',
        '{"kind": "Model", "metadata": 3}',
        named % deep, named % "null", named % "[]", named % "5",
        named % '{"source": "\\ud800"}', named % ('{"replicas": ' + "9" * 5_000 + "}"),
        named % '{"replicas": 1e999}', named % ('{"source": "' + "x" * 300_000 + '"}'), named % ('{"' + "x" * 9_000 + '": 1}'),
        named.replace('"m"', '"' + "é" * 9_000 + '"') % "{}",
    ]  # fmt: skip
    for text in texts:
        for call in (admin.stub.Apply, admin.stub.Plan):
            code = await call(pb.ApplyRequest(objects=[pb.Object(manifest_json=text)])).code()
            assert code == grpc.StatusCode.INVALID_ARGUMENT, text[:200]


@pytest.mark.parametrize(
    ("request_", "method", "status", "message"),
    [
        (pb.GetRequest(kind="Model", name="x"), "Get", grpc.StatusCode.NOT_FOUND, "there are: m"),
        (pb.GetRequest(kind="Modell"), "Get", grpc.StatusCode.INVALID_ARGUMENT, "not one of Pool, Model"),
        (pb.DescribeRequest(kind="Route", name="x"), "Describe", grpc.StatusCode.NOT_FOUND, "there are: chat"),
        (pb.DeleteRequest(kind="Model", name="m"), "Delete", grpc.StatusCode.FAILED_PRECONDITION, "named by Route/chat"),
        (pb.ApplyRequest(objects=[pb.Object(manifest_json="{")]), "Apply", grpc.StatusCode.INVALID_ARGUMENT, "not JSON"),
        (
            pb.ApplyRequest(objects=[pb.Object(kind="Pool", manifest_json="{}")]),
            "Apply",
            grpc.StatusCode.INVALID_ARGUMENT,
            "agree",
        ),
        (pb.RollbackRouteRequest(route="chat"), "RollbackRoute", grpc.StatusCode.FAILED_PRECONDITION, "never switched"),
        (pb.SwitchRouteRequest(route="chat", to_model="x"), "SwitchRoute", grpc.StatusCode.NOT_FOUND, "'x' does not exist"),
    ],
)
async def test_errors_have_a_status_and_a_next_step(admin: Admin, request_, method: str, status, message: str) -> None:
    await admin.apply(model("m"), route("chat", "m"))
    with pytest.raises(grpc.aio.AioRpcError, match=message) as caught:
        await getattr(admin.stub, method)(request_)
    assert caught.value.code() == status


async def test_rule_14_an_unknown_key_comes_back_with_its_field_and_the_nearest_one(admin: Admin) -> None:
    """Rule 14, also over gRPC."""
    with pytest.raises(grpc.aio.AioRpcError, match="did you mean 'replicas'") as caught:
        await admin.apply(model("m", replica=2))
    assert dict(caught.value.trailing_metadata() or ())["modelyard-field"] == "spec.replica"


async def test_rule_8_a_route_switches_only_to_a_target_ready_at_equal_capacity(admin: Admin) -> None:
    """Rule 8: a target that is loading is UNAVAILABLE for now, one with too few replicas FAILED_PRECONDITION, force goes."""
    await admin.apply(model("a", replicas=2), model("b"), route("chat", "a"))
    await admin.observe(group("a"), group("a", rank=1), group("b", "loading"))
    with pytest.raises(
        grpc.aio.AioRpcError, match=r"has 2 ready worker group\(s\) now and would have 0: `b`: loading in pool `p`.*raise"
    ) as caught:
        await admin.switch("b")
    assert caught.value.code() == grpc.StatusCode.FAILED_PRECONDITION

    await admin.apply(model("b", replicas=2))
    await admin.observe(group("a"), group("a", rank=1), group("b"), group("b", "loading", rank=1))
    with pytest.raises(grpc.aio.AioRpcError, match="wait until it is ready, or use --force") as caught:
        await admin.switch("b")
    assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
    assert "retry-after-ms" in dict(caught.value.trailing_metadata() or ())

    await admin.observe(group("a"), group("a", rank=1), group("b"), group("b", rank=1))
    switched = await admin.switch("b")
    assert (switched.change.action, switched.change.generation) == ("changed", 2)
    assert switched.committed_unix > 0
    with pytest.raises(grpc.aio.AioRpcError, match="generation 1 was given, the store has 2"):
        await admin.switch("a", generation=1)

    await admin.observe(group("b"))
    with pytest.raises(grpc.aio.AioRpcError, match="`a`: it is in no pool"):
        await admin.stub.RollbackRoute(pb.RollbackRouteRequest(route="chat"))
    back = await admin.stub.RollbackRoute(pb.RollbackRouteRequest(route="chat", force=True), metadata=ACTOR)
    assert "-  - model: b" in back.change.diff
    assert back.change.generation == 3


async def test_rule_8_an_apply_does_not_flip_a_serving_route_to_what_is_not_ready(admin: Admin) -> None:
    """Rule 8 holds for the route of an apply as well, and nothing else of that apply is written."""
    await admin.apply(model("a"), model("b"), route("chat", "a"))
    await admin.apply(route("chat", "b"))  # Nothing serves yet, so nobody loses anything.
    await admin.apply(route("chat", "a"))
    await admin.observe(group("a"))
    with pytest.raises(grpc.aio.AioRpcError, match="Route/chat has 1 ready worker group"):
        await admin.apply(model("a", replicas=2), route("chat", "b"))
    with pytest.raises(grpc.aio.AioRpcError, match="`b`: it is in no pool"):
        await admin.apply(route("chat", "a", "b"))
    stored = await admin.store.get("Model", "a")
    assert stored is not None
    assert stored.generation == 1
    await admin.apply(route("chat", "b"), force=True)


async def test_describe_tells_where_a_model_is_and_why_not(admin: Admin) -> None:
    await admin.apply(pool("p"), model("m"), route("chat", "m"))
    told = await admin.stub.Describe(pb.DescribeRequest(kind="Model", name="m"))
    assert "no controller is at work" in told.reasons[0]
    await admin.report(m=("needs 2 × 14.2 GiB", "pool `p` is starting"))
    told = await admin.stub.Describe(pb.DescribeRequest(kind="Model", name="m"))
    assert list(told.reasons) == ["needs 2 × 14.2 GiB", "pool `p` is starting"]

    await admin.report()
    await admin.observe(group("m", "failed", generation=1, reason="file is truncated"), message="rank 1 is restarting")
    await admin.apply(model("m", context=64))
    told = await admin.stub.Describe(pb.DescribeRequest(kind="Model", name="m"))
    observed = json.loads(told.observed_json)
    assert observed["groups"][0]["pool"] == "p"
    assert observed["groups"][0]["state"] == "failed"
    assert observed["routes"] == ["chat"]
    assert told.reasons[0] == "group 1 in pool `p` is failed: file is truncated"
    assert "generation 2 is wanted" in told.reasons[1]

    told = await admin.stub.Describe(pb.DescribeRequest(kind="Route", name="chat"))
    assert json.loads(told.observed_json)["targets"] == [{"model": "m", "weight": 100, "share": 1.0, "ready_groups": 0}]
    assert "serves nowhere: failed in pool `p` (file is truncated)" in told.reasons[0]
    told = await admin.stub.Describe(pb.DescribeRequest(kind="Pool", name="p"))
    assert list(told.reasons) == ["rank 1 is restarting"]


async def test_status_is_the_site_of_this_second(admin: Admin) -> None:
    await admin.apply(pool("p"), model("m"), model("n"), route("chat", "m", aliases=["talk"]), route("dead", "n"))
    await admin.observe(group("m"))
    status = msgspec.json.decode((await admin.stub.Status(pb.StatusRequest())).status_json, type=SiteStatus)
    assert (status.revision, status.redis) == (1, "ok")
    assert [(item.name, item.ready, item.aliases) for item in status.routes] == [("chat", True, ("talk",)), ("dead", False, ())]
    assert [item.name for item in status.models] == ["m", "n"]
    assert status.pools[0].groups[0].model == "m"
    assert status.controller is None


async def test_plan_says_why_nowhere_and_writes_nothing(admin: Admin) -> None:
    plan = await admin.stub.Plan(pb.ApplyRequest(objects=[obj(pool("p")), obj(model("m"))]))
    assert [change.action for change in plan.changes] == ["created", "created"]
    assert [(item.model, item.pool, item.action) for item in plan.placements] == [("m", "", "none")]
    assert "/models/m" in plan.placements[0].reasons[0]
    assert await admin.store.revision() == 0


async def test_events_merge_changes_and_observations_and_follow(admin: Admin) -> None:
    history = History(admin.store)
    await admin.apply(model("a"), model("b"), route("chat", "a"))
    await history.record("model.ready", "Model/a", "in pool `p`", "driver p")
    await admin.switch("b", force=True)
    past = [event async for event in admin.stub.Events(pb.EventsRequest(last=3))]
    assert [(event.kind, event.subject, event.actor) for event in past] == [
        ("object.created", "Route/chat", "ann"),
        ("model.ready", "Model/a", "driver p"),
        ("route.switched", "Route/chat", "ann"),
    ]
    assert past[2].message == "switched: a → b, generation 1 → 2"
    assert json.loads(past[2].detail_json) == {
        "revision": 2,
        "from": 1,
        "to": 2,
        "changes": [{"field": "targets", "from": "a", "to": "b"}],
    }
    assert past[0].time_unix <= past[1].time_unix <= past[2].time_unix

    call = admin.stub.Events(pb.EventsRequest(follow=True, last=1))
    first = await call.read()
    assert first.kind == "route.switched"
    await history.record("rank.lost", "Pool/p", "rank 1", "driver p")
    assert (await call.read()).kind == "rank.lost"
    await admin.stub.Delete(pb.DeleteRequest(kind="Route", name="chat"), metadata=ACTOR)
    assert (await call.read()).kind == "object.deleted"
    call.cancel()


async def test_rule_12_reads_go_on_and_changes_are_refused_without_redis(admin: Admin, own_valkey: ValkeyServer) -> None:
    """Rule 12: marked degraded, with the last snapshot; a change is refused with a time to try again."""
    await admin.apply(model("m"), route("chat", "m"))
    await until(admin.view, lambda view: view.revision == 1)
    own_valkey.stop()
    call = admin.stub.Get(pb.GetRequest(kind="Route"))
    assert [item.name for item in (await call).objects] == ["chat"]
    assert dict(await call.trailing_metadata())["modelyard-degraded"] == "true"
    await until(admin.view, lambda view: view.degraded)
    status = msgspec.json.decode((await admin.stub.Status(pb.StatusRequest())).status_json, type=SiteStatus)
    assert status.redis == "degraded"
    for change in (admin.apply(model("m", replicas=2)), admin.switch("m", force=True)):
        with pytest.raises(grpc.aio.AioRpcError, match="refused until it is back") as caught:
            await change
        assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
        assert int(dict(caught.value.trailing_metadata() or ())["retry-after-ms"]) > 0


async def test_rule_12_after_a_flush_changes_are_refused_until_it_is_restored(admin: Admin) -> None:
    """rule 12: by the gateway that still holds it; or, when none does, from a file of `yard backup`."""
    await admin.apply(model("m"), route("chat", "m"))
    await until(admin.view, lambda view: "chat" in view.routes)
    file = await admin.stub.Backup(pb.BackupRequest())
    assert (file.objects, file.revision) == (2, 1)
    await admin.store.redis.flushall()
    await until(admin.view, lambda view: view.replaced)
    assert (await admin.stub.Backup(pb.BackupRequest())).objects == 2
    for change in (admin.apply(model("n")), admin.switch("m"), admin.stub.Delete(pb.DeleteRequest(kind="Model", name="m"))):
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await change
        assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
        assert "yard restore" in (refused.value.details() or "")
    assert (await admin.stub.Restore(pb.RestoreRequest(), metadata=ACTOR)).written == 2
    await until(admin.view, lambda view: not view.degraded)
    await admin.apply(model("n"))
    # What the store has newer stays as it is.
    assert (await admin.stub.Restore(pb.RestoreRequest(snapshot_json=file.snapshot_json), metadata=ACTOR)).written == 0
    with pytest.raises(grpc.aio.AioRpcError) as wrong:
        await admin.stub.Restore(pb.RestoreRequest(snapshot_json="{}"), metadata=ACTOR)
    assert wrong.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_backup_fills_an_empty_store(admin: Admin, own_valkey: ValkeyServer) -> None:
    await admin.apply(model("m"), route("chat", "m"))
    file = await admin.stub.Backup(pb.BackupRequest())
    elsewhere = SiteStore(own_valkey.url, "elsewhere")
    backup = msgspec.json.decode(file.snapshot_json, type=Backup).snapshot()
    assert await elsewhere.restore(backup, "ann") == 2
    assert (await elsewhere.snapshot()).objects == (await admin.store.snapshot()).objects
    await elsewhere.close()


async def test_a_pool_does_not_shrink_under_what_it_holds(admin: Admin) -> None:
    await admin.apply(pool("p", device="cpu", devices=2, memory="2GiB"), model("a"))
    group = GroupRecord("a", 1, 1, (1,), 1, 1, "ready")
    await admin.observe(group, ledger=(("a", "weights", 2**30), ("a", "kv_used", 2**30), ("", "foreign", 2**30)))
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await admin.apply(pool("p", device="cpu", devices=1, memory="512MiB"))
    assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert "spec.devices 1 takes away ranks that a run on" in str(refused.value.details())
    assert "spec.memory 0.50 GiB is less than the 1.00 GiB that a need on rank 0" in str(refused.value.details())
    assert (await admin.apply(pool("p", device="cpu", devices=2, memory="1GiB"))).changes[0].action == "changed"
    assert (await admin.apply(pool("p", device="cpu", devices=1, memory="512MiB"), force=True)).changes[0].action == "changed"


async def test_an_apply_says_that_a_pool_starts_anew(admin: Admin) -> None:
    await admin.apply(pool("p"), model("m"), model("n"))
    await admin.observe(group("m"), group("n", rank=1))
    (change,) = (await admin.apply(pool("p", memory="1GiB"))).changes
    (note,) = change.notes
    assert "pool `p` restarts, because spec.memory changes" in note
    assert "all its models (m, n) are unloaded and loaded again" in note
    (change,) = (await admin.apply(pool("p", memory="1GiB", rank_grace_s=61))).changes
    assert "spec.rank_grace_s restarts nothing; it takes effect when the ranks of pool `p` start next" in change.notes[0]


def _stored(document: dict, generation: int = 1, **fields: object) -> dict:
    name = document["metadata"]["name"]
    return {"kind": document["kind"], "name": name, "generation": generation, "revision": 1, "manifest": document,
            "updated_unix": 0.0, "actor": "x", **fields}  # fmt: skip


@pytest.mark.parametrize(
    ("objects", "fields", "message"),
    [
        ([_stored(route("r", "m", aliases=["chat"]))], {}, "the name 'chat' is taken by Route/chat"),
        ([_stored(route("r", "nowhere"))], {}, "Model 'nowhere' does not exist"),
        ([_stored(model("k"), kind="Evil")], {}, "kind 'Evil' is not one of"),
        ([_stored(model("k"), name="other")], {}, "its manifest is of Model/k"),
        ([_stored(model("k"), manifest={"kind": "Model"})], {}, "Model/k"),
        ([_stored(model("k"), generation=2**64)], {}, "generation is 18446744073709551616"),
        ([_stored(model("k"), generation=-5)], {}, "generation is -5"),
        ([_stored(model("k"))], {"revision": 2**63 - 1}, "revision is 9223372036854775807"),
        ([], {"tombstones": {"Model/m": 2**63}}, "tombstones: Model/m"),
    ],
)
async def test_rule_14_a_backup_is_judged_like_an_apply(admin: Admin, objects: list, fields: dict, message: str) -> None:
    """Rule 14: nothing of it is written, and the site can be changed as before."""
    await admin.apply(model("m"), route("chat", "m"))
    backup = json.loads((await admin.stub.Backup(pb.BackupRequest())).snapshot_json)
    text = json.dumps(backup | {"objects": objects} | fields)
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await admin.stub.Restore(pb.RestoreRequest(snapshot_json=text))
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert message in (refused.value.details() or "")
    assert (await admin.apply(model("m", priority=1))).revision == 2


async def test_a_backup_with_a_name_that_leads_nowhere_needs_force(admin: Admin) -> None:
    await admin.apply(model("m"), route("chat", "m"))
    await admin.stub.Delete(pb.DeleteRequest(kind="Model", name="m", force=True))
    file = (await admin.stub.Backup(pb.BackupRequest())).snapshot_json
    await admin.store.redis.flushall()
    with pytest.raises(grpc.aio.AioRpcError, match="'m' does not exist"):
        await admin.stub.Restore(pb.RestoreRequest(snapshot_json=file))
    assert (await admin.stub.Restore(pb.RestoreRequest(snapshot_json=file, force=True))).written == 2


async def test_a_restore_says_what_was_deleted_since_and_brings_it_back_by_force(admin: Admin) -> None:
    await admin.apply(model("m", priority=7), route("chat", "m"))
    file = (await admin.stub.Backup(pb.BackupRequest())).snapshot_json
    await admin.stub.Delete(pb.DeleteRequest(kind="Route", name="chat"))
    await admin.stub.Delete(pb.DeleteRequest(kind="Model", name="m"))
    answer = await admin.stub.Restore(pb.RestoreRequest(snapshot_json=file))
    assert (answer.written, list(answer.skipped)) == (0, ["Model/m (generation 2)", "Route/chat (generation 2)"])
    answer = await admin.stub.Restore(pb.RestoreRequest(snapshot_json=file, force=True))
    assert (answer.written, list(answer.skipped)) == (2, [])
    stored = await admin.store.get("Model", "m")
    assert stored is not None
    assert (stored.generation, stored.manifest["spec"]["priority"]) == (3, 7)
    await until(admin.view, lambda view: "chat" in view.routes)


async def test_the_last_keys_of_a_site_go_only_by_force(admin: Admin) -> None:
    keys = ["0" * 64]
    answer = await admin.apply(tenant("t", key_hashes=keys), tenant("u"))
    assert "from now on every request needs" in answer.changes[0].notes[0]
    assert not answer.changes[1].notes
    for change in (admin.apply(tenant("t")), admin.stub.Delete(pb.DeleteRequest(kind="Tenant", name="t"))):
        with pytest.raises(grpc.aio.AioRpcError, match=r"Tenant/t has the last API keys.*passes without a key") as refused:
            await change
        assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    await admin.apply(tenant("t"), tenant("u", key_hashes=keys))
    await admin.stub.Delete(pb.DeleteRequest(kind="Tenant", name="u", force=True))
    await until(admin.view, lambda view: view.revision == 3 and not view.needs_key)


@pytest.mark.parametrize(
    ("documents", "message"),
    [
        ([route("chat", "m", canary={"model": "bad", "percent": 100})], "`bad`: it is in no pool"),
        ([route("chat", "m", rules=[{"model": "bad", "min_prompt_tokens": 1}])], "`bad`: it is in no pool"),
        ([model("m", replicas=0)], "Route/chat .*`m` would have no replicas; raise its replicas"),
        ([pool("q"), model("m", pools=["q"])], "Route/chat .*`m` would find no room in pool q"),
    ],
)
async def test_rule_8_no_change_leaves_a_route_that_answers_without_a_ready_target(
    admin: Admin, documents: list, message: str
) -> None:
    """Rule 8, judged by what a change does, whichever object it changes; a plan refuses what the apply does."""
    await admin.apply(pool("p"), model("m"), model("bad"), route("chat", "m"))
    await admin.observe(group("m"))
    for call in (admin.stub.Plan, admin.stub.Apply):
        with pytest.raises(grpc.aio.AioRpcError, match=message) as refused:
            await call(pb.ApplyRequest(objects=[obj(item) for item in documents]))
        assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert "--force" in (refused.value.details() or "")
    await admin.stub.Plan(pb.ApplyRequest(objects=[obj(item) for item in documents], force=True))
    await admin.apply(*documents, force=True)


async def test_rule_8_ranks_are_cordoned_when_their_models_find_another_place(admin: Admin) -> None:
    await admin.apply(pool("p"), pool("q"), model("m"), route("chat", "m"))
    await admin.observe(group("m"), ledger=(("m", "weights", 2**30),))
    with pytest.raises(grpc.aio.AioRpcError, match=r"`m` is on rank 0 of pool `p`, and finds no room elsewhere"):
        await admin.apply(pool("p", cordoned=[0, 1]))
    await admin.apply(pool("p", cordoned=[0]))  # it moves to rank 1
    await admin.apply(pool("p"))
    second = PoolRecord("q", "127.0.0.1:2", "i", "n", 1, "cpu", 1, 1, 0.0, ranks=(RankRecord(0, "n", 1, "cpu", 2**31),))
    await admin.store.redis.set(admin.store.keys.pool("q"), msgspec.json.encode(second))
    await admin.store.redis.sadd(admin.store.keys.pools, "q")
    with pytest.raises(grpc.aio.AioRpcError, match=r"`m` is on rank 0 of pool `p`"):
        await admin.apply(pool("p", cordoned=[0, 1]), pool("q", cordoned=[0]))
    await admin.apply(pool("p", cordoned=[0, 1]))
    # Once it was forced, it refuses nothing else.
    await admin.apply(pool("q", cordoned=[0]), force=True)
    await admin.apply(model("m", priority=3))


async def test_rule_8_a_pool_in_use_is_not_deleted_for_an_empty_one_that_has_no_room(admin: Admin) -> None:
    """Rule 8: what the second pool can hold counts, not that it exists."""
    await admin.apply(pool("p"), pool("q"), model("m"), route("chat", "m"))
    await admin.observe(group("m"), ledger=(("m", "weights", 2**30),))
    with pytest.raises(grpc.aio.AioRpcError, match=r"Route/chat .*`m` would find no room in pool q"):
        await admin.stub.Delete(pb.DeleteRequest(kind="Pool", name="p"))
    second = PoolRecord("q", "127.0.0.1:2", "i", "n", 1, "cpu", 1, 1, 0.0, ranks=(RankRecord(0, "n", 1, "cpu", 2**31),))
    await admin.store.redis.set(admin.store.keys.pool("q"), msgspec.json.encode(second))
    await admin.store.redis.sadd(admin.store.keys.pools, "q")
    await admin.stub.Delete(pb.DeleteRequest(kind="Pool", name="p"))
