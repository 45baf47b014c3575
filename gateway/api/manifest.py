"""Reads the YAML that ops write, strictly (rule 14): every error carries file, line and column, and names the nearest known key.

A file may hold several documents; a directory stands for its `*.yaml` and `*.yml` files in name order. All errors of all
files are reported together, so that one run shows everything there is to mend.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from gateway.api.config import SPECS, Manifest, RouteSpec, Strict
from gateway.api.errors import invalid

_Path = tuple[str | int, ...]
_MAX_DEPTH = 32
_MAX_NODES = 50_000
"""Of one document, aliases written out. Site files have hundreds; a few nested aliases can mean billions."""


@dataclass(frozen=True, slots=True)
class Position:
    file: str
    line: int
    column: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}:{self.column}"


@dataclass(frozen=True, slots=True)
class Located:
    """A valid document, the plain data it was read from, and where it begins."""

    manifest: Manifest
    plain: dict[str, Any]
    where: Position

    @property
    def key(self) -> tuple[str, str]:
        return self.manifest.kind, self.manifest.name


def read(paths: Sequence[Path]) -> list[Located]:
    """Every document of the files and directories, in order. YardError(INVALID) lists all that is wrong, one a line."""
    found: list[Located] = []
    errors: list[str] = []
    for file in _files(paths, errors):
        try:
            text = file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            errors.append(f"{file}: cannot be read: {error}")
            continue
        found += _read_text(text, str(file), errors)
    return _finish(found, errors)


def read_text(text: str, name: str) -> list[Located]:
    """As `read`, for text that came from elsewhere; `name` stands for the file in messages."""
    errors: list[str] = []
    return _finish(_read_text(text, name, errors), errors)


def _finish(found: list[Located], errors: list[str]) -> list[Located]:
    errors += _collisions(found)
    if errors:
        raise invalid("\n".join(errors))
    return found


def _files(paths: Sequence[Path], errors: list[str]) -> Iterable[Path]:
    for path in paths:
        if path.is_dir():
            inside = sorted(file for file in path.iterdir() if file.suffix in (".yaml", ".yml") and file.is_file())
            if not inside:
                errors.append(f"{path}: holds no .yaml or .yml file")
            yield from inside
        elif path.exists():
            yield path
        else:
            errors.append(f"{path}: no such file or directory")


def _read_text(text: str, file: str, errors: list[str]) -> list[Located]:
    found: list[Located] = []
    loader: yaml.SafeLoader | None = None
    try:
        loader = yaml.SafeLoader(text)
        while loader.check_node():
            node = loader.get_node()
            if node is not None and not _is_empty(node):
                document = _read_document(loader, node, file, errors)
                if document is not None:
                    found.append(document)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{file}:{mark.line + 1}:{mark.column + 1}" if mark else file
        errors.append(f"{where}: not valid YAML: {error.problem or error.context}")
    except yaml.YAMLError as error:
        errors.append(f"{file}: not valid YAML: {' '.join(str(error).split())}")
    except RecursionError:
        errors.append(f"{file}: not valid YAML: nested too deeply")
    finally:
        if loader is not None:
            loader.dispose()
    return found


def _is_empty(node: yaml.Node) -> bool:
    return isinstance(node, yaml.ScalarNode) and node.tag == "tag:yaml.org,2002:null"


class _Reader:
    """Turns nodes into plain data and remembers where every key and value stood."""

    def __init__(self, loader: yaml.SafeLoader, file: str) -> None:
        self._loader = loader
        self._file = file
        self.marks: dict[_Path, Position] = {}
        self.errors: list[str] = []
        self._nodes = 0

    def plain(self, node: yaml.Node, path: _Path = ()) -> Any:
        self.marks.setdefault(path, self.position(node))
        if len(path) > _MAX_DEPTH:
            raise yaml.MarkedYAMLError(problem="nested too deeply", problem_mark=node.start_mark)
        self._nodes += 1
        if self._nodes > _MAX_NODES:
            problem = f"more than {_MAX_NODES} values with its aliases written out; write less of it as aliases, or split it"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark)
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, path)
        if isinstance(node, yaml.SequenceNode):
            return [self.plain(item, (*path, index)) for index, item in enumerate(node.value)]
        return self._scalar(node)

    def _scalar(self, node: yaml.Node) -> Any:
        try:
            return self._loader.construct_object(node)
        except (ValueError, ArithmeticError, TypeError, AttributeError, LookupError) as error:
            # As a date that no calendar has, or an integer of ten thousand digits.
            raise yaml.MarkedYAMLError(problem=f"a value that cannot be read ({error})", problem_mark=node.start_mark) from error

    def _mapping(self, node: yaml.MappingNode, path: _Path) -> dict[str, Any]:
        data: dict[str, Any] = {}
        for key_node, value_node in node.value:
            where = self.position(key_node)
            key = key_node.value if isinstance(key_node, yaml.ScalarNode) else None
            if not isinstance(key, str):
                self.errors.append(f"{where}: a key must be plain text")
                continue
            if key in data:
                first = self.marks[(*path, key)]
                self.errors.append(f"{where}: key {key!r} is here a second time; it was first on line {first.line}")
                continue
            self.marks[(*path, key)] = where
            data[key] = self.plain(value_node, (*path, key))
        return data

    def position(self, node: yaml.Node) -> Position:
        return Position(self._file, node.start_mark.line + 1, node.start_mark.column + 1)

    def nearest(self, path: _Path) -> tuple[_Path, Position]:
        """The longest known beginning of `path`, and where it stands."""
        while path not in self.marks:
            path = path[:-1]
        return path, self.marks[path]


def _read_document(loader: yaml.SafeLoader, node: yaml.Node, file: str, errors: list[str]) -> Located | None:
    reader = _Reader(loader, file)
    data = reader.plain(node)
    found = list(reader.errors)
    if not isinstance(data, dict):
        errors.append(f"{reader.position(node)}: a document must be a mapping with apiVersion, kind, metadata and spec")
        return None
    kind = data.get("kind")
    spec: Strict | None = None
    try:
        header = Manifest.model_validate({**data, "spec": None})
    except ValidationError as error:
        header = None
        found += _describe(error, (), Manifest, reader, kind if isinstance(kind, str) and kind in SPECS else "document")
    if isinstance(kind, str) and kind in SPECS:
        spec, problems = _read_spec(kind, data, reader)
        found += problems
    errors += found
    if found or header is None or spec is None:
        return None
    return Located(header.model_copy(update={"spec": spec}), data, reader.marks[()])


def _read_spec(kind: str, data: dict[str, Any], reader: _Reader) -> tuple[Strict | None, list[str]]:
    spec = data.get("spec", {})
    if not isinstance(spec, dict):
        return None, [f"{reader.nearest(('spec',))[1]}: spec must be a mapping"]
    metadata = data.get("metadata")
    name = metadata.get("name") if isinstance(metadata, dict) else None
    try:
        return SPECS[kind].model_validate(spec), []
    except ValidationError as error:
        return None, _describe(error, ("spec",), SPECS[kind], reader, f"{kind} {name}" if name else kind)


def _describe(error: ValidationError, prefix: _Path, model: type[BaseModel], reader: _Reader, subject: str) -> list[str]:
    """One line for each place that is wrong; the branches of a union that failed at one place are joined by `or`."""
    places: dict[_Path, list[str]] = {}
    for detail in error.errors(include_url=False):
        full = (*prefix, *detail["loc"])
        place = full if detail["type"] == "missing" else reader.nearest(full)[0]
        places.setdefault(place, []).append(_explain(detail, full, _fields_at(model, detail["loc"][:-1])))
    # A list whose only item is wrong also counts as too short: the item is the cause.
    places = {
        place: texts
        for place, texts in places.items()
        if not any(len(other) > len(place) > 1 and other[: len(place)] == place for other in places)
    }
    return [
        f"{reader.nearest(place)[1]}: {subject}: {_dotted(place)}{': ' if place else ''}{' or '.join(dict.fromkeys(texts))}"
        for place, texts in sorted(places.items(), key=lambda item: reader.nearest(item[0])[1].line)
    ]


def _explain(detail: ErrorDetails, full: _Path, fields: Sequence[str]) -> str:
    if detail["type"] == "extra_forbidden":
        return f"unknown key{_suggest(str(full[-1]), fields)}"
    if detail["type"] == "missing":
        return "is missing"
    message = detail["msg"].removeprefix("Value error, ").removesuffix(" after validation")
    message = message[:1].lower() + message[1:]
    given = detail["input"]
    if isinstance(given, str | int | float) and repr(given) not in message:
        message += f", not {given!r}"
    if detail["type"] == "literal_error" and isinstance(given, str):
        message += _suggest(given, _quoted(detail.get("ctx", {}).get("expected", "")))
    return message


def _dotted(path: _Path) -> str:
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def _quoted(expected: str) -> list[str]:
    return [piece for piece in expected.split("'") if piece.strip(" ,") not in ("", "or")]


def _suggest(word: str, known: Sequence[str]) -> str:
    nearest = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    if nearest:
        return f"; did you mean {nearest[0]!r}?"
    return f"; known are {', '.join(sorted(known))}" if len(known) > 1 else ""


def _fields_at(model: type[BaseModel], path: _Path) -> list[str]:
    """Names of the fields of the model that `path` leads to; empty where it leads to no model."""
    current: type[BaseModel] | None = model
    for part in path:
        if current is not None and isinstance(part, str) and part in current.model_fields:
            current = _model_in(current.model_fields[part].annotation)
    return list(current.model_fields) if current is not None else []


def _model_in(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((model for argument in get_args(annotation) if (model := _model_in(argument))), None)


def _collisions(found: Sequence[Located]) -> list[str]:
    """Names given twice, and route aliases that are already a name a client can ask for."""
    errors: list[str] = []
    seen: dict[tuple[str, str], Located] = {}
    for document in found:
        kind, name = document.key
        if document.key in seen:
            errors.append(f"{document.where}: {kind} {name!r} is here a second time; it was first at {seen[document.key].where}")
        seen.setdefault(document.key, document)
    public = {name: f"{kind} {name}" for kind, name in seen if kind in ("Route", "Model")}
    for document in seen.values():
        if not isinstance(document.manifest.spec, RouteSpec):
            continue
        for alias in document.manifest.spec.aliases:
            owner = f"Route {document.manifest.name}"
            if alias in public:
                errors.append(f"{document.where}: alias {alias!r} of {owner} is already the name of {public[alias]}")
            public.setdefault(alias, f"an alias of {owner}")
    return errors
