"""What `yard up` does on a site that ops have worked on since the first one."""

from __future__ import annotations

from pathlib import Path

import pytest

from gateway.api.errors import YardError
from gateway.api.manifest import read_text
from gateway.api.proto import admin_pb2 as pb
from gateway.site import desired
from gateway.site.home import Home
from gateway.site.processes import Mark
from gateway.site.site_files import DEFAULT_SITE, read_site
from gateway.site.state import SiteState
from gateway.site.up import refuse_other_ports

FILE = """
apiVersion: modelyard/v1
kind: Model
metadata: {name: NAME}
spec: {source: x}
"""


class Store:
    """Answers as the admin service of a site does."""

    def __init__(self) -> None:
        self.revision = 0
        self.objects: dict[str, pb.Object] = {}

    def get(self) -> pb.GetResponse:
        return pb.GetResponse(objects=self.objects.values(), revision=self.revision)

    def apply(self, objects: list[pb.Object]) -> pb.ApplyResponse:
        self.revision += 1
        self.objects |= {item.name: item for item in objects}
        return pb.ApplyResponse(revision=self.revision)


def test_what_ops_deleted_stays_deleted_until_its_file_changes(tmp_path: Path) -> None:
    store, home = Store(), Home(tmp_path)
    files = [read_text(FILE.replace("NAME", name), "site")[0] for name in ("m", "n")]
    assert desired.reconcile(store, home, files).written == ("Model m", "Model n")  # type: ignore[arg-type]
    del store.objects["n"]
    for _ in range(2):
        again = desired.reconcile(store, home, files)  # type: ignore[arg-type]
        assert (again.written, again.kept, again.deleted) == ((), (), ("Model n",))
    files[1] = read_text(FILE.replace("NAME", "n").replace("x}", "y}"), "site")[0]
    assert desired.reconcile(store, home, files).written == ("Model n",)  # type: ignore[arg-type]
    assert desired.reconcile(Store(), home, files).written == ("Model m", "Model n"), "a new store gets all"  # type: ignore[arg-type]


def test_what_is_deleted_is_not_waited_for() -> None:
    site = read_site(DEFAULT_SITE, {}, None).without(["Model smollm2", "Route chat"])
    assert "smollm2" not in site.replicas()
    assert site.default_route != "chat"


@pytest.mark.parametrize(
    ("given", "refused"),
    [
        ({}, False),
        ({"grpc_port": 0}, False),
        ({"grpc_port": 7001}, False),
        ({"grpc_port": 7002}, True),
        ({"http_port": 8000}, True),
    ],
)
def test_only_ports_of_the_command_line_are_asked_for(given: dict[str, int], refused: bool) -> None:
    running = SiteState(
        site="local", site_dir="d", phase="running", boot_id="b", owner=Mark(1, 1.0),
        grpc_port=7001, http_port=7003, dashboard_port=7004
    )  # fmt: skip
    site = read_site(DEFAULT_SITE, given, None)
    if refused:
        with pytest.raises(YardError, match="on ports 7001, 7003, 7004"):
            refuse_other_ports(running, site)
    else:
        refuse_other_ports(running, site)
