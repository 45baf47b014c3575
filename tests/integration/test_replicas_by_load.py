"""Replicas by load on a whole site: more of a model while it has much to do, and less again, without a failed request."""

from __future__ import annotations

import threading
from collections import Counter
from pathlib import Path

import grpc
import pytest
import yaml
from house import House

from gateway.api.proto import inference_pb2 as pb
from gateway.api.records import GroupRecord, SiteStatus

pytestmark = pytest.mark.site

MODELS = Path(__file__).parents[2] / "configs" / "local" / "models.yaml"
MANY, FEW = 20, 2
"""One replica of `smollm2` computes 16 sequences at once."""


class Clients:
    def __init__(self, house: House, number: int) -> None:
        self.ends: Counter[str] = Counter()
        self._stop = threading.Event()
        self._house = house
        self._threads = [threading.Thread(target=self._ask, daemon=True) for _ in range(number)]

    def __enter__(self) -> Clients:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(60)

    def _ask(self) -> None:
        request = pb.GenerateRequest(model="smollm2", prompt="One, two,", max_tokens=16, ignore_eos=True)
        channel, stub = self._house.inference()
        with channel:
            while not self._stop.is_set():
                try:
                    answer = stub.Generate(request, timeout=60)
                except grpc.RpcError as error:
                    self.ends[error.code().name] += 1
                else:
                    self.ends["whole" if answer.usage.completion_tokens == 16 else "short"] += 1


def apply(house: House, file: Path) -> None:
    applied = house.yard("apply", "-f", str(file), server=True)
    assert applied.returncode == 0, applied.stderr


def replicas(status: SiteStatus) -> list[GroupRecord]:
    return [group for pool in status.pools for group in pool.groups if group.model == "smollm2"]


def states(status: SiteStatus) -> list[str]:
    return sorted(group.state for group in replicas(status))


@pytest.mark.timeout(240)
def test_a_second_replica_comes_with_the_load_and_goes_after_it(house: House, tmp_path: Path) -> None:
    house.wait_ready("smollm2")
    documents = list(yaml.safe_load_all(MODELS.read_text()))
    (model,) = [document for document in documents if document["metadata"]["name"] == "smollm2"]
    model["spec"]["scaling"] = {"min_replicas": 1, "max_replicas": 2, "up_after_s": 0.5, "down_after_s": 2.0}
    file = tmp_path / "scaled.yaml"
    file.write_text(yaml.safe_dump(model))
    apply(house, file)
    busy: set[tuple[int, ...]] = set()

    def both_work(status: SiteStatus) -> bool:
        busy.update(group.ranks for group in replicas(status) if group.running)
        return states(status) == ["ready", "ready"] and len(busy) == 2

    try:
        with Clients(house, FEW) as few:
            with Clients(house, MANY) as many:
                came_s = house.wait_until("two replicas on two ranks work", both_work, 90)
            went_s = house.wait_until("one is left", lambda status: states(status) == ["ready"], 60)
        ends = few.ends + many.ends
        print(f"on ranks {sorted(busy)}: the second after {came_s:.1f} s, gone {went_s:.1f} s after the load, {dict(ends)}")
        assert set(ends) == {"whole"}, ends
    finally:
        apply(house, MODELS)
        house.wait_until("one is left", lambda status: states(status) == ["ready"], 60)
