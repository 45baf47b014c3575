"""From the token ids of one choice to what its client sees (rule 17)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from gateway.api.proto.pool_pb2 import Logprob
from gateway.servers.request import GenerationRequest
from gateway.text.model_text import ModelText
from gateway.text.stop_strings import StopStringMatcher
from gateway.text.tool_calls import CallDelta


@dataclass(slots=True)
class TokenLogprob:
    """`raw` may be part of a character. `offset` counts the characters of the answer before the one that it begins or is in."""

    token_id: int
    raw: bytes
    logprob: float
    offset: int = 0
    alternatives: list[TokenLogprob] = field(default_factory=list)


@dataclass(slots=True)
class ChoiceDelta:
    """What is new of a choice. `finish_reason` (stop, length, cancelled, content_filter) is set in its last."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: str = ""
    stop_reason: str = ""
    calls: tuple[CallDelta, ...] = ()  # of functions, where the client offers some; `finish_reason` is tool_calls then

    def extend(self, later: ChoiceDelta) -> None:
        self.text += later.text
        self.token_ids += later.token_ids
        self.logprobs += later.logprobs
        self.calls += later.calls
        self.finish_reason = later.finish_reason
        self.stop_reason = later.stop_reason


@dataclass(slots=True)
class _Held:
    """A token whose text is not out yet. `start` and `end` count characters of the choice; `end` < 0: not known yet."""

    token_id: int
    logprob: TokenLogprob | None
    start: int
    end: int = -1


class ChoiceStream:
    """Detokenizes, looks for stop strings, counts, and keeps ids and logprobs together with the text they belong to.

    A stop token is never part of the text, the ids or the logprobs: it is named in `stop_reason`.
    """

    __slots__ = (
        "_detokenizer",
        "_given",
        "_held",
        "_matcher",
        "_produced",
        "_stop_ids",
        "_stop_reason",
        "_text",
        "_want_tokens",
        "completion_tokens",
        "finished",
        "index",
    )

    def __init__(self, index: int, request: GenerationRequest, text: ModelText | None, prompt_ids: Sequence[int]) -> None:
        """`text` None: of a server that answers in text."""
        self.index = index
        self.finished = False
        self.completion_tokens = 0
        self._text = text
        self._detokenizer = None if text is None else text.detokenizer(prompt_ids)
        self._matcher = StopStringMatcher(request.stop) if request.stop else None
        stop_ids = frozenset(request.stop_token_ids)
        self._stop_ids = stop_ids if request.ignore_eos or text is None else stop_ids | text.eos_ids
        self._want_tokens = request.return_token_ids or request.logprobs is not None
        self._held: list[_Held] = []
        self._produced = 0
        self._given = 0
        self._stop_reason = ""  # as a server said it

    def take_text(self, text: str, tokens: int, stop_reason: str) -> ChoiceDelta | None:
        """As `take`, of what came as text."""
        if self.finished:
            return None
        self.completion_tokens += tokens
        self._stop_reason = stop_reason
        delta = ChoiceDelta(self.index)
        self._show(text, delta)
        return delta if delta.text or delta.finish_reason else None

    def take(self, ids: Sequence[int], logprobs: Sequence[Logprob]) -> ChoiceDelta | None:
        """None when there is nothing to show yet. A delta with `finish_reason` means that a stop string ended the choice."""
        detokenizer = self._detokenizer
        if self.finished or detokenizer is None:
            return None
        if self._matcher is None and not self._want_tokens:
            self.completion_tokens += len(ids)
            if ids[-1] in self._stop_ids:
                ids = ids[:-1]
            text = detokenizer.feed(ids) if ids else ""
            return ChoiceDelta(self.index, text) if text else None
        delta = ChoiceDelta(self.index)
        for position, token in enumerate(ids):
            self.completion_tokens += 1
            if token in self._stop_ids:
                continue
            if self._want_tokens:
                logprob = self._logprob(token, logprobs[position]) if logprobs else None
                self._held.append(_Held(token, logprob, self._produced))
            self._show(detokenizer.feed((token,)), delta)
            if self.finished:
                break
        return delta if delta.text or delta.token_ids or delta.finish_reason else None

    def end(self, finish_reason: str, stop_token_id: int) -> ChoiceDelta | None:
        """The last delta, with all that was held. None when a stop string had ended the choice before."""
        if self.finished:
            return None
        delta = ChoiceDelta(self.index)
        if self._detokenizer is not None:
            self._show(self._detokenizer.finish(), delta)
        if self.finished:
            return delta
        self.finished = True
        if self._matcher is not None:
            delta.text += self._matcher.finish()
        self._release(len(self._held), delta)
        delta.finish_reason = finish_reason
        if finish_reason == "stop":
            delta.stop_reason = str(stop_token_id) if stop_token_id >= 0 else self._stop_reason
        return delta

    def _show(self, text: str, delta: ChoiceDelta) -> None:
        """Moves new text through the stop matcher into the delta, and with it the tokens that are out completely."""
        if not text:
            return
        self._produced += len(text)
        for held in reversed(self._held):
            if held.end >= 0:
                break
            held.end = self._produced
        matcher = self._matcher
        shown = matcher.feed(text) if matcher is not None else text
        delta.text += shown
        self._given += len(shown)
        if matcher is not None and matcher.matched is not None:
            self.finished = True
            self._release(sum(held.start < self._given for held in self._held), delta)
            self._held.clear()
            delta.finish_reason, delta.stop_reason = "stop", matcher.matched
        elif self._held:
            self._release(sum(0 <= held.end <= self._given for held in self._held), delta)

    def _release(self, count: int, delta: ChoiceDelta) -> None:
        released, self._held = self._held[:count], self._held[count:]
        for held in released:
            delta.token_ids.append(held.token_id)
            if held.logprob is not None:
                delta.logprobs.append(held.logprob)

    def _logprob(self, token: int, given: Logprob) -> TokenLogprob:
        assert self._text is not None
        raw = self._text.token_bytes
        alternatives = [
            TokenLogprob(other, raw(other), value, self._produced)
            for other, value in zip(given.alternative_ids, given.alternative_logprobs, strict=False)
        ]
        return TokenLogprob(token, raw(token), given.logprob, self._produced, alternatives)
