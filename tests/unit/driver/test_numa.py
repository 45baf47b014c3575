"""A rank beside its card, in a process of its own: what it binds stays bound."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from workers.rank.numa import node_of

BIND = """
import json, os, sys, threading
from pathlib import Path
from workers.rank.numa import stay_beside
go, cpus = threading.Event(), []
def ask():
    go.wait()
    cpus.append(sorted(os.sched_getaffinity(0)))
before = threading.Thread(target=ask)
before.start()
bound = sorted(stay_beside(1, Path(sys.argv[1])))
after = threading.Thread(target=ask)
after.start()
go.set()
before.join(), after.join()
print(json.dumps([bound, *cpus, sorted(os.sched_getaffinity(0))]))
"""


def bind(sys_dir: Path, cpulist: str) -> list[list[int]]:
    file = sys_dir / "devices/system/node/node1/cpulist"
    file.parent.mkdir(parents=True)
    file.write_text(cpulist + "\n")
    return json.loads(subprocess.run([sys.executable, "-c", BIND, str(sys_dir)], capture_output=True, check=True).stdout)


def test_all_threads_stay_on_the_cpus_of_the_cards_node(tmp_path: Path) -> None:
    mine = max(os.sched_getaffinity(0))
    assert bind(tmp_path, f"{mine},100000-100003") == [[mine]] * 4


@pytest.mark.parametrize("cpulist", ["100000-100003", "", "nonsense"])
def test_a_node_without_usable_cpus_changes_nothing(tmp_path: Path, cpulist: str) -> None:
    assert bind(tmp_path, cpulist) == [[], *[sorted(os.sched_getaffinity(0))] * 3]


def test_a_cards_node_is_the_kernels_answer(tmp_path: Path) -> None:
    card = tmp_path / "bus/pci/devices/0000:1b:00.0"
    card.mkdir(parents=True)
    (card / "numa_node").write_text("1\n")
    assert [node_of(address, tmp_path) for address in ("0000:1b:00.0", "0000:1c:00.0")] == [1, -1]
