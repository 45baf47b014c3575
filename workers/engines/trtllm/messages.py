"""The protocol between a pool driver and the server of one TensorRT-LLM model.

One Unix socket a server. The server sends a nonce of 32 characters, the driver answers with `Hello`; from then on frames go
both ways: 4 bytes of length, big-endian, and a JSON object whose `type` is the name of a class below. Standard library only,
because the server runs in an environment that we do not make. Nothing is ever unpickled (rule 15).

Requests and cancels go down; up comes one `Tokens` for each iteration of the engine, with the new tokens of all requests.
"""

from __future__ import annotations

import dataclasses
import hashlib
import hmac
import json
from dataclasses import dataclass, field
from typing import Any

PROTOCOL = 1
NONCE_BYTES = 32
MAX_FRAME_BYTES = 64 * 2**20

# ------------------------------------------------------------------ driver to server


@dataclass
class Hello:
    proof: str  # HMAC-SHA256 of the nonce under the pool's secret, hex
    driver: str  # incarnation
    protocol: int = PROTOCOL


@dataclass
class Load:
    """Construct the model. Answered by `Progress` and one `Done`."""

    op: int
    kwargs: dict[str, Any]  # see gateway.api.trtllm.arguments
    entry: str  # LLM or AsyncLLM
    park: str  # release, async_release or reload
    orchestrator: str  # spawn, mpiexec or ray
    world: int
    devices: list[int]  # indices of this node's devices that its ranks use, in the order of the ranks
    placement_group: str = ""  # ray: id of the pool's, in hexadecimal
    bundles: list[int] = field(default_factory=list)  # by rank
    held: str = ""  # what the driver wants to find again when it was restarted; not looked into


@dataclass
class Generate:
    """One request. Token ids in, token ids out."""

    sequence: int
    prompt: list[int]
    max_tokens: int
    stop_token_ids: list[int]
    end_id: int = -1  # -1: none, the answer goes on to max_tokens
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int = 0
    logprobs: int = -1


@dataclass
class Cancel:
    sequences: list[int]


@dataclass
class Park:
    """Release the GPU's memory. Refused while requests are in flight. Answered by `Done` with what is left."""

    op: int


@dataclass
class Wake:
    op: int


@dataclass
class GetStats:
    op: int


@dataclass
class Shutdown:
    """Shut the model down and end. The connection closes when that is done."""


# ------------------------------------------------------------------ server to driver


@dataclass
class Welcome:
    pid: int
    python: str
    state: str  # empty, loading, ready, parked, failed
    held: str  # of its Load
    version: str = ""  # of tensorrt_llm, once imported
    device_bytes: list[int] = field(default_factory=list)  # by device of its Load, once loaded
    pids: list[int] = field(default_factory=list)  # of the processes that hold them
    protocol: int = PROTOCOL


@dataclass
class Progress:
    op: int
    fraction: float
    what: str


@dataclass
class Done:
    """The end of an operation. `error` is empty on success."""

    op: int
    error: str = ""
    device_bytes: list[int] = field(default_factory=list)  # that its processes hold now, by device
    pids: list[int] = field(default_factory=list)  # of the processes that hold them
    seconds: float = 0.0
    stats: list[dict[str, Any]] = field(default_factory=list)
    version: str = ""
    notes: list[str] = field(default_factory=list)


@dataclass
class Output:
    """What one request got in one iteration. `finish` is empty while it goes on: stop, length, cancelled, timeout or error."""

    sequence: int
    tokens: list[int]
    logprobs: list[float] = field(default_factory=list)
    finish: str = ""
    error: str = ""
    # For each token the likeliest at its place, with their log-probabilities; where the request asked for them.
    alternatives: list[list[tuple[int, float]]] = field(default_factory=list)


@dataclass
class Tokens:
    iteration: int
    outputs: list[Output]


@dataclass
class Beat:
    """Twice in a few seconds, also while a model loads: the server's loop turns."""

    in_flight: int
    iteration: int


Message = Hello | Load | Generate | Cancel | Park | Wake | GetStats | Shutdown | Welcome | Progress | Done | Tokens | Beat

DOWN = {kind.__name__: kind for kind in (Hello, Load, Generate, Cancel, Park, Wake, GetStats, Shutdown)}
UP = {kind.__name__: kind for kind in (Welcome, Progress, Done, Tokens, Beat)}


def encode(message: Message) -> bytes:
    """A whole frame, length included."""
    if isinstance(message, Tokens):  # the one that is sent for every token
        outputs = [[o.sequence, o.tokens, o.logprobs, o.finish, o.error, o.alternatives] for o in message.outputs]
        content: dict[str, Any] = {"type": "Tokens", "iteration": message.iteration, "outputs": outputs}
    else:
        content = {"type": type(message).__name__, **dataclasses.asdict(message)}
    body = json.dumps(content, separators=(",", ":")).encode()
    return len(body).to_bytes(4, "big") + body


def decode(body: bytes, kinds: dict[str, type]) -> Any:
    """ValueError on anything that is none of `kinds`."""
    content = json.loads(body)
    if not isinstance(content, dict) or content.get("type") not in kinds:
        raise ValueError(f"no message: {body[:80]!r}")
    kind = kinds[content.pop("type")]
    try:
        if kind is Tokens:
            return Tokens(int(content["iteration"]), [Output(*output) for output in content["outputs"]])
        return kind(**content)
    except (TypeError, KeyError) as error:
        raise ValueError(f"a bad {kind.__name__}: {error}") from error


def proof(secret: str, nonce: str) -> str:
    """What a driver answers to a server's nonce: the secret itself never travels."""
    return hmac.new(secret.encode(), nonce.encode(), hashlib.sha256).hexdigest()
