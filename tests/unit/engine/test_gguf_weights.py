"""GGUF weights: converted once, 4-bit matrices bit for bit, and read as transformers reads them."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from gguf.quants import dequantize
from gguf_checkpoints import ARCHITECTURES, greedy_with_stored_values, write_gguf
from shard_runner import Runner, answer, load

from gateway.api.checkpoint import open_checkpoint
from gateway.api.errors import YardError
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
    file = converted(checkpoint.files, checkpoint.digest, shape.heads, shape.kv_heads, cache, lambda _f, _w: None)
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
    first = answer(load(path, tmp_path, progress=lambda fraction, what: seen.append((fraction, what))), PROMPTS[0], 4)
    fractions = [fraction for fraction, _ in seen]
    assert fractions == sorted(fractions)
    assert (fractions[0], fractions[-1]) == (0.0, 1.0)
    assert any("converting" in what for _, what in seen)
    seen.clear()
    again = answer(load(path, tmp_path, progress=lambda fraction, what: seen.append((fraction, what))), PROMPTS[0], 4)
    assert not any("converting" in what for _, what in seen)
    assert [one.token for one in first] == [one.token for one in again]


def test_one_converts_when_several_ask_at_once(files, tmp_path) -> None:
    checkpoint = open_checkpoint(str(files("llama", Kind.Q4_0)), tmp_path)
    shape = checkpoint.shape
    ends: list[float] = []

    def convert(_: int) -> Path:
        def progress(fraction: float, what: str) -> None:
            if fraction == 1.0:
                ends.append(fraction)

        return converted(checkpoint.files, checkpoint.digest, shape.heads, shape.kv_heads, tmp_path, progress)

    with ThreadPoolExecutor(4) as pool:
        paths = set(pool.map(convert, range(4)))
    assert len(paths) == 1
    assert len(ends) == 1


def test_an_interrupted_conversion_leaves_nothing_that_looks_whole(files, tmp_path) -> None:
    path = files("llama", Kind.Q4_0)

    def interrupt(fraction: float, what: str) -> None:
        if "converting" in what and fraction > 0.2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        load(path, tmp_path, progress=interrupt)
    assert not list((tmp_path / "weights").glob("*.safetensors"))
    assert not list((tmp_path / "weights").glob("*.partial"))


def test_a_cached_file_that_was_cut_is_made_again_and_what_killed_processes_left_goes(files, tmp_path) -> None:
    path = files("llama", Kind.Q4_0)
    checkpoint = open_checkpoint(str(path), tmp_path)
    arguments = (
        checkpoint.files,
        checkpoint.digest,
        checkpoint.shape.heads,
        checkpoint.shape.kv_heads,
        tmp_path,
        lambda _f, _w: None,
    )
    whole = converted(*arguments)
    content = whole.read_bytes()
    left = whole.with_suffix(".99999.partial")
    left.write_bytes(content[:1000])
    for damaged in (content[:-1], content[:100], b""):
        whole.write_bytes(damaged)
        assert converted(*arguments).read_bytes() == content
        assert not left.exists()


def test_a_tensor_without_a_place_is_named(tmp_path, files, cache) -> None:
    path = tmp_path / "odd.gguf"
    data = files("llama", Kind.F16).read_bytes()
    assert data.count(b"blk.0.attn_q.weight") == 1
    path.write_bytes(data.replace(b"blk.0.attn_q.weight", b"blk.0.attn_x.weight"))
    with pytest.raises(YardError, match=r"blk\.0\.attn_x\.weight has no place"):
        load(path, cache)
