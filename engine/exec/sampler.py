"""From logits to tokens.

For each row, in this order: grammar mask, logit bias, minimum length, penalties (repetition, then frequency and
presence), temperature, min_p, top_k, top_p, and the draw. Log-probabilities are those of the model's own
distribution, before any of it, so that they do not depend on how a request samples.

A verify row draws from the target distribution at its position like any other row; a draft counts only if it is what
was drawn. So speculation changes when tokens come and never which.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import torch

from engine.exec.noise import gumbel
from engine.messages import Sampling, TokenLogprob

GREEDY_BELOW = 1e-5
"""A temperature below this is greedy: dividing by it would only overflow."""
_LARGE = 1e30  # a penalty may not make a logit infinite: that would look like a broken model
_HEADS = (256, 4096)
"""How many of the likeliest tokens are looked at before the whole vocabulary is: sorting all of it costs 30 times as much."""


class SamplingError(RuntimeError):
    """Logits from which nothing can be drawn: the model's output is broken, or a mask leaves no token."""


@dataclass(frozen=True)
class SamplingRow:
    """One token to draw.

    Attributes:
        position: its index in the request's text, prompt included; with the seed it decides the randomness.
        tokens: prompt and output so far (a view: read only while ``sample`` runs).
        prompt_length: how many of ``tokens`` are prompt.
        drafts: the drafted tokens between ``tokens`` and this one.
        eos_ids: the model's ends of text; with the request's stop ids they are banned below ``min_tokens``.
        logprobs: -1: none; 0: of the drawn token; k: and of the k likeliest.
    """

    sampling: Sampling
    position: int
    tokens: Sequence[int]
    prompt_length: int
    drafts: Sequence[int] = ()
    eos_ids: Collection[int] = field(default_factory=tuple)
    logprobs: int = -1

    @property
    def greedy(self) -> bool:
        return self.sampling.temperature < GREEDY_BELOW or self.sampling.top_k == 1

    @property
    def filtered(self) -> bool:
        s = self.sampling
        return s.top_k > 0 or s.top_p < 1 or s.min_p > 0

    @property
    def output_length(self) -> int:
        return self.position - self.prompt_length


@dataclass(frozen=True)
class Sampled:
    """One token a row; ``logprobs[i]`` is None where row i asked for none."""

    tokens: list[int]
    logprobs: list[TokenLogprob | None]
    errors: dict[int, str] = field(default_factory=dict)  # by row: why nothing could be drawn


def sample(logits: torch.Tensor, rows: Sequence[SamplingRow], masks: torch.Tensor | None = None) -> Sampled:
    """Draw one token for each row.

    Args:
        logits: [R, V]; consumed: the caller must not use it afterwards.
        masks: int32 [R, ceil(V / 32)] on the CPU, bit t of a row set where token t is allowed; None: all are.

    A row from which nothing can be drawn (a grammar or a bias rules out the whole vocabulary) gets an entry in
    ``errors`` and a token that means nothing; it is its request's affair and nobody else's.

    Raises:
        SamplingError: logits are not numbers: the model itself is broken.
    """
    if len(rows) != logits.shape[0]:
        raise ValueError(f"{len(rows)} rows for logits of {logits.shape[0]}")
    if not rows:
        return Sampled([], [])
    logits = logits.float()
    wanted = [at for at, row in enumerate(rows) if row.logprobs >= 0]
    raw = torch.log_softmax(logits[wanted], dim=-1) if wanted else None
    if masks is not None:
        from engine.grammar.masks import apply_masks  # needs xgrammar, which a server without grammars does not load

        apply_masks(logits, masks)
    for at, row in enumerate(rows):
        _edit(logits[at], row)
    best, greedy = logits.max(dim=-1)
    errors = _errors(best)
    tokens: list[int] = greedy.tolist()
    for draw, chosen in (
        (_draw_free, [at for at, row in enumerate(rows) if not row.greedy and not row.filtered and at not in errors]),
        (_draw_filtered, [at for at, row in enumerate(rows) if not row.greedy and row.filtered and at not in errors]),
    ):
        if chosen:
            scaled = _scaled(logits, best, rows, chosen)
            for at, token in zip(chosen, draw(scaled, [rows[at] for at in chosen]), strict=True):
                tokens[at] = token
    logprobs: list[TokenLogprob | None] = [None] * len(rows)
    if raw is not None:
        scored = _score(raw, [tokens[at] for at in wanted], [rows[at].logprobs for at in wanted])
        for at, one in zip(wanted, scored, strict=True):
            logprobs[at] = one
    return Sampled(tokens, logprobs, errors)


def prompt_logprobs(logits: torch.Tensor, targets: Sequence[int], k: int) -> list[TokenLogprob]:
    """Log-probabilities of the prompt's own tokens: ``logits[i]`` ([n, V]) predicts ``targets[i]``; with the k likeliest."""
    if not targets:
        return []
    return _score(torch.log_softmax(logits.float(), dim=-1), targets, [k] * len(targets))


def _score(logprobs: torch.Tensor, tokens: Sequence[int], wishes: Sequence[int]) -> list[TokenLogprob]:
    chosen = logprobs.gather(1, torch.tensor(tokens, device=logprobs.device)[:, None])[:, 0].tolist()
    most = min(max(wishes), logprobs.shape[1])
    tops: list[list[tuple[int, float]]] = [[]] * len(tokens)
    if most > 0:
        values, ids = logprobs.topk(most, dim=-1)
        tops = [list(zip(i, v, strict=True)) for i, v in zip(ids.tolist(), values.tolist(), strict=True)]
    return [TokenLogprob(token, logprob, top[: max(wish, 0)])
            for token, logprob, top, wish in zip(tokens, chosen, tops, wishes, strict=True)]  # fmt: skip


def _errors(best: torch.Tensor) -> dict[int, str]:
    """Rows with nothing to draw. ``best`` [R] is each row's maximum, which is NaN if anything in the row is."""
    if bool(torch.isfinite(best).all()):
        return {}
    bad: list[int] = torch.nonzero(~torch.isfinite(best)).squeeze(1).tolist()
    broken = [at for at in bad if not bool(torch.isneginf(best[at]))]
    if broken:
        raise SamplingError(f"logits of row(s) {broken} hold NaN or infinity: the weights or the forward pass are broken")
    return dict.fromkeys(bad, "no token may follow: the grammar or the biases rule out the whole vocabulary")


def _edit(line: torch.Tensor, row: SamplingRow) -> None:
    """Bias, minimum length and penalties, in place, on one row's logits [V]."""
    s = row.sampling
    vocab = line.shape[0]
    if s.logit_bias:
        kept = {token: bias for token, bias in s.logit_bias.items() if 0 <= token < vocab}
        line[_ids(kept, line)] += torch.tensor(list(kept.values()), dtype=line.dtype, device=line.device)
    if row.output_length < s.min_tokens:
        ends = _ids(sorted(token for token in {*row.eos_ids, *s.stop_token_ids} if 0 <= token < vocab), line)
        before = line[ends].clone()
        line[ends] = -torch.inf
        if bool(torch.isneginf(line.max())):
            line[ends] = before  # a grammar that is complete allows nothing but the end: it wins
    if s.repetition_penalty != 1:
        seen = _ids(sorted({*row.tokens, *row.drafts}), line)
        values = line[seen]
        scaled = torch.where(values > 0, values / s.repetition_penalty, values * s.repetition_penalty)
        line[seen] = scaled.clamp(-_LARGE, _LARGE).where(values > -torch.inf, values)  # what is ruled out stays so
    if s.frequency_penalty or s.presence_penalty:
        counts = Counter(row.tokens[row.prompt_length :])
        counts.update(row.drafts)
        if counts:
            times = torch.tensor(list(counts.values()), dtype=line.dtype, device=line.device)
            line[_ids(counts, line)] -= times * s.frequency_penalty + s.presence_penalty


def _ids(tokens: Collection[int], line: torch.Tensor) -> torch.Tensor:
    return torch.tensor(list(tokens), dtype=torch.int64, device=line.device)


def _scaled(logits: torch.Tensor, best: torch.Tensor, rows: Sequence[SamplingRow], at: Sequence[int]) -> torch.Tensor:
    """Logits of some rows over their temperatures, the maximum moved to 0 first so that nothing overflows."""
    temperatures = torch.tensor([rows[i].sampling.temperature for i in at], dtype=torch.float32, device=logits.device)
    return (logits[at] - best[at, None]) / temperatures[:, None]


def _draw_free(scaled: torch.Tensor, rows: Sequence[SamplingRow]) -> list[int]:
    """From the whole vocabulary."""
    ids = torch.arange(scaled.shape[1], dtype=torch.int32, device=scaled.device)
    drawn: list[int] = (scaled + gumbel(_keys(rows), ids)).argmax(dim=-1).tolist()
    return drawn


def _draw_filtered(scaled: torch.Tensor, rows: Sequence[SamplingRow]) -> list[int]:
    """From what min_p, top_k and top_p leave. The likeliest tokens are looked at first; rows that reach further get more."""
    vocab = scaled.shape[1]
    drawn = [0] * len(rows)
    left = list(range(len(rows)))
    for size in (*_HEADS, vocab):
        some = [rows[at] for at in left]
        values, ids = scaled[left].topk(size) if size < vocab else scaled[left].sort(dim=-1, descending=True)
        edge = _edge(scaled[left], values, [row.sampling for row in some])
        for at, token in zip(left, _draw_above(values, ids, edge, some), strict=True):
            drawn[at] = token
        if size >= vocab:
            break
        left = [at for at, further in zip(left, (values[:, -1] >= edge).tolist(), strict=True) if further]
        if not left:
            break
    return drawn


def _draw_above(values: torch.Tensor, ids: torch.Tensor, edge: torch.Tensor, rows: Sequence[SamplingRow]) -> list[int]:
    noisy = torch.where(values >= edge[:, None], values + gumbel(_keys(rows), ids.to(torch.int32)), -torch.inf)
    drawn: list[int] = ids.gather(1, noisy.argmax(dim=-1, keepdim=True))[:, 0].tolist()
    return drawn


def _keys(rows: Sequence[SamplingRow]) -> list[tuple[int, int]]:
    return [(row.sampling.seed, row.position) for row in rows]


def _edge(scaled: torch.Tensor, values: torch.Tensor, samplings: Sequence[Sampling]) -> torch.Tensor:
    """The least scaled logit, [R], that min_p, then top_k, then top_p let through.

    Tokens that tie with the last one let through come through too, so the order of equal logits cannot matter.

    Args:
        scaled: [R, V], maximum 0.
        values: [R, T], the T largest of each row in falling order. An edge that lies below them comes out at or below
            the last of them, which tells the caller to look further.
    """
    size = values.shape[1]

    def column(numbers: list[float]) -> torch.Tensor:
        return torch.tensor(numbers, dtype=torch.float64, device=values.device)

    min_p = column([min(s.min_p, 1.0) for s in samplings]).log().to(values.dtype)
    top_k = torch.tensor([min(s.top_k or scaled.shape[1], scaled.shape[1]) for s in samplings], device=values.device)
    kth = values.gather(1, (top_k - 1).clamp(max=size - 1)[:, None])[:, 0]
    edge = torch.maximum(min_p, torch.where(top_k <= size, kth, -torch.inf))
    if all(s.top_p >= 1 for s in samplings):
        return edge
    total = torch.where(scaled >= edge[:, None], scaled.exp(), 0).sum(dim=-1, dtype=torch.float64)
    mass = torch.where(values >= edge[:, None], values.exp(), 0).cumsum(dim=-1, dtype=torch.float64)
    top_p = column([s.top_p for s in samplings])
    short = (mass < (top_p * total)[:, None]).sum(dim=-1)
    # ``short`` is the index of the token with which top_p is reached; at ``size`` it lies further on, or rounding
    # alone keeps the sum below top_p and nothing is cut.
    nucleus = torch.where(short < size, values.gather(1, short.clamp(max=size - 1)[:, None])[:, 0], -torch.inf)
    return torch.where(top_p < 1, torch.maximum(edge, nucleus), edge)
