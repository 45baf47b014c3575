"""Imports run one way (the layout in ARCHITECTURE.md): what may import what, held for every module of the tree."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SITE_BINDINGS = {"gateway.apps"}  # where the Serve applications are bound
# Packages that do I/O, keep time or talk to others: decisions must not.
IMPURE = {
    "ray",
    "redis",
    "grpc",
    "time",
    "datetime",
    "asyncio",
    "threading",
    "socket",
    "subprocess",
    "random",
    "os",
    "pathlib",
    "torch",
}


def modules(*packages: str) -> list[tuple[str, Path]]:
    found = []
    for package in packages:
        for path in sorted((ROOT / package).rglob("*.py")):
            name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
            if not name.endswith(("_pb2", "_pb2_grpc")):
                found.append((name, path))
    return found


def imports(path: Path) -> set[str]:
    """Absolute names of everything a module imports, wherever in it."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative imports hide where a name comes from"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def within(name: str, *packages: str) -> bool:
    return any(name == package or name.startswith(package + ".") for package in packages)


def case(found: list[tuple[str, Path]]) -> list:
    return [pytest.param(path, id=name) for name, path in found]


@pytest.mark.parametrize("path", case(modules("placement")))
def test_placement_imports_nothing_of_the_rest_and_does_no_io(path: Path) -> None:
    """rule 2: decisions are pure functions over a snapshot."""
    for name in imports(path):
        assert not within(name, "gateway", "workers", "ops"), f"{path} imports {name}"
        assert name.split(".")[0] not in IMPURE, f"{path} imports {name}"


def says_that_it_is_pure(path: Path) -> bool:
    return re.search(r"\bPure\b", ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "") is not None


@pytest.mark.parametrize("path", case([found for found in modules("gateway", "workers") if says_that_it_is_pure(found[1])]))
def test_what_says_that_it_is_pure_does_no_io(path: Path) -> None:
    """rule 2, of the decisions of drivers, gateways and the controller."""
    for name in imports(path):
        assert name.split(".")[0] not in IMPURE, f"{path} imports {name}"


@pytest.mark.parametrize("path", case(modules("gateway/api")))
def test_the_api_imports_at_most_placement(path: Path) -> None:
    for name in imports(path):
        assert not within(name, "workers"), f"{path} imports {name}"
        assert within(name, "gateway.api") or not within(name, "gateway"), f"{path} imports {name}"


@pytest.mark.parametrize("path", case(modules("workers")))
def test_workers_import_only_the_api_and_placement(path: Path) -> None:
    for name in imports(path):
        assert within(name, "gateway.api") or not within(name, "gateway"), f"{path} imports {name}"


@pytest.mark.parametrize("path", case([found for found in modules("gateway") if found[0] not in SITE_BINDINGS]))
def test_the_gateway_never_imports_workers(path: Path) -> None:
    for name in imports(path):
        assert not within(name, "workers"), f"{path} imports {name}"


@pytest.mark.parametrize("path", case(modules("gateway", "workers", "placement")))
def test_nothing_unpickles(path: Path) -> None:
    """rule 15: nothing unpickles what came from a socket; no module of ours imports a pickle at all."""
    for name in imports(path):
        assert name.split(".")[0] not in {"pickle", "cloudpickle", "dill", "shelve", "marshal"}, f"{path} imports {name}"


def test_every_package_is_found() -> None:
    """The tests above hold nothing if they look at nothing."""
    assert {"placement.packing", "placement.types"} <= {name for name, _ in modules("placement")}
    assert len(modules("gateway")) > 20
    assert len(modules("workers")) > 10
    assert sum(says_that_it_is_pure(path) for _, path in modules("gateway", "workers")) > 30
