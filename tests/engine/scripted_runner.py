"""A runner without a model: it follows plans as a rank does and draws each token from the text so far.

The next token depends on nothing but the tokens before it, so whatever the scheduler does (batching, chunks,
retraction, prefix hits, speculation, either loop), a request's text must be the same. What a rank could not do, the
runner refuses: a row that does not start where the KV ends, or a page table that is too short.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from engine.scheduler.plan import Enter, Plan, Row
from engine.scheduler.results import Results, RowResult
from engine.speculation.accept import accept_run

STOP = 0


def next_token(tokens: Sequence[int], vocab: int = 50, stop_every: int = 23) -> int:
    value = 7
    for token in tokens[-12:]:
        value = (value * 31 + token + 3) % 1_000_003
    value += len(tokens)
    return STOP if value % stop_every == 0 else 1 + value % (vocab - 1)


def text_alone(prompt: Sequence[int], room: int, stops: frozenset[int] = frozenset({STOP})) -> list[int]:
    """What a request must answer, whatever shares the batch."""
    tokens, start = list(prompt), len(prompt)
    while len(tokens) - start < room:
        tokens.append(next_token(tokens))
        if tokens[-1] in stops:
            break
    return tokens[start:]


@dataclass
class Known:
    tokens: list[int]
    prompt_length: int
    room: int
    stops: frozenset[int]
    kv_len: int = 0
    pages: list[int] = field(default_factory=list)


@dataclass
class Flight:
    plan: Plan
    pages: dict[str, list[int]]
    drafts: dict[str, list[int]]


class ScriptedRunner:
    """``drafts(tokens, most)`` makes up drafts; ``on_launch`` sees each plan before it is followed."""

    def __init__(self, page_size: int, drafts: Callable[[list[int], int], list[int]] | None = None,
                 on_launch: Callable[[Plan], None] | None = None) -> None:  # fmt: skip
        self._page_size = page_size
        self._drafts = drafts or (lambda _tokens, _most: [])
        self._on_launch = on_launch or (lambda _plan: None)
        self.known: dict[str, Known] = {}
        self.in_flight: Flight | None = None
        self.plans: list[Plan] = []

    def launch(self, plan: Plan) -> Flight:
        assert self.in_flight is None, "a step was launched before the last one was collected"
        self._on_launch(plan)
        self.plans.append(plan)
        for rid in plan.leaves:
            del self.known[rid]
        for enter in plan.enters:
            assert enter.rid not in self.known
            self.known[enter.rid] = self._take(enter)
        flight = Flight(plan, {}, {})
        for row in plan.rows:
            self._lay_out(row, flight)
        self._check_owners(plan)
        self.in_flight = flight
        return flight

    def collect(self, launched: Flight) -> Results:
        assert launched is self.in_flight
        self.in_flight = None
        rows = tuple(self._commit(row, launched) for row in launched.plan.rows)
        return Results(launched.plan.step, rows, executed=len(rows), useful=len(rows))

    def _take(self, enter: Enter) -> Known:
        return Known(list(enter.tokens), enter.prompt_length, enter.room, frozenset(enter.sampling.stop_token_ids) | {STOP})

    def _lay_out(self, row: Row, flight: Flight) -> None:
        known = self.known[row.rid]
        if row.pages is not None:
            known.pages = list(row.pages)
        drafts: list[int] = []
        if row.count:
            assert row.start + row.count <= len(known.tokens)
            assert row.draws == (row.start + row.count == len(known.tokens))
            known.kv_len, end = row.start, row.start + row.count
        else:
            left = known.room - (len(known.tokens) - known.prompt_length)
            assert left >= 1, "a finished request is in the batch"
            most = min(row.drafts, left - 1, len(known.pages) * self._page_size - len(known.tokens))
            drafts = self._drafts(known.tokens, most) if most > 0 else []
            end = len(known.tokens) + len(drafts)
        assert end <= len(known.pages) * self._page_size, "the row does not fit its page table"
        flight.pages[row.rid] = list(known.pages)
        flight.drafts[row.rid] = drafts

    def _check_owners(self, plan: Plan) -> None:
        """No page that a row writes may be in another row's table."""
        written: dict[int, str] = {}
        for row in plan.rows:
            known = self.known[row.rid]
            first = (row.start if row.count else known.kv_len) // self._page_size
            for page in known.pages[first:]:
                assert page not in written, f"page {page} is written for {written[page]} and {row.rid}"
                written[page] = row.rid
        for row in plan.rows:
            known = self.known[row.rid]
            first = (row.start if row.count else known.kv_len) // self._page_size
            for page in known.pages[:first]:
                assert page not in written, f"page {page} is read for {row.rid} and written for {written[page]}"

    def _commit(self, row: Row, flight: Flight) -> RowResult:
        known = self.known[row.rid]
        drafts = flight.drafts[row.rid]
        if row.count:
            known.kv_len = row.start + row.count
            if not row.draws:
                return RowResult(row.rid, (), "", None, known.kv_len)
        else:
            known.kv_len = len(known.tokens)
        drawn = [next_token(known.tokens + drafts[:at]) for at in range(len(drafts) + 1)]
        accepted = accept_run(drafts, drawn, room=known.room - (len(known.tokens) - known.prompt_length), stops=known.stops)
        known.kv_len += len(accepted.tokens) - 1
        known.tokens += accepted.tokens
        return RowResult(row.rid, accepted.tokens, accepted.finish, accepted.matched, known.kv_len, len(drafts))
