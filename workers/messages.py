"""The protocol between a pool driver and its rank workers.

One connection a rank (Unix socket, or TCP between nodes). Frames are a 4-byte big-endian length and a MessagePack map
(`encode`, `decode_command`, `decode_report`); nothing is ever unpickled (rule 15). Every rank of the pool gets the same
commands in the same order and executes them in that order, which is what keeps the collectives of different groups from
interleaving differently on different devices. A rank that a group does not use skips that group's commands.

Loading, the copy of a park and the copy of a wake are the exception: they run beside the steps (rule 7) and report when they
are done. What takes memory away or puts it back is done in order.
"""

from __future__ import annotations

import msgspec

PROTOCOL = 4


class Sampling(msgspec.Struct, frozen=True, array_like=True):
    """Resolved sampling parameters of one sequence; see SamplingParams in pool.proto."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int = 0
    logprobs: int = -1
    json_schema: str = ""  # that the answer must follow; "" = none. Ranks get it by Constrain


class NewSequence(msgspec.Struct, frozen=True, array_like=True):
    """What a rank must know of a sequence beyond its token ids. Sent with its first step (again after a preemption)."""

    sampling: Sampling
    # Tokens already generated before a preemption: seed offset and penalties count them.
    generated: tuple[int, ...] = ()
    # The whole prompt, only where repetition_penalty needs it.
    prompt: tuple[int, ...] = ()
    # Its answer follows the schema of the Constrain that came before.
    constrained: bool = False


class SequenceStep(msgspec.Struct, frozen=True, array_like=True):
    """One sequence's part of a step."""

    sequence: int
    # Input token ids at positions start..start+len-1. Empty: one token, the rank's own last sample (single stage only).
    tokens: tuple[int, ...]
    start: int
    # KV block ids appended to the sequence's block table before this step.
    new_blocks: tuple[int, ...]
    # True where these tokens end what is known so far, so that the next token is sampled.
    sample: bool
    new: NewSequence | None = None


# ------------------------------------------------------------------ driver to rank


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """Answers the rank's nonce, 32 characters that it sends before any frame."""

    secret: str  # HMAC-SHA256 of the nonce under the pool's secret, hex
    driver: str  # incarnation
    protocol: int = PROTOCOL


class LoadShard(msgspec.Struct, frozen=True, tag="load"):
    """Bring this rank's shard of a model into memory. Answered by Progress and one Done(bytes=...)."""

    op: int
    group_id: int  # Names this worker group in every later command; unique in the pool, never reused
    model: str
    spec_json: str
    ranks: tuple[int, ...]  # stage-major: ranks[stage * tensor_parallel + shard]
    tensor_parallel: int
    pipeline_parallel: int
    kv_block_tokens: int
    kv_floor_blocks: int  # mapped at load
    kv_ceiling_blocks: int  # address space
    # Bytes this rank may take, by kind. Taking more fails the load.
    budget: dict[str, int]


class UnloadShard(msgspec.Struct, frozen=True, tag="unload"):
    op: int
    group_id: int


class GrowKv(msgspec.Struct, frozen=True, tag="grow_kv"):
    """Map (or, with fewer, unmap) KV so that blocks 0..blocks-1 are usable. In order with the steps."""

    op: int
    group_id: int
    blocks: int


class ParkShard(msgspec.Struct, frozen=True, tag="park"):
    """Copy the weights to where they stand by, beside the steps; then, in order, give weights, KV and workspace back.

    Sent while the group has no step in flight and no sequence (rule 5). An error leaves everything in place.
    """

    op: int
    group_id: int
    # Sequences that ended since the last step.
    released: tuple[int, ...] = ()
    # Groups in memory whose copies are given up first, to make room for this one's; they are copied again when they park.
    drop_copies: tuple[int, ...] = ()


class WakeShard(msgspec.Struct, frozen=True, tag="wake"):
    """Take memory, in order, and copy the weights back to the same addresses, beside the steps. An error leaves it parked."""

    op: int
    group_id: int
    kv_blocks: int  # mapped from then on


class Step(msgspec.Struct, frozen=True, tag="step"):
    """Compute one step of one worker group. The last stage's first shard answers with StepDone; all others only on failure."""

    step: int
    group_id: int
    sequences: tuple[SequenceStep, ...]
    # Sequences that ended since the last step: their per-sequence state is dropped before this one.
    released: tuple[int, ...] = ()


class Inventory(msgspec.Struct, frozen=True, tag="inventory"):
    op: int


class Ping(msgspec.Struct, frozen=True, tag="ping"):
    op: int


class Constrain(msgspec.Struct, frozen=True, tag="constrain"):
    """Compile what a sequence's answer must follow, beside the steps. Answered by Constrained; the sequence begins after it.

    Sent to the ranks of the last stage. Without a schema: the sequence does not begin; not answered.
    """

    group_id: int
    sequence: int
    json_schema: str = ""


class Exit(msgspec.Struct, frozen=True, tag="exit"):
    """Free everything and end the process."""


Command = Hello | LoadShard | UnloadShard | GrowKv | ParkShard | WakeShard | Constrain | Step | Inventory | Ping | Exit

# ------------------------------------------------------------------ rank to driver


class HeldShard(msgspec.Struct, frozen=True):
    """What a rank holds of a worker group; a restarted driver rebuilds its ledger from these."""

    group_id: int
    model: str
    spec_json: str
    ranks: tuple[int, ...]
    tensor_parallel: int
    pipeline_parallel: int
    kv_blocks: int
    kv_ceiling_blocks: int
    kv_block_tokens: int
    bytes: dict[str, int]
    digest: str
    precision: str
    context: int
    # Bytes read from disk for this shard since the process began.
    disk_bytes: int = 0
    # Its engine can park it and bring it back; what cannot stays in memory as if it were pinned.
    parkable: bool = False
    # It keeps nothing when it is parked: what brings it back is a load.
    park_unloads: bool = False
    # Its weights stand by outside the pool's memory; `bytes` is what it still holds of that memory.
    parked: bool = False
    standby_bytes: int = 0
    # By kind: what a wake takes beside KV. Empty while it is not parked.
    wake_bytes: dict[str, int] = {}


class DeviceMemory(msgspec.Struct, frozen=True):
    """A rank's device: what its own driver says, beside what is known of it. All in bytes."""

    capacity_bytes: int  # that the pool may have there, contexts included
    total_bytes: int
    free_bytes: int  # by the driver, all processes counted
    context_bytes: int  # of this process when it began
    foreign_bytes: int  # of other processes when it began
    kept_bytes: int  # pages that nobody has, kept for who asks next

    @property
    def used_bytes(self) -> int:
        return self.total_bytes - self.free_bytes

    @property
    def intruding_bytes(self) -> int:
        """How much of the pool's share other processes have: what the pool may not have, they use first."""
        return max(0, self.foreign_bytes - (self.total_bytes - self.capacity_bytes))


class DeviceFacts(msgspec.Struct, frozen=True):
    """What a rank's card is; see `RankRecord` for the fields."""

    type: str = ""
    nvlink_domain: str = ""
    numa: int = -1
    trouble: str = ""


class Welcome(msgspec.Struct, frozen=True, tag="welcome"):
    rank: int
    pid: int
    device: str
    node: str
    held: tuple[HeldShard, ...]
    # group_id -> how many of its commands arrived. Ranks of one group that disagree lost their driver between two sends:
    # their collectives no longer match, so they cannot be adopted.
    received: dict[int, int] = {}
    protocol: int = PROTOCOL
    host_bytes: int = 0  # of its node, available when the rank started
    facts: DeviceFacts = DeviceFacts()
    memory: DeviceMemory | None = None  # None: a rank without a device of its own, which may have what it was started with


class Progress(msgspec.Struct, frozen=True, tag="progress"):
    op: int
    fraction: float
    what: str
    note: str = ""  # what operators want to read later: becomes an event


class Done(msgspec.Struct, frozen=True, tag="done"):
    """The end of an operation on this rank. `error` is empty on success."""

    op: int
    error: str = ""
    held: HeldShard | None = None
    inventory: tuple[HeldShard, ...] = ()
    memory: DeviceMemory | None = None  # after it, where there is a device


class SampledToken(msgspec.Struct, frozen=True, array_like=True):
    sequence: int
    token: int
    logprob: float = 0.0
    alternative_ids: tuple[int, ...] = ()
    alternative_logprobs: tuple[float, ...] = ()
    # Of an encoder: the text's vector, fp32, little endian.
    embedding: bytes = b""
    # Not empty: this sequence cannot go on, and this token is not of its answer. Others are not concerned.
    error: str = ""


class Constrained(msgspec.Struct, frozen=True, tag="constrained"):
    """A Constrain was carried out. `error` is empty on success."""

    group_id: int
    sequence: int
    error: str = ""
    grammar_bytes: int = 0  # host memory that the group's shard has for this now


class StepDone(msgspec.Struct, frozen=True, tag="step_done"):
    step: int
    group_id: int
    sampled: tuple[SampledToken, ...]
    seconds: float
    # Not empty: the whole step failed on this rank, nothing was sampled.
    error: str = ""
    # The group's answers cannot be trusted any more: it fails as a whole, its ranks do not.
    damaged: bool = False


class DeviceLoad(msgspec.Struct, frozen=True, tag="device_load"):
    """Now and then, unasked."""

    utilization: float  # 0 to 1; -1: not known
    used_bytes: int
    total_bytes: int
    link_bytes_per_s: float = 0.0  # host memory to device, measured when the rank started


Report = Welcome | Progress | Done | Constrained | StepDone | DeviceLoad

_encoder = msgspec.msgpack.Encoder()
_command_decoder = msgspec.msgpack.Decoder(Command)
_report_decoder = msgspec.msgpack.Decoder(Report)


def encode(message: Command | Report) -> bytes:
    """A whole frame, length included."""
    body = _encoder.encode(message)
    return len(body).to_bytes(4, "big") + body


def decode_command(body: bytes) -> Command:
    """Raises msgspec.ValidationError on anything that is not a command."""
    return _command_decoder.decode(body)


def decode_report(body: bytes) -> Report:
    """Raises msgspec.ValidationError on anything that is not a report."""
    return _report_decoder.decode(body)
