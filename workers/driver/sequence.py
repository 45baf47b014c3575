"""One sequence of tokens on its way through a worker group."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from workers.driver.effects import RequestKey
from workers.messages import NewSequence, Sampling

GREEDY = Sampling()


@dataclass(frozen=True)
class Request:
    """What a gateway (or the driver's canary) asks for. `deadline` is on the driver's clock."""

    key: RequestKey
    model: str
    prompt: tuple[int, ...]
    max_tokens: int  # 0: as many as fit in the context
    sampling: Sampling = GREEDY
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    deadline: float | None = None
    priority: int = 0
    request_id: str = ""
    traceparent: str = ""
    tenant: str = ""
    tenant_weight: int = 100
    shadow: bool = False  # a copy that nobody waits for


@dataclass(eq=False, slots=True)
class Sequence:
    """`tokens` is the prompt and what was generated; the keys and values of the first `computed` are in `blocks`.

    A preempted sequence has computed 0 and no blocks, and keeps its tokens.
    """

    id: int
    request: Request
    arrival: int  # order of arrival in the pool
    tokens: list[int]
    max_length: int  # prompt plus answer, bounded by max_tokens, the context and the KV ceiling
    stop_ids: frozenset[int]
    computed: int = 0
    in_flight: int = 0  # tokens of it in steps that are being computed
    coming: int = 0  # tokens that those steps will sample
    blocks: list[int] = field(default_factory=list)
    sent_blocks: int = 0
    hashes: list[bytes] = field(default_factory=list)  # of its full and computed blocks
    known_to_ranks: bool = False
    ended: bool = False
    cached_tokens: int = 0
    admitted_before: bool = False
    since: float = 0.0  # when it came to its group
    tag: float | None = None  # see `tenant_shares`
    cost: int = 0  # tokens to compute when it came
    prepared: bool = True  # its ranks have all that they must compile before its first step

    @property
    def prompt_tokens(self) -> int:
        return len(self.request.prompt)

    @property
    def generated(self) -> int:
        return len(self.tokens) - len(self.request.prompt)

    @property
    def uncomputed(self) -> int:
        return len(self.tokens) + self.coming - self.computed - self.in_flight

    @property
    def may_be_ahead(self) -> bool:
        """What is being computed is not its last token, as far as one can know, and does not decide which may be next."""
        return len(self.tokens) + self.coming < self.max_length and not (self.coming and self.constrained)

    @property
    def outstanding_tokens(self) -> int:
        """Tokens still to compute: of the prompt, and of the answer if it gets as long as it may."""
        return max(0, len(self.tokens) - self.computed) + max(0, self.max_length - len(self.tokens))

    @property
    def rank_order(self) -> tuple[int, int]:
        """Who goes first: higher priority, then earlier arrival."""
        return (-self.request.priority, self.arrival)

    @property
    def constrained(self) -> bool:
        """Its answer must follow a schema, so the next token cannot be chosen before the last one is known."""
        return bool(self.request.sampling.json_schema)

    def introduction(self) -> NewSequence:
        """What the ranks must know before its first step (again after a preemption)."""
        sampling = self.request.sampling
        return NewSequence(
            sampling=msgspec.structs.replace(sampling, json_schema="") if self.constrained else sampling,
            constrained=self.constrained,
            generated=tuple(self.tokens[self.prompt_tokens :]),
            prompt=self.request.prompt if sampling.repetition_penalty != 1.0 else (),
        )
