"""The executor: carries out plans on one rank.

Each step is: lay out the rows; launch the forward pass; make the grammar masks on the CPU while it runs; launch the
drawing of tokens behind it; and, when the results are collected, decide the accepted run and commit it. Rank 0 draws
and the group shares what it drew, so ranks cannot part by drawing differently.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from engine.blackbox import BatchKind, BlackBox, EventKind, Phase, RequestFlag, request_hash
from engine.exec.device import Device, Event
from engine.exec.kv import KVPool
from engine.exec.layout import Segment, lay_out
from engine.exec.sampler import SamplingRow, prompt_logprobs, sample
from engine.exec.step import Laid, SequenceState, Step
from engine.faults import Faults
from engine.grammar.backends import GrammarError
from engine.grammar.budget import Budgeted, GrammarTooDear
from engine.scheduler.plan import Enter, Plan
from engine.scheduler.results import Results, RowResult
from engine.speculation.accept import Accepted, accept_run
from engine.speculation.drafters import Drafter

if TYPE_CHECKING:
    from collections.abc import Callable

    from engine.grammar.backends import GrammarBackend
    from engine.model.registry import Model
    from engine.parallel.group import Group


_HANDOVER_S = 0.00002


class Executor:
    """One rank's share of the work. ``grammar`` is set on rank 0 only, which alone draws tokens; ``grammar_step_s`` is the
    CPU time that one request's masks may take a step."""

    def __init__(self, *, model: Model, kv: KVPool, group: Group, device: Device, box: BlackBox, eos_ids: Sequence[int],
                 new_drafter: Callable[[], Drafter], grammar: GrammarBackend | None, loop: str, faults: Faults | None,
                 grammar_step_s: float = 0.01) -> None:  # fmt: skip
        self._model = model
        self._kv = kv
        self._group = group
        self._device = device
        self._box = box
        self._eos = frozenset(eos_ids)
        self._new_drafter = new_drafter
        self._grammar = grammar
        self._grammar_step_s = grammar_step_s
        self._loop = loop
        self._faults = faults
        self._sequences: dict[str, SequenceState] = {}

    @property
    def held(self) -> int:
        """Requests that this rank keeps state for."""
        return len(self._sequences)

    def launch(self, plan: Plan) -> Step:
        """Start a step; returns before it is done."""
        box = self._box
        box.enter(Phase.launch)
        for rid in plan.leaves:
            self._sequences.pop(rid, None)
        for enter in plan.enters:
            self._sequences[enter.rid] = self._take(enter)
        if not plan.rows:
            return Step(plan, [], None, masked=False, draws=0)
        if self._faults is not None:
            self._faults.begin_step()
        step, segments = self._lay_out(plan)
        self._record_begin(step)
        batch = lay_out(plan.step, segments, self._kv.page_size, self._device.torch_device)
        while self._faults is not None and self._group.rank > 0 and self._faults.again():
            batch = lay_out(plan.step, segments, self._kv.page_size, self._device.torch_device)
        self._device.stream.launch(lambda: self._forward(step, batch))
        if self._device.torch_device.type == "cpu":
            time.sleep(_HANDOVER_S)  # the stream thread needs the interpreter to begin: what follows here can wait for it
        masks = self._masks(step) if step.masked and self._grammar is not None else None
        box.enter(Phase.launch)
        rows = self._sampling_rows(step) if self._group.rank == 0 else []
        self._device.stream.launch(lambda: self._draw(step, rows, masks))
        step.event = self._device.stream.record()
        box.beat(step=plan.step)
        return step

    def collect(self, step: Step) -> Results:
        """Wait for the accepted run of a step and commit it."""
        if step.event is None:
            return Results(step.plan.step, (), 0, 0)
        self._box.enter(Phase.wait_device)
        if step.masked:
            self.grammar_barrier(step.event)
        else:
            step.event.synchronize()
        self._box.enter(Phase.grammar if step.masked else Phase.results)
        results = self._commit(step)
        self._box.event(EventKind.batch_end, step.plan.kind, len(step.rows), step.plan.step, results.useful, results.executed)
        self._box.beat(progress=True)
        return results

    def grammar_barrier(self, event: Event) -> None:
        """No mask can be made before the FSM has advanced by the last accepted run, which is still on the device."""
        event.synchronize()

    # Laying out.

    def _take(self, enter: Enter) -> SequenceState:
        drafter = self._new_drafter()
        drafter.extend(enter.tokens)
        matcher = None
        if enter.grammar and self._grammar is not None:
            matcher = Budgeted(self._grammar.matcher(enter.grammar), self._grammar_step_s)
            matcher.advance(enter.tokens[enter.prompt_length :])
        flags = (RequestFlag.grammar if enter.grammar else RequestFlag(0)) | (RequestFlag.warmup if enter.warmup else RequestFlag(0))
        stops = frozenset(enter.sampling.stop_token_ids) | (frozenset() if enter.sampling.ignore_eos else self._eos)
        return SequenceState(enter.rid, list(enter.tokens), enter.prompt_length, enter.sampling, enter.room, stops, drafter,
                         enter.logprobs, enter.prompt_logprobs, flags, matcher)  # fmt: skip

    def _lay_out(self, plan: Plan) -> tuple[Step, list[Segment]]:
        laid: list[Laid] = []
        segments: list[Segment] = []
        draws = 0
        for row in plan.rows:
            sequence = self._sequences[row.rid]
            if row.pages is not None:
                sequence.pages = np.asarray(row.pages, np.int32)
            start, drafts = row.start, []
            if row.count:
                sequence.kv_len = row.start
                tokens = sequence.tokens[row.start : row.start + row.count]
                wanted = len(tokens) if sequence.prompt_logprobs >= 0 else int(row.draws)
            else:
                start = sequence.kv_len
                if self._faults is not None:
                    start = self._faults.kv_length(start, loop=self._loop)
                tokens = sequence.tokens[start:]
                most = min(row.drafts, sequence.room_left - 1, len(sequence.pages) * self._kv.page_size - start - len(tokens))
                drafts = sequence.drafter.propose(most) if most > 0 else []
                tokens = tokens + drafts
                wanted = 1 + len(drafts)
            segments.append(Segment(tokens, int(start), sequence.pages, wanted))
            laid.append(Laid(row, sequence, drafts, len(tokens), draws if row.draws else -1))
            draws += 1 + len(drafts) if row.draws else 0
        masked = any(RequestFlag.grammar in one.sequence.flags and one.row.draws for one in laid)
        return Step(plan, laid, None, masked, draws), segments

    def _record_begin(self, step: Step) -> None:
        box, plan = self._box, step.plan
        box.event(EventKind.batch_begin, plan.kind, len(step.rows), plan.step, sum(one.fed for one in step.rows))
        for one in step.rows:
            flags = one.sequence.flags | (RequestFlag.prefill if one.row.count else RequestFlag(0))
            box.event(EventKind.batch_request, 0, int(flags), request_hash(one.row.rid), one.sequence.kv_len, one.fed, len(one.drafts))

    def _masks(self, step: Step) -> torch.Tensor:
        """Bit masks [draws, words] of the tokens that each grammar allows; all-ones rows for requests without one."""
        self._box.enter(Phase.grammar)
        assert self._grammar is not None
        masks = self._grammar.allocate_mask(step.draws)
        masks.fill_(-1)
        for one in step.rows:
            if one.first >= 0 and one.sequence.matcher is not None:
                rows = masks[one.first : one.first + 1 + len(one.drafts)]
                try:
                    one.sequence.matcher.masks(one.drafts, rows)
                except (GrammarError, RuntimeError) as error:  # xgrammar's own checks are RuntimeErrors
                    one.sequence.error = f"grammar: {error}"
                    one.sequence.blamed = isinstance(error, GrammarTooDear)
                    rows.fill_(-1)
        return masks

    def _sampling_rows(self, step: Step) -> list[SamplingRow]:
        rows = []
        for one in step.rows:
            if one.first >= 0:
                sequence = one.sequence
                for drafted in range(1 + len(one.drafts)):
                    rows.append(SamplingRow(
                        sampling=sequence.sampling, position=len(sequence.tokens) + drafted, tokens=sequence.tokens,
                        prompt_length=sequence.prompt_length, drafts=one.drafts[:drafted], eos_ids=self._eos,
                        logprobs=sequence.logprobs,
                    ))  # fmt: skip
        return rows

    # On the device stream.

    def _forward(self, step: Step, batch: object) -> None:
        box = self._box
        box.device_begin(step.plan.step)
        if self._faults is not None:
            self._faults.callback()
            for _ in range(self._faults.passes() - 1):
                self._model.forward(batch, self._kv, box.device_layer)  # type: ignore[arg-type]
        step.logits = self._model.forward(batch, self._kv, box.device_layer)  # type: ignore[arg-type]

    def _draw(self, step: Step, rows: list[SamplingRow], masks: torch.Tensor | None) -> None:
        logits = step.logits
        step.logits = None
        assert logits is not None
        if self._group.rank == 0:
            logits = self._score_prompts(step, logits)
            if rows and self._faults is not None:
                logits = self._faults.drawn_from(logits, [one.first for one in step.rows if one.first >= 0], step=step.plan.step)
            if rows:
                step.drawn = sample(logits, rows, masks)
        if self._group.world > 1 and step.draws:
            # Ids below 2**24 are exact in f32; every rank but the first adds zeros.
            shared = torch.zeros(step.draws, dtype=torch.float32, device=self._device.torch_device)
            if step.drawn is not None:
                shared += torch.tensor(step.drawn.tokens, dtype=torch.float32, device=self._device.torch_device)
            self._group.all_reduce(shared)
            step.shared = shared
        self._box.device_end(step.plan.step)

    def _score_prompts(self, step: Step, logits: torch.Tensor) -> torch.Tensor:
        """Take the log-probabilities of prompt tokens where they are wanted; returns the rows that draw."""
        if all(one.sequence.prompt_logprobs < 0 or not one.row.count for one in step.rows):
            return logits
        keep: list[int] = []
        at = 0
        for one in step.rows:
            row, sequence = one.row, one.sequence
            if row.count and sequence.prompt_logprobs >= 0:
                targets = sequence.tokens[row.start + 1 : row.start + row.count + 1][: sequence.prompt_length - row.start - 1]
                if targets:
                    step.scores[row.rid] = prompt_logprobs(logits[at : at + len(targets)], targets, sequence.prompt_logprobs)
                keep += [at + row.count - 1] if row.draws else []
                at += row.count
            else:
                width = (1 + len(one.drafts)) if row.draws else 0
                keep += range(at, at + width)
                at += width
        return logits[keep]

    # Committing.

    def _commit(self, step: Step) -> Results:
        drawn = self._drawn(step)
        logprobs = step.drawn.logprobs if step.drawn is not None else None
        results: list[RowResult] = []
        useful = 0
        shares = len(step.rows) > 1
        for one in step.rows:
            row, sequence = one.row, one.sequence
            sequence.scored += step.scores.get(row.rid, [])
            sequence.kv_len = sequence.kv_len + one.fed - len(one.drafts)
            if not row.draws:
                useful += one.fed
                results.append(RowResult(row.rid, (), "", None, sequence.kv_len))
                continue
            failed = 0 if sequence.error else self._failed(step, one)  # without a mask, what was drawn is no answer
            accepted = accept_run(
                one.drafts, drawn[one.first : one.first + 1 + len(one.drafts)], room=sequence.room_left, stops=sequence.stops
            )
            gained = len(accepted.tokens) - 1
            if self._faults is not None:
                gained = self._faults.committed(gained, masked=RequestFlag.grammar in sequence.flags,
                                                verify=step.plan.kind == BatchKind.verify, shared=shares)  # fmt: skip
            sequence.kv_len += gained
            sequence.tokens += accepted.tokens
            sequence.drafter.extend(accepted.tokens)
            self._box.event(EventKind.accepted, a=request_hash(row.rid), b=gained + 1, c=sequence.kv_len, d=step.plan.step)
            if failed is not None:
                accepted = Accepted(accepted.tokens[:failed])  # what was drawn from nothing is no answer
            elif sequence.matcher is not None:
                advanced = self._advance(sequence, accepted.tokens)
                self._box.event(EventKind.fsm_advance, a=request_hash(row.rid), b=advanced)
            useful += len(accepted.tokens) if not row.count else one.fed
            scores = logprobs[one.first : one.first + len(accepted.tokens)] if logprobs and sequence.logprobs >= 0 else ()
            results.append(RowResult(
                rid=row.rid, tokens=accepted.tokens, finish="error" if sequence.error else accepted.finish, matched=accepted.matched,
                kv_len=sequence.kv_len, drafted=len(one.drafts), logprobs=tuple(score for score in scores if score is not None),
                prompt_logprobs=tuple(sequence.scored), error=sequence.error, blamed=sequence.blamed,
            ))  # fmt: skip
        return Results(step.plan.step, tuple(results), sum(one.fed for one in step.rows), useful)

    def _failed(self, step: Step, one: Laid) -> int | None:
        """The place in a row's accepted run at which nothing could be drawn: the request ends there, with the reason.
        (A place behind a rejected draft is not reached, and accept_run does not come to it.)"""
        errors = step.drawn.errors if step.drawn is not None else {}
        for place in range(1 + len(one.drafts)):
            if one.first + place in errors:
                one.sequence.error = errors[one.first + place]
                return place
            if place < len(one.drafts) and step.drawn is not None and step.drawn.tokens[one.first + place] != one.drafts[place]:
                return None
        return None

    def _advance(self, sequence: SequenceState, tokens: Sequence[int]) -> int:
        """Move the FSM by an accepted run, once. A grammar that fails ends its request and no other."""
        assert sequence.matcher is not None
        try:
            return sequence.matcher.advance(tokens)
        except (GrammarError, RuntimeError) as error:
            sequence.error = sequence.error or f"grammar: {error}"
            return 0

    def _drawn(self, step: Step) -> list[int]:
        if step.drawn is not None:
            return step.drawn.tokens
        return [int(token) for token in step.shared.tolist()] if step.shared is not None else []
