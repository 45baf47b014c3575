"""Each kernel computes what its plain reference does. On a GPU; and anywhere, slowly, by Triton's interpreter:

TRITON_INTERPRET=1 python -m pytest tests/gpu/test_engine_kernels.py
"""

from __future__ import annotations

import pytest
import torch

from workers.engines.torch.cuda import ops
from workers.engines.torch.cuda.kv import LayerKv
from workers.engines.torch.noise import keys

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
RUNS = torch.cuda.is_available() or ops._INTERPRETED

pytestmark = [] if ops._INTERPRETED else [pytest.mark.gpu]
pytestmark.append(pytest.mark.skipif(not RUNS or ops._kernels is None, reason="neither a GPU nor Triton's interpreter"))

DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def random(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, device=DEVICE).to(dtype)


def assert_close(found: torch.Tensor, wanted: torch.Tensor, tolerance: float = 2e-2) -> None:
    assert found.dtype == wanted.dtype
    scale = max(1.0, float(wanted.float().abs().max()))
    assert float((found.float() - wanted.float()).abs().max()) <= tolerance * scale


def tolerance(dtype: torch.dtype) -> float:
    return 1e-4 if dtype == torch.float32 else 2e-2


@pytest.mark.parametrize("dtype", DTYPES)
def test_norms(dtype: torch.dtype) -> None:
    x, weight, residual = random(5, 96, dtype=dtype), random(96, dtype=dtype), random(5, 96, dtype=dtype)
    assert_close(ops.rms_norm(x, weight, 1e-5), ops._plain_norm(x, weight, 1e-5), tolerance(dtype))
    wanted = residual + x
    found = ops.add_rms_norm(x, residual, weight, 1e-5)
    assert_close(residual, wanted, tolerance(dtype))
    assert_close(found, ops._plain_norm(wanted, weight, 1e-5), tolerance(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_activation(dtype: torch.dtype) -> None:
    both = random(3, 140, dtype=dtype)
    wanted = torch.nn.functional.silu(both[:, :70]) * both[:, 70:]
    assert_close(ops.silu_mul(both), wanted, tolerance(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 2), (8, 8), (3, 1)])
@pytest.mark.parametrize("norms", [False, True])
def test_rotation_and_cache(dtype: torch.dtype, heads: int, kv_heads: int, norms: bool) -> None:
    """Another layer's cache, and blocks nobody was given, stay as they are."""
    caches = []
    for _ in range(2):
        both = torch.zeros((9, 3, 2, kv_heads, 4, 32), dtype=dtype, device=DEVICE)
        caches.append((both, LayerKv(both[:, 1, 0], both[:, 1, 1], both.stride(2))))
    qkv = random(6, heads + 2 * kv_heads, 32, dtype=dtype)
    positions = torch.tensor([0, 5, 6, 7, 33, 2], dtype=torch.int32, device=DEVICE)
    blocks = torch.tensor([8, 1, 1, 1, -1, 0], dtype=torch.int32, device=DEVICE)
    frequencies = 10000.0 ** -(torch.arange(16, device=DEVICE) / 16)
    weights = (random(32, dtype=dtype), random(32, dtype=dtype), 1e-5) if norms else ()
    rotation = ops.Rotation(frequencies, 1.1, *weights)
    wanted = ops._plain_rotate_append(qkv.clone(), heads, positions, blocks, rotation, caches[0][1])
    found = ops.rotate_append(qkv, heads, positions, blocks, rotation, caches[1][1])
    assert_close(found, wanted, tolerance(dtype))
    assert float(caches[0][0][:, 1].abs().sum()) > 0
    assert_close(caches[1][0], caches[0][0], tolerance(dtype))


def test_appending_alone() -> None:
    caches = []
    for _ in range(2):
        both = torch.zeros((9, 3, 2, 2, 4, 32), device=DEVICE)
        caches.append((both, LayerKv(both[:, 2, 0], both[:, 2, 1], both.stride(2))))
    k, v = random(3, 2, 32), random(3, 2, 32)
    positions = torch.tensor([7, 0, 3], dtype=torch.int32, device=DEVICE)
    blocks = torch.tensor([4, -1, 8], dtype=torch.int32, device=DEVICE)
    ops.append(k, v, positions, blocks, caches[0][1])
    caches[1][1].write(positions, blocks, k, v)
    assert torch.equal(caches[0][0], caches[1][0])


def weights_of(kind: str, n: int, k: int, dtype: torch.dtype, bias: bool) -> ops.Weight:
    matrix = random(n, k)
    added = random(n, dtype=dtype) if bias else None
    if kind == "dense":
        return ops.Weight(matrix.to(dtype), None, added)
    largest, stored = (127.0, torch.int8) if kind == "int8" else (448.0, torch.float8_e4m3fn)
    scales = matrix.abs().amax(1) / largest
    codes = matrix / scales.unsqueeze(1)
    return ops.Weight((codes.round() if kind == "int8" else codes).to(stored), scales, added)


@pytest.mark.parametrize("kind", ["dense", "int8", "fp8"])
@pytest.mark.parametrize(("n", "k"), [(40, 96), (33, 200)])
@pytest.mark.parametrize("bias", [False, True])
def test_products_of_few_rows(kind: str, n: int, k: int, bias: bool) -> None:
    if ops._INTERPRETED and kind == "fp8":
        pytest.skip("the interpreter has no fp8")
    dtype = torch.float32 if ops._INTERPRETED else torch.bfloat16  # its bf16 products are wrong
    weight = weights_of(kind, n, k, dtype, bias)
    one, some = random(1, k, dtype=dtype), random(11, k, dtype=dtype)
    wide = weight.widened(torch.float32)
    added = 0.0 if weight.bias is None else weight.bias.float()
    assert_close(ops.vector_linear(one, weight), (one.float() @ wide.T + added).to(dtype))
    tile = ops.Tile(16, 64, 2)
    assert_close(ops.narrow_linear(some, weight, tile), (some.float() @ wide.T + added).to(dtype))
    if not bias:
        for parts in (1, 2, 4):
            found = ops.narrow_parts(some, weight, tile, parts)
            assert found.shape == (parts, 11, n)
            assert_close(found.sum(0), some.float() @ wide.T)
            residual = random(11, n, dtype=dtype)
            whole = residual + (some.float() @ wide.T).to(dtype)
            norm = random(n, dtype=dtype)
            assert_close(ops.add_rms_norm(found, residual, norm, 1e-5), ops._plain_norm(whole, norm, 1e-5), 3e-2)
            assert_close(residual, whole)


def test_newest_tokens() -> None:
    newest = torch.arange(10, dtype=torch.int32, device=DEVICE) * 7
    ids = torch.tensor([3, -1, -1], dtype=torch.int32, device=DEVICE)
    places = torch.tensor([1, 2, 5], dtype=torch.int32, device=DEVICE)
    assert ops.known_ids(ids, places, newest).tolist() == [3, 14, 35]
    logits = random(3, 20000)
    logits[1, [5, 9000, 19999]] = 9.0
    tokens = ops.largest(logits, places, newest)
    assert tokens.tolist() == [int(logits[0].argmax()), 5, int(logits[2].argmax())]
    assert newest[places.long()].tolist() == tokens.tolist()


def filters(count: int, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> ops.Filters:
    def row(value: float, dtype: torch.dtype) -> torch.Tensor:
        return torch.full((count,), value, dtype=dtype, device=DEVICE)

    return ops.Filters(
        row(temperature, torch.float32), row(top_k, torch.int32), row(top_p, torch.float32), row(min_p, torch.float32)
    )


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.3},
        {"top_k": 1},
        {"top_k": 7, "temperature": 2.0},
        {"top_p": 0.6},
        {"top_p": 0.001},
        {"min_p": 0.2},
        {"top_k": 20, "top_p": 0.8, "min_p": 0.05, "temperature": 1.3},
    ],
)
def test_draws(options: dict[str, float]) -> None:
    """The same noise gives the same tokens as sorting does."""
    vocabulary, count = 300, 16 if ops._INTERPRETED else 256
    logits = random(3, vocabulary) * 3
    rows = torch.arange(count, device=DEVICE) % 3
    low, high = (torch.tensor(part, device=DEVICE) for part in zip(*(keys(seed, 5) for seed in range(count)), strict=True))
    chosen = filters(count, **options)  # type: ignore[arg-type]
    wanted = ops._plain_draw(logits[rows], chosen, low, high)
    found = ops.draw(logits, rows, chosen, low, high, 88.0, 32)
    assert (found == wanted).float().mean() > 0.98, "a token on the edge of a filter may fall to either side"
