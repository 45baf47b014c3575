"""How much a pool has to do, as the choice of a replica and the gate see it."""

from __future__ import annotations

from collections import Counter

from gateway.api.proto.pool_pb2 import ModelLoad, Submit
from gateway.api.records import PoolRecord


class PoolLoad:
    """By model: what the driver last said, of the requests of all gateways, and what this gateway sent since it said so."""

    def __init__(self) -> None:
        self._tokens: dict[str, int] = {}
        self._sequences: dict[str, int] = {}
        self._waiting: dict[str, int] = {}
        self._sent_tokens: dict[str, int] = {}
        self._sent_sequences: dict[str, int] = {}

    def outstanding_tokens(self, model: str) -> int:
        return self._tokens.get(model, 0) + self._sent_tokens.get(model, 0)

    def sequences(self, model: str) -> int:
        """Those that run or wait in the pool."""
        return self._sequences.get(model, 0) + self._sent_sequences.get(model, 0)

    def waiting(self, model: str) -> int:
        return self._waiting.get(model, 0)

    def observe(self, record: PoolRecord) -> None:
        """A heartbeat, for when nothing of this gateway is in flight: frames are fresher."""
        self.forget_sent()
        tokens, sequences, waiting = Counter[str](), Counter[str](), Counter[str]()
        for group in record.groups:
            tokens[group.model] += group.outstanding_tokens
            sequences[group.model] += group.running + group.waiting
            waiting[group.model] += group.waiting
        self._tokens, self._sequences, self._waiting = dict(tokens), dict(sequences), dict(waiting)

    def told(self, load: ModelLoad) -> None:
        """A frame's word on one model."""
        self._tokens[load.model] = load.outstanding_tokens
        self._sequences[load.model] = load.running + load.waiting
        self._waiting[load.model] = load.waiting
        self._sent_tokens.pop(load.model, None)
        self._sent_sequences.pop(load.model, None)

    def sent(self, submit: Submit) -> None:
        model = submit.model
        self._sent_tokens[model] = self._sent_tokens.get(model, 0) + len(submit.prompt_ids) + submit.max_tokens
        self._sent_sequences[model] = self._sent_sequences.get(model, 0) + 1

    def forget_sent(self) -> None:
        """Nothing of this gateway is in flight any more."""
        self._sent_tokens.clear()
        self._sent_sequences.clear()
