"""The one path under all surfaces: from a request to a stream of text."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace

from gateway.admission.caller import Caller, identify
from gateway.admission.gate import Ticket
from gateway.api.errors import ErrorCode, YardError, invalid, unavailable
from gateway.api.proto.pool_pb2 import End, Hold, Submit, Tokens
from gateway.api.records import HEARTBEAT_S
from gateway.link.flight import Flight, Lost, Text
from gateway.link.link import Link
from gateway.link.words import Words
from gateway.routing import route_table
from gateway.routing.ask import Ask
from gateway.servers.choice_stream import ChoiceDelta, ChoiceStream
from gateway.servers.generation_path import RETRY_AFTER_S, GenerationPath
from gateway.servers.request import (
    GenerationRequest,
    answer_budget,
    check,
    check_constraint,
    check_ids,
    check_kind,
    resolved_sampling,
)
from gateway.servers.request_record import RequestRecord
from gateway.servers.server_words import check_words, estimated_tokens, words_of
from gateway.servers.submits import prompt_tokens, submits
from gateway.text.response_filter import AnswerFilter

# How long a request waits for a pool that holds the model but cannot be reached, or that held it until so long ago: a
# restarted driver adopts its ranks in seconds. Then UNAVAILABLE.
REPLICA_WAIT_S = 10.0
# How long a pool that just failed is waited for to say anew what it has; then what it said before is believed again.
HEARSAY_S = 2 * HEARTBEAT_S
# How long an answer that a stop string ended here waits for what the pool says of it. Drivers say it within a step.
SETTLE_S = 0.25
# The longest deadline that a Submit can say (uint32): 49 days.
LONGEST_TIMEOUT_MS = 2**32 - 1


@dataclass(slots=True)
class Usage:
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0


class Generation:
    """One request, from its arrival to its last token.

        generation = Generation(path, request)
        await generation.start()
        while (news := await generation.receive()) is not None: …

    1. `start` is `prepare`, which finds out who asks, resolves the route, tokenizes, checks and takes of the tenant's quota, and
       `enter`, which waits its turn, chooses a pool and submits one sequence per choice.
    2. `receive` gives what is new of the choices, a Hold while the model is being brought in, and None at the end.
    3. A replica that is lost (or has no room, if there is another) before the first token is replaced, once (rule 9); when
       the model has no other, the route is asked again for another model: its new target after a switch, another target, or
       its fallback.
    4. `close` may be called at any time, also before or during `start`, and more than once: what runs is cancelled at
       once (rule 10). Whoever makes a Generation closes it.

    `start` and `receive` raise YardError; after that nothing of the request runs any more.
    """

    def __init__(self, path: GenerationPath, request: GenerationRequest) -> None:
        self.request = request
        self.resolved: route_table.Resolved | None = None
        self.usage = Usage()
        self.created_unix = int(time.time())
        self._path = path
        self._loop = asyncio.get_running_loop()
        self._timer = None if request.deadline is None else self._loop.call_at(request.deadline, self._expire)
        self._closed = False
        self._expired = False
        self._choices: list[ChoiceStream] = []
        self._filters: list[AnswerFilter] = []  # of the choices, where the route has one
        self._running = 0
        self._unsettled: set[int] = set()  # choices that a stop string ended, of which the pool has not said the end
        self._submits: list[Submit] = []
        self._flight = Flight()
        self._link: Link | None = None
        self._ids: list[int] = []
        self._retried = False
        self._started = False
        self._caller = Caller()
        self._ask = Ask()
        self._ticket: Ticket | None = None
        self._entering: asyncio.Future[Ticket] | None = None
        self._words: Words | None = None  # for a model whose server runs elsewhere
        self._charged: int | None = None  # prompt tokens that were taken of the quota
        self.embedding = b""  # of a request for one, once it is done: fp32, little endian
        self._ended_by = ErrorCode.CANCELLED  # when it ends before it is done
        self._record = RequestRecord(request)

    @property
    def model(self) -> str:
        return self.resolved.model if self.resolved is not None else ""

    @property
    def tokens(self) -> int:
        """Tokens of the answer so far, over all choices."""
        return sum(choice.completion_tokens for choice in self._choices)

    # ---------------------------------------------------------------- beginning

    async def start(self) -> None:
        await self.prepare()
        await self.enter()

    async def prepare(self) -> None:
        """All that takes nothing of the pools, so that many may be prepared before one of them runs."""
        async with self._beginning():
            check(self.request)
            await self._admit()

    async def enter(self) -> None:
        """From here on it holds its share of the pools until they are done with it, so whoever enters must be received."""
        async with self._beginning():
            self._check_running()
            if not self.request.shadow:
                self._ticket = await self._take_turn()
                if self.resolved is not None and self.resolved.shadow is not None:
                    self._path.shadows.offer(self.request, self.resolved.shadow)
            await self._launch(None)

    @contextlib.asynccontextmanager
    async def _beginning(self) -> AsyncIterator[None]:
        """Until the deadline; what ends it early ends the generation."""
        try:
            if self._is_late:
                raise self._deadline_error()
            async with asyncio.timeout_at(self.request.deadline):
                yield
        except TimeoutError as error:
            self._ended_by = ErrorCode.DEADLINE
            self.close()
            raise self._deadline_error() from error
        except YardError as error:
            self._ended_by = error.code
            self.close()
            if self._is_late and error.retry_after_s is not None:
                raise self._deadline_error() from error  # there is no trying again for who has no time left (rule 10)
            raise
        except BaseException:
            self.close()
            raise

    async def _admit(self) -> None:
        path, request = self._path, self.request
        if request.shadow:
            await self._aim(path.resolve(request.model))
            return
        self._caller = identify(path.view, request.headers)
        self._ask = path.ask(self._caller)
        self._caller.check_name(path.view, request.model)
        resolved = path.resolve(request.model, self._ask)
        await self._aim(resolved)
        if route_table.needs_length(path.view, request.model):
            # Counted with the tokenizer of the model that answers when no rule holds.
            self._ask = replace(self._ask, prompt_tokens=self.usage.prompt_tokens)
            resolved = path.resolve(request.model, self._ask)
            if resolved.model != self.model:
                await self._aim(resolved)
            self.resolved = resolved
        if path.quotas is not None:
            await path.quotas.admit(self._caller, self.usage.prompt_tokens)
            self._charged = self.usage.prompt_tokens
            if self._closed:
                self._pay()

    async def _take_turn(self) -> Ticket:
        """A client that leaves while it waits gives its place up at once (rule 10)."""
        path, request = self._path, self.request
        cost = (self.usage.prompt_tokens + self._submits[0].max_tokens) * request.n
        ticket = path.gate.enter_now(self.model, count=request.n, cost=cost)
        if ticket is not None:
            return ticket
        entering = path.gate.enter(self.model, self._caller, count=request.n, cost=cost, deadline=request.deadline)
        self._entering = asyncio.ensure_future(entering)
        try:
            ticket = await self._entering
        except asyncio.CancelledError:
            if self._closed:
                raise YardError(ErrorCode.CANCELLED, "the client left") from None
            raise
        finally:
            self._entering = None
        if self._closed:
            ticket.leave()
        return ticket

    async def _aim(self, resolved: route_table.Resolved) -> None:
        """Makes the sequences for one model, ready to be sent."""
        self.resolved, request, spec = resolved, self.request, resolved.entry.spec
        self._words = None if spec.is_managed else words_of(request)
        check_constraint(request, spec)
        if spec.answers_in_text:
            check_words(request, resolved.model, spec)
        if spec.reads_text:
            text, prompt_ids, max_tokens = None, [], request.max_tokens or 0
            self.usage.prompt_tokens = estimated_tokens(request)
        else:
            text = await self._path.text(resolved)
            check_kind(request, embeds=text.embeds)
            if request.json_schema:
                await text.schemas.check(request.json_schema, request.named("json_schema"))
            context = self._path.context(resolved, text)
            prompt_ids = await prompt_tokens(request, text, context)
            check_ids(request.stop_token_ids, text.vocabulary_size, "stop_token_ids")
            max_tokens = answer_budget(request, len(prompt_ids), context)
            self.usage.prompt_tokens = len(prompt_ids)
        sampling = resolved_sampling(request, text.defaults if text else {}, self._path.rng)
        self._unsettled.clear()
        shown = None if spec.answers_in_text else text
        self._choices = [ChoiceStream(index, request, shown, prompt_ids) for index in range(request.n)]
        self._filters = self._response_filters(resolved)
        self._running = request.n
        self._submits = submits(request, resolved, self._caller, prompt_ids=prompt_ids, max_tokens=max_tokens, sampling=sampling)

    async def _launch(self, avoid: Link | None) -> None:
        """Sends the sequences to a pool that has the model, for which it may wait.

        Not to the one that just failed before its heartbeat says anew what it has: what was heard earlier is known to be wrong.
        """
        links, model = self._path.links, self.model
        began = self._loop.time()
        give_up = began + REPLICA_WAIT_S
        heard = avoid.updates if avoid is not None else 0
        while True:
            self._check_running()
            holding = links.holding(model)
            candidates = [link for link in links.rotation(model) if link is not avoid]
            link = self._path.choice.choose(candidates, model, self._submits[0].prompt_ids)
            if link is not None:
                self._submit(link)
                return
            left_s = give_up - self._loop.time()
            if not holding and (left_s <= 0 or not links.held_lately(model, REPLICA_WAIT_S)):
                raise self._path.why_unavailable(model)
            if left_s <= 0:
                raise unavailable(f"model `{model}`: {holding[0].reason}", RETRY_AFTER_S)
            await links.wait_change(min(left_s, 1.0))
            silent = avoid is not None and avoid.updates == heard and not self._path.view.degraded
            if not silent or self._loop.time() - began > HEARSAY_S:
                avoid = None

    def _submit(self, link: Link) -> None:
        timeout_ms = 0
        if self.request.deadline is not None:
            timeout_ms = int(min((self.request.deadline - self._loop.time()) * 1000, LONGEST_TIMEOUT_MS))
            if timeout_ms < 1:
                raise self._deadline_error()
        for submit in self._submits:
            submit.timeout_ms = timeout_ms
        self._flight = Flight(len(self._submits), self._computed, self._words)
        self._link = link
        self._ids = link.submit(self._flight, self._submits)

    # ---------------------------------------------------------------- going on

    async def receive(self) -> list[ChoiceDelta] | Hold | None:
        while self._running:
            self._check_running()
            events = await self._flight.receive()
            self._check_running()
            news: list[ChoiceDelta] = []
            hold: Hold | None = None
            for index, event in events:
                if isinstance(event, Tokens | Text):
                    self._take(index, event, news)
                elif isinstance(event, End):
                    if (event.error_code or event.finish_reason == "error") and index not in self._unsettled:
                        await self._fail(_end_error(event, self.request))
                        break
                    self._end(index, event, news)
                elif isinstance(event, Lost):
                    await self._fail(unavailable(event.reason, RETRY_AFTER_S))
                    break
                else:
                    hold = event
            if news and self._filters:
                news = await self._filtered(news)
            if news:
                if self._unsettled and not self._running:
                    await self._settle()
                return news
            if hold is not None:
                return hold
        self.close()
        return None

    @property
    def done(self) -> bool:
        """All choices have ended; `usage` is complete."""
        return self._running == 0 and bool(self._choices)

    def _take(self, index: int, event: Tokens | Text, news: list[ChoiceDelta]) -> None:
        is_text = isinstance(event, Text)
        if not (is_text or event.ids):
            return
        if not self._started and not (is_text and not event.text):
            self._started = True
            self._record.first_token()
        choice = self._choices[index]
        if is_text:
            delta = choice.take_text(event.text, event.tokens, event.stop_reason)
        elif self.request.embed:
            self.embedding = event.embedding
            return
        else:
            delta = choice.take(event.ids, event.logprobs)
        if delta is None:
            return
        _add(news, delta)
        if choice.finished:  # by a stop string, of which the engine knows nothing
            self._finish(choice)
            if self._link is not None:
                self._unsettled.add(index)
                self._link.stop(self._ids[index])

    async def _settle(self) -> None:
        """Waits for the ends of what stop strings ended, for the usage that goes with the last text; not for long."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(SETTLE_S):
                while self._unsettled and not (self._closed or self._expired):
                    for index, event in await self._flight.receive():
                        if isinstance(event, End):
                            self._heard(index, event)
                        elif isinstance(event, Lost):
                            return

    def _response_filters(self, resolved: route_table.Resolved) -> list[AnswerFilter]:
        """YardError(INVALID) for a request of token ids or log-probabilities, by which the text would leave beside the filter."""
        route = self._path.view.routes.get(resolved.route)
        spec = route.spec.response_filter if route is not None and route.spec is not None else None
        if spec is None or self.request.embed:
            return []
        if self.request.return_token_ids or self.request.logprobs is not None:
            raise invalid(f"route `{resolved.route}` filters its answers, so it gives no token ids and no logprobs", "logprobs")
        made = [self._path.filters.answer_filter(resolved.route, spec) for _ in range(self.request.n)]
        return [one for one in made if one is not None]

    async def _filtered(self, news: list[ChoiceDelta]) -> list[ChoiceDelta]:
        """What of it may leave. An answer that is cut is stopped as by a stop string."""
        left = []
        for delta in news:
            try:
                found = await self._filters[delta.index].feed(delta.text, last=bool(delta.finish_reason))
            except YardError:
                self.close()
                raise
            delta.text = found.text
            if found.cut:
                choice = self._choices[delta.index]
                if not choice.finished:
                    choice.finished = True
                    self._finish(choice)
                    if self._link is not None:
                        self._unsettled.add(delta.index)
                        self._link.stop(self._ids[delta.index])
                delta.finish_reason, delta.stop_reason = "content_filter", ""
            if delta.text or delta.finish_reason:
                left.append(delta)
        return left

    def _heard(self, index: int, end: End) -> None:
        self._unsettled.discard(index)
        if self._words is not None and end.prompt_tokens:
            self.usage.prompt_tokens = end.prompt_tokens  # as its server counts
        self.usage.cached_tokens = max(self.usage.cached_tokens, end.cached_tokens)

    def _end(self, index: int, end: End, news: list[ChoiceDelta]) -> None:
        choice = self._choices[index]
        self._heard(index, end)
        if choice.finished:
            return
        if (delta := choice.end(end.finish_reason, end.stop_token_id)) is not None:
            _add(news, delta)
        # The engine may count a stop token that it did not send.
        if delta is not None and delta.finish_reason == end.finish_reason:
            choice.completion_tokens = max(choice.completion_tokens, end.completion_tokens)
        self._finish(choice)

    def _finish(self, choice: ChoiceStream) -> None:
        self._running -= 1
        self.usage.completion_tokens += choice.completion_tokens

    async def _fail(self, error: YardError) -> None:
        """Another try, if it is the first failure and no token came yet; else the error."""
        link = self._link
        self._drop_sequences()
        elsewhere = any(other is not link for other in self._path.links.rotation(self.model))
        retryable = error.code is ErrorCode.UNAVAILABLE or (error.code is ErrorCode.EXHAUSTED and elsewhere)
        self._ended_by = error.code
        if self._started or self._retried or self.request.shadow or not retryable:
            self.close()
            raise error
        self._retried = True
        try:
            async with asyncio.timeout_at(self.request.deadline):
                if not elsewhere:
                    await self._follow_route()
                await self._launch(link)
            self._ended_by = ErrorCode.CANCELLED
        except TimeoutError as late:
            self.close()
            raise self._deadline_error() from late
        except YardError as second:
            self.close()
            raise (self._deadline_error() if self._is_late else error) from second

    async def _follow_route(self) -> None:
        """The route may have been switched since the request came, or have another target that can answer."""
        resolved = self._path.resolve(self.request.model, self._ask)
        if resolved.model == self.model:
            resolved = self._path.resolve(self.request.model, self._ask, avoid=self.model)
        if resolved.model != self.model and self._path.links.rotation(resolved.model):
            await self._aim(resolved)

    # ---------------------------------------------------------------- ending

    def _computed(self, failed: bool) -> None:
        """The pool is done with it, so others may have its place, however long the client takes to read. One that failed
        before its first token keeps it for the second try."""
        if self._ticket is not None and (self._flight.began or not failed):
            self._ticket.leave(answered=not failed)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        if self._entering is not None:
            self._entering.cancel()
        self._drop_sequences()
        if self._ticket is not None:
            self._ticket.leave(answered=self.done)
        self._pay()
        self._flight.wake()
        usage = self.usage
        self._record.end(
            model=self.model,
            tenant=self._caller.tenant,
            prompt_tokens=usage.prompt_tokens,
            completion_tokens=self.tokens,
            cached_tokens=usage.cached_tokens,
            error="" if self.done else self._ended_by.value,
        )

    def _pay(self) -> None:
        """Who was not let through has used no quota."""
        quotas = self._path.quotas
        if self._charged is None or quotas is None:
            return
        if self._ticket is None:
            quotas.give_back(self._caller, self._charged)
        else:
            quotas.charge(self._caller, self.tokens + self.usage.prompt_tokens - self._charged)

    def _drop_sequences(self) -> None:
        if self._link is not None:
            self._link.cancel(self._ids)
        self._link = None

    def _expire(self) -> None:
        self._expired = True
        # At once, though the one who serves the request may be waiting for a slow client.
        self._drop_sequences()
        if self._ticket is not None:
            self._ticket.leave()
        self._flight.wake()

    def _check_running(self) -> None:
        if self._expired:
            self._ended_by = ErrorCode.DEADLINE
            self.close()
            raise self._deadline_error()
        if self._closed:
            raise YardError(ErrorCode.CANCELLED, "the client left")

    @property
    def _is_late(self) -> bool:
        return self.request.deadline is not None and self._loop.time() >= self.request.deadline

    def _deadline_error(self) -> YardError:
        return YardError(ErrorCode.DEADLINE, f"the deadline passed after {self.tokens} tokens of the answer")


def _add(news: list[ChoiceDelta], delta: ChoiceDelta) -> None:
    """Joins the deltas of one choice that came in one go, so that a frame is one chunk."""
    for earlier in news:
        if earlier.index == delta.index:
            earlier.extend(delta)
            return
    news.append(delta)


def _end_error(end: End, request: GenerationRequest) -> YardError:
    try:
        code = ErrorCode(end.error_code)
    except ValueError:
        code = ErrorCode.INTERNAL
    retry_after_s = end.retry_after_ms / 1000 if end.retry_after_ms else None
    field = request.named(end.error_field) if end.error_field else None
    message = end.error_message or "the engine failed without saying why"
    return YardError(code, f"{field}: {message}" if field else message, field=field, retry_after_s=retry_after_s)
