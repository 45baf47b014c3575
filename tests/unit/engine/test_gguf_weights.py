"""GGUF weights: converted once, 4-bit matrices bit for bit, and read as transformers reads them."""

from __future__ import annotations

import errno
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from gguf.quants import dequantize
from gguf_checkpoints import ARCHITECTURES, greedy_with_stored_values, write_gguf
from shard_runner import Runner, answer, load

from gateway.api.checkpoint import open_checkpoint
from gateway.api.checkpoint.seal import seal_of
from gateway.api.errors import ErrorCode, YardError
from workers.engines.torch.gguf_convert import converted
from workers.engines.torch.weights import SafetensorsSource

PROMPTS = [[5, 9, 77, 3], [11] * 21 + [30]]


@pytest.fixture(scope="module")
def files(tmp_path_factory, checkpoints):
    made: dict[tuple[str, Kind], Path] = {}

    def get(family: str, kind: Kind) -> Path:
        if (family, kind) not in made:
            path = tmp_path_factory.mktemp("gguf") / f"{family}-{kind.name}.gguf"
            made[family, kind] = write_gguf(family, checkpoints(family), path, kind)
        return made[family, kind]

    return get


@pytest.mark.parametrize(
    ("family", "kind"),
    [("llama", Kind.Q4_0), ("llama", Kind.Q4_1), ("llama", Kind.F16), *((family, Kind.Q8_0) for family in ARCHITECTURES)],
    ids=lambda value: getattr(value, "name", value),
)
def test_same_greedy_tokens_as_transformers_with_the_stored_values(family: str, kind: Kind, files, checkpoints, cache) -> None:
    path = files(family, kind)
    runner = Runner(load(path, cache, precision="fp32"))
    for prompt in PROMPTS:
        runner.add(prompt, 12)
    assert list(runner.finish().values()) == [
        greedy_with_stored_values(family, checkpoints(family), kind, prompt, 12) for prompt in PROMPTS
    ]


def source_of(path: Path, cache: Path) -> SafetensorsSource:
    checkpoint = open_checkpoint(str(path), cache)
    shape = checkpoint.shape
    file = converted(checkpoint.files, checkpoint.digest, shape.heads, shape.kv_heads, cache, lambda *_: None)
    return SafetensorsSource((file,), rows_are_outputs=True)


@pytest.mark.parametrize("kind", [Kind.Q4_0, Kind.Q4_1], ids=lambda kind: kind.name)
def test_four_bit_matrices_keep_every_value(kind: Kind, files, cache) -> None:
    path = files("llama", kind)
    blocks = source_of(path, cache).int4("model.layers.1.mlp.down_proj.weight")
    assert blocks is not None
    stored = next(t for t in gguf.GGUFReader(path).tensors if t.name == "blk.1.ffn_down.weight")
    wanted = dequantize(stored.data, stored.tensor_type)
    np.testing.assert_allclose(blocks.widen(torch.float32).numpy(), wanted, rtol=1e-3, atol=1e-4)


def test_a_four_bit_file_computes_in_four_bits_by_default(files, cache) -> None:
    path = files("llama", Kind.Q4_1)
    held = load(path, cache).held()
    assert held.precision == "int4"
    assert held.bytes["weights"] <= load(path, cache, precision="bf16").held().bytes["weights"]


def test_converting_happens_once_and_says_how_far_it_is(files, tmp_path) -> None:
    path = files("llama", Kind.Q4_1)
    seen: list[tuple[float, str]] = []
    first = answer(load(path, tmp_path, progress=lambda fraction, what, note="": seen.append((fraction, what))), PROMPTS[0], 4)
    fractions = [fraction for fraction, _ in seen]
    assert fractions == sorted(fractions)
    assert (fractions[0], fractions[-1]) == (0.0, 1.0)
    assert any("converting" in what for _, what in seen)
    seen.clear()
    again = answer(load(path, tmp_path, progress=lambda fraction, what, note="": seen.append((fraction, what))), PROMPTS[0], 4)
    assert not any("converting" in what for _, what in seen)
    assert [one.token for one in first] == [one.token for one in again]


def test_one_converts_when_several_ask_at_once(files, tmp_path) -> None:
    checkpoint = open_checkpoint(str(files("llama", Kind.Q4_0)), tmp_path)
    shape = checkpoint.shape
    ends: list[float] = []

    def convert(_: int) -> Path:
        def progress(fraction: float, what: str, note: str = "") -> None:
            if fraction == 1.0:
                ends.append(fraction)

        return converted(checkpoint.files, checkpoint.digest, shape.heads, shape.kv_heads, tmp_path, progress)

    with ThreadPoolExecutor(4) as pool:
        paths = set(pool.map(convert, range(4)))
    assert len(paths) == 1
    assert len(ends) == 1


def test_an_interrupted_conversion_leaves_nothing_that_looks_whole(files, tmp_path) -> None:
    path = files("llama", Kind.Q4_0)

    def interrupt(fraction: float, what: str, note: str = "") -> None:
        if "converting" in what and fraction > 0.2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        load(path, tmp_path, progress=interrupt)
    assert not list((tmp_path / "weights").glob("*.safetensors"))
    assert not list((tmp_path / "weights").glob("*.partial"))


class Conversion:
    """Converts one file into one cache, and keeps what it was told meanwhile."""

    def __init__(self, path: Path, cache: Path) -> None:
        self.cache = cache
        self.checkpoint = open_checkpoint(str(path), cache)
        self.notes: list[str] = []

    def run(self) -> Path:
        shape = self.checkpoint.shape
        return converted(
            self.checkpoint.files,
            self.checkpoint.digest,
            shape.heads,
            shape.kv_heads,
            self.cache,
            lambda _f, _w, note="": self.note(note),
        )

    def note(self, note: str) -> None:
        if note:
            self.notes.append(note)


def flipped(content: bytes, at: int) -> bytes:
    return content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]


def test_a_damaged_file_is_converted_again_and_said_once(files, tmp_path, caplog) -> None:
    one = Conversion(files("llama", Kind.Q4_0), tmp_path)
    whole = one.run()
    content = whole.read_bytes()
    name_at = content.index(b"embed_tokens")
    middle = len(content) // 2
    garbage = os.urandom(len(content))
    for damaged in (content[:-1], content[:100], b"", garbage, flipped(content, name_at), flipped(content, middle)):
        whole.write_bytes(damaged)
        with ThreadPoolExecutor(3) as ranks:
            assert len({ranks.submit(one.run).result() for _ in range(3)}) == 1
        assert whole.read_bytes() == content
        assert len(one.notes) == 1, "each damage is said once, by the rank that mended it"
        assert f"{whole} was damaged" in one.notes.pop()
    assert "was damaged" in caplog.text
    seal_of(whole).write_text("{")
    one.run()
    assert "its seal cannot be read" in one.notes[0]


def test_a_copied_cache_is_compared_once_and_kept(files, tmp_path) -> None:
    one = Conversion(files("llama", Kind.Q4_0), tmp_path)
    whole = one.run()
    inode = whole.stat().st_ino
    os.utime(whole, ns=(1, 1))
    one.run()
    assert (whole.stat().st_ino, one.notes) == (inode, [])


def test_what_killed_processes_and_earlier_formats_left_goes(files, tmp_path) -> None:
    one = Conversion(files("llama", Kind.Q4_0), tmp_path)
    directory = tmp_path / "weights"
    directory.mkdir()
    for name in ("-2.99999.partial", "-1.safetensors"):
        (directory / f"{one.checkpoint.digest}{name}").write_bytes(b"left")
    whole = one.run()
    assert {path.name for path in directory.iterdir()} == {whole.name, seal_of(whole).name, f"{one.checkpoint.digest}.lock"}
    assert one.notes == []


def test_damage_without_a_source_names_the_source(files, tmp_path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(files("llama", Kind.Q4_0).read_bytes())
    one = Conversion(path, tmp_path)
    one.run().write_bytes(b"")
    path.unlink()
    with pytest.raises(YardError, match=rf"{path}: cannot be read: No such file or directory; put it back"):
        one.run()


def test_a_full_disk_says_what_is_needed_and_leaves_nothing(files, tmp_path, monkeypatch) -> None:
    one = Conversion(files("llama", Kind.Q4_0), tmp_path)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(YardError, match="No space left on device; make room, or set MODELYARD_HOME") as caught:
            one.run()
        assert caught.value.code is ErrorCode.EXHAUSTED
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=10))
        with pytest.raises(YardError, match=r"GiB are needed there, 0\.00 GiB are free; make room"):
            one.run()
    assert [path.suffix for path in (tmp_path / "weights").iterdir()] == [".lock"]
    assert one.run().exists()


def test_a_tensor_without_a_place_is_named(tmp_path, files, cache) -> None:
    path = tmp_path / "odd.gguf"
    data = files("llama", Kind.F16).read_bytes()
    assert data.count(b"blk.0.attn_q.weight") == 1
    path.write_bytes(data.replace(b"blk.0.attn_q.weight", b"blk.0.attn_x.weight"))
    with pytest.raises(YardError, match=r"blk\.0\.attn_x\.weight has no place"):
        load(path, cache)
