"""rule 3: memory is reserved before it is used, a failed load leaves nothing behind, and what is held is what was committed."""

from __future__ import annotations

import pytest
from shard_runner import BLOCK_TOKENS, Runner, answer, load

from gateway.api.errors import YardError
from workers.memory.arena import HOST_PAGE_BYTES, HostArena
from workers.messages import NewSequence, Sampling, SequenceStep, Step

PROMPT = [5, 9, 77, 3]


def test_held_bytes_are_what_the_arena_committed(checkpoints, cache) -> None:
    """rule 3"""
    arena = HostArena(2**28)
    shard = load(checkpoints("llama"), cache, arena, floor_blocks=8)
    held = shard.held()
    assert sum(held.bytes.values()) == arena.committed_bytes > 0
    assert set(held.bytes) == {"weights", "kv", "workspace"}
    assert all(size % HOST_PAGE_BYTES == 0 for size in held.bytes.values())
    assert (held.kv_blocks, held.kv_block_tokens, held.precision, held.context) == (8, BLOCK_TOKENS, "fp32", 256)
    assert len(held.digest) == 64
    assert held.disk_bytes > 100_000
    shard.close()
    assert (arena.committed_bytes, arena.regions()) == (0, {})


@pytest.mark.parametrize("kind", ["weights", "workspace"])
def test_a_budget_that_does_not_suffice_fails_the_load_and_leaves_nothing(kind: str, checkpoints, cache) -> None:
    """rule 3"""
    arena = HostArena(2**28)
    with pytest.raises(MemoryError, match=f"{kind}.*budget is 1000"):
        load(checkpoints("llama"), cache, arena, budget={kind: 1000})
    assert (arena.committed_bytes, arena.regions()) == (0, {})
    load(checkpoints("llama"), cache, arena).close()  # the names are free again


def test_an_arena_that_is_full_fails_the_load_and_leaves_nothing(checkpoints, cache) -> None:
    """rule 3"""
    arena = HostArena(3 * HOST_PAGE_BYTES)
    with pytest.raises(MemoryError, match="are free"):
        load(checkpoints("llama"), cache, arena, floor_blocks=200)
    assert (arena.committed_bytes, arena.regions()) == (0, {})


def test_an_interrupted_load_leaves_nothing(checkpoints, cache) -> None:
    """rule 3"""
    arena = HostArena(2**28)

    def interrupt(fraction: float, what: str) -> None:
        if fraction > 0.7:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        load(checkpoints("llama"), cache, arena, progress=interrupt)
    assert (arena.committed_bytes, arena.regions()) == (0, {})


def test_kv_grows_and_gives_back_without_touching_what_stays(checkpoints, cache) -> None:
    arena = HostArena(2**28)
    shard = load(checkpoints("llama"), cache, arena, floor_blocks=64)
    wanted = [one.token for one in answer(shard, PROMPT, 30)]
    small = arena.committed_bytes
    runner = Runner(shard, scatter=False)
    sequence = runner.add(PROMPT, 30)
    for _ in range(10):
        runner.step()
    shard.grow_kv(256)
    assert arena.committed_bytes > small
    for _ in range(10):
        runner.step()
    shard.grow_kv(4)  # the sequence has the first ones
    assert arena.committed_bytes == small  # one page each
    assert shard.held().kv_blocks == 4
    assert runner.finish()[sequence] == wanted


def test_kv_beyond_the_ceiling_or_the_arena_changes_nothing(checkpoints, cache) -> None:
    arena = HostArena(2**28)
    shard = load(checkpoints("llama"), cache, arena, floor_blocks=8)
    before = shard.held()
    with pytest.raises(MemoryError, match="257 blocks asked, 256 reserved"):
        shard.grow_kv(257)
    arena.capacity_bytes = arena.committed_bytes
    with pytest.raises(MemoryError, match="are free"):
        shard.grow_kv(256)
    assert shard.held() == before
    assert len(answer(shard, PROMPT, 3)) == 3


def step_of(*parts: SequenceStep, released: tuple[int, ...] = ()) -> Step:
    return Step(1, 1, parts, released)


@pytest.mark.parametrize(
    ("part", "message"),
    [
        (SequenceStep(7, (1,), 0, (0,), True), "sequence 7 is not known"),
        (SequenceStep(7, (1,), 0, (64,), True, NewSequence(Sampling())), "block 64 of 64"),
        (SequenceStep(7, tuple(range(17)), 0, (0,), True, NewSequence(Sampling())), "too few for positions up to 16"),
        (SequenceStep(7, (), 0, (0,), True, NewSequence(Sampling())), "no last sample"),
    ],
)
def test_a_step_that_contradicts_the_shard_is_refused_and_the_next_one_works(part, message, checkpoints, cache) -> None:
    shard = load(checkpoints("llama"), cache)
    with pytest.raises(ValueError, match=message):
        shard.step(step_of(part))
    assert len(answer(shard, PROMPT, 3)) == 3


def test_released_sequences_are_forgotten_also_without_another_step(checkpoints, cache) -> None:
    shard = load(checkpoints("llama"), cache)
    shard.step(step_of(SequenceStep(1, tuple(PROMPT), 0, (0,), True, NewSequence(Sampling()))))
    done = shard.step(step_of(released=(1,)))
    assert done is not None
    assert done.sampled == ()
    with pytest.raises(ValueError, match="sequence 1 is not known"):
        shard.step(step_of(SequenceStep(1, (), 4, (), True)))


def test_a_preempted_sequence_computes_again_and_goes_on(checkpoints, cache) -> None:
    shard = load(checkpoints("llama"), cache)
    sampling = Sampling(temperature=0.9, seed=11, frequency_penalty=0.4)
    wanted = [one.token for one in answer(shard, PROMPT, 20, sampling)]
    shard.step(step_of(SequenceStep(1, tuple(PROMPT), 0, (5,), True, NewSequence(sampling))))
    generated = tuple(wanted[:9])
    again = NewSequence(sampling, generated)
    done = shard.step(step_of(SequenceStep(1, (*PROMPT, *generated), 0, (9, 3), True, again)))
    assert done is not None
    tokens = [done.sampled[0].token]
    for position in range(len(PROMPT) + 9, len(PROMPT) + 19):
        done = shard.step(step_of(SequenceStep(1, (), position, (), True)))
        assert done is not None
        tokens.append(done.sampled[0].token)
    assert tokens == wanted[9:]


def test_a_step_that_only_fills_samples_nothing(checkpoints, cache) -> None:
    shard = load(checkpoints("llama"), cache, precision="int4")
    done = shard.step(step_of(SequenceStep(1, tuple(PROMPT), 0, (0,), False, NewSequence(Sampling()))))
    assert done is not None
    assert (done.sampled, done.error) == ((), "")


def test_a_precision_this_engine_does_not_have_is_refused(checkpoints, cache) -> None:
    with pytest.raises(YardError, match="precision fp8 is not one of the torch engine's on CPU: fp32, bf16, int8, int4"):
        load(checkpoints("llama"), cache, precision="fp8")


def test_a_checkpoint_that_lacks_a_tensor_is_named(checkpoints, cache, tmp_path) -> None:
    from safetensors.torch import load_file, save_file

    for file in checkpoints("llama").iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.1.self_attn.v_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    arena = HostArena(2**28)
    with pytest.raises(YardError, match=r"has no tensor model\.layers\.1\.self_attn\.v_proj\.weight"):
        load(tmp_path, cache, arena)
    assert (arena.committed_bytes, arena.regions()) == (0, {})
