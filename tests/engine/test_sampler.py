"""The sampler: the distributions it draws from, its filters and penalties, and what its randomness depends on."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from engine.exec.noise import gumbel
from engine.exec.sampler import SamplingError, SamplingRow, prompt_logprobs, sample
from engine.grammar.masks import allocate_mask, set_only
from engine.messages import Sampling

LOGITS = torch.tensor([2.0, 1.0, 0.0, -1.0, 0.5, -3.0, 1.5, -math.inf])


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def row(seed: int = 0, position: int = 10, *, tokens: list[int] | None = None, prompt_length: int | None = None,
        drafts: tuple[int, ...] = (), eos_ids: tuple[int, ...] = (), logprobs: int = -1, **sampling: Any) -> SamplingRow:  # fmt: skip
    known = [0] * (position - len(drafts)) if tokens is None else tokens
    length = len(known) if prompt_length is None else prompt_length
    return SamplingRow(Sampling(seed=seed, max_tokens=100, **sampling), position, known, length, drafts, eos_ids, logprobs)


def draws(count: int, logits: torch.Tensor = LOGITS, **sampling: Any) -> torch.Tensor:
    """How often each token is drawn over ``count`` (seed, position) pairs."""
    rows = [row(seed, position, **sampling) for seed in range(count // 100) for position in range(100)]
    return torch.bincount(torch.tensor(sample(logits.repeat(count, 1), rows).tokens), minlength=logits.shape[0])


def assert_follows(counts: torch.Tensor, probabilities: torch.Tensor) -> None:
    """Chi-square at about 1 in 10,000 (Wilson-Hilferty); nothing may be drawn that has no probability."""
    possible = probabilities > 0
    assert int(counts[~possible].sum()) == 0
    expected = probabilities[possible] * counts.sum()
    statistic = float(((counts[possible] - expected) ** 2 / expected).sum())
    freedom = int(possible.sum()) - 1
    limit = freedom * (1 - 2 / (9 * freedom) + 3.72 * math.sqrt(2 / (9 * freedom))) ** 3 if freedom else 1e-9
    assert statistic < limit, f"chi-square {statistic:.1f} over {limit:.1f}: {counts.tolist()}"


def kept(probabilities: torch.Tensor, tokens: list[int]) -> torch.Tensor:
    only = torch.zeros_like(probabilities)
    only[tokens] = probabilities[tokens]
    return only / only.sum()


@pytest.mark.parametrize("temperature", [1.0, 0.5, 3.0])
def test_draws_follow_the_softmax_at_any_temperature(temperature: float) -> None:
    assert_follows(draws(20_000, temperature=temperature), torch.softmax(LOGITS / temperature, -1))


@pytest.mark.parametrize(
    ("filters", "tokens"),
    [
        ({"top_k": 3}, [0, 6, 1]),
        ({"top_p": 0.6}, [0, 6]),
        ({"top_p": 0.999}, [0, 1, 2, 3, 4, 5, 6]),
        ({"min_p": 0.3}, [0, 6, 1]),
        ({"top_k": 4, "top_p": 0.5}, [0, 6]),
        ({"min_p": 0.5, "top_p": 0.7}, [0, 6]),
        ({"top_p": 1e-9}, [0]),
        ({"top_k": 100}, [0, 1, 2, 3, 4, 5, 6]),
    ],
)
def test_filters_keep_the_tokens_they_should_and_their_proportions(filters: dict[str, Any], tokens: list[int]) -> None:
    assert_follows(draws(10_000, **filters), kept(torch.softmax(LOGITS, -1), tokens))


@pytest.mark.parametrize("vocab", [100, 1000, 6000])
def test_filters_reach_as_far_as_they_must_in_a_large_vocabulary(vocab: int) -> None:
    """Flat and peaked rows, few and many tokens left, against filters written the long way."""
    torch.manual_seed(vocab)
    wishes: list[dict[str, Any]] = [
        {"top_p": 0.3}, {"top_p": 0.95}, {"top_p": 0.9999}, {"top_p": 0.5, "temperature": 3.0},
        {"top_k": 50}, {"top_k": 700}, {"top_k": 5000}, {"top_k": vocab}, {"min_p": 0.2}, {"min_p": 0.001},
        {"min_p": 0.01, "top_k": 900, "top_p": 0.7}, {"top_k": 300, "top_p": 0.99},
    ]  # fmt: skip
    for spread in (0.01, 1.0, 5.0):
        logits = torch.randn(len(wishes), vocab) * spread
        rows = [row(seed, 7, **wish) for seed, wish in enumerate(wishes)]
        assert sample(logits.clone(), rows).tokens == [the_long_way(line, one) for line, one in zip(logits, rows, strict=True)]


def the_long_way(line: torch.Tensor, one: SamplingRow) -> int:
    s = one.sampling
    scaled = (line - line.max()) / s.temperature
    order = scaled.sort(descending=True).indices
    kept = [int(token) for token in order if math.exp(float(scaled[token])) >= s.min_p][: s.top_k or None]
    masses = torch.exp(scaled[kept].double())
    size = int((masses.cumsum(0) < s.top_p * masses.sum()).sum()) + 1 if s.top_p < 1 else len(kept)
    noisy = scaled + gumbel([(s.seed, one.position)], torch.arange(line.shape[0], dtype=torch.int32))[0]
    return max(kept[:size], key=lambda token: float(noisy[token]))


def test_large_vocabularies_are_drawn_evenly() -> None:
    counts = draws(20_000, torch.zeros(256))
    assert_follows(counts, torch.full((256,), 1 / 256))


def test_noise_is_independent_between_tokens_positions_and_seeds() -> None:
    ids = torch.arange(2000, dtype=torch.int32)
    noise = gumbel([(seed, position) for seed in (0, 1, 2**63) for position in (5, 6)], ids)
    correlation = torch.corrcoef(noise) - torch.eye(6)
    assert float(correlation.abs().max()) < 0.09
    assert abs(float(torch.corrcoef(torch.stack([noise[0, :-1], noise[0, 1:]]))[0, 1])) < 0.09
    assert float(noise.mean()) == pytest.approx(0.5772, abs=0.05)
    assert float(noise.var()) == pytest.approx(math.pi**2 / 6, abs=0.1)


def test_a_draw_depends_on_seed_and_position_only_and_not_on_what_shares_the_batch() -> None:
    torch.manual_seed(1)
    logits = torch.randn(6, 300)
    rows = [
        row(7, 3),
        row(8, 3, top_p=0.9),
        row(7, 4, temperature=0),
        row(7, 5, top_k=20, temperature=0.7),
        row(-5, 9, min_p=0.1),
        row(2**64 + 7, 3),
    ]
    together = sample(logits.clone(), rows).tokens
    assert together == [sample(logits[at : at + 1].clone(), [rows[at]]).tokens[0] for at in range(6)]
    torch.manual_seed(2)
    assert together[::-1] == sample(logits.flip(0).clone(), rows[::-1]).tokens


def test_rounding_differences_in_the_logits_hardly_ever_change_a_draw() -> None:
    torch.manual_seed(0)
    logits = torch.randn(400, 5000)
    rows = [row(3, position) for position in range(400)]
    assert sample(logits.clone(), rows).tokens == sample(logits + torch.randn_like(logits) * 1e-6, rows).tokens


def test_filtered_rows_draw_what_unfiltered_ones_would_where_the_token_is_left() -> None:
    torch.manual_seed(0)
    logits = torch.randn(200, 50)
    free = sample(logits.clone(), [row(1, position) for position in range(200)]).tokens
    best = logits.topk(25).indices.tolist()
    some = sample(logits.clone(), [row(1, position, top_k=25) for position in range(200)]).tokens
    agree = [(a, b) for a, b, top in zip(free, some, best, strict=True) if a in top]
    assert len(agree) > 100
    assert all(a == b for a, b in agree)


def test_verify_rows_draw_what_plain_decoding_draws() -> None:
    """With the drafts right, rows at later positions see the same history and give the same tokens."""
    torch.manual_seed(0)
    logits = torch.randn(4, 100)
    options: dict[str, Any] = {"temperature": 0.9, "frequency_penalty": 0.7, "presence_penalty": 0.3, "repetition_penalty": 1.3}
    text = [1, 2, 3]
    for at in range(4):
        text += sample(logits[at : at + 1].clone(), [row(5, len(text), tokens=list(text), prompt_length=2, **options)]).tokens
    output = text[3:]
    rows = [row(5, 3 + n, tokens=[1, 2, 3], prompt_length=2, drafts=tuple(output[:n]), **options) for n in range(4)]
    assert sample(logits.clone(), rows).tokens == output


@pytest.mark.parametrize("options", [{"temperature": 0.0}, {"temperature": 1e-30}, {"top_k": 1}, {"temperature": 1e-4}])
def test_greedy_takes_the_first_of_the_largest(options: dict[str, Any]) -> None:
    logits = torch.tensor([[0.0, 3.0, 2.0, 1.0]])
    assert sample(logits, [row(**options)]).tokens == [1]
    assert sample(torch.tensor([[0.0, 3.0, 3.0]]), [row(temperature=0)]).tokens == [1]


def test_bias_forces_and_bans() -> None:
    assert sample(LOGITS[None].clone(), [row(logit_bias={3: 100.0})]).tokens == [3]
    assert int(draws(2000, logit_bias={0: -100.0, 99999: 5.0})[0]) == 0


def test_repetition_looks_at_prompt_and_output_and_frequency_and_presence_at_output_only() -> None:
    logits = torch.tensor([[4.0, 3.0, -1.0, 2.0]])
    history: dict[str, Any] = {"tokens": [0, 1], "prompt_length": 1, "position": 2, "temperature": 0}
    assert sample(logits.clone(), [row(repetition_penalty=4.0, **history)]).tokens == [3]
    assert sample(logits.clone(), [row(presence_penalty=2.0, **history)]).tokens == [0]
    assert sample(logits.clone(), [row(presence_penalty=1.5, tokens=[0], prompt_length=0, position=1, temperature=0)]).tokens == [1]
    twice: dict[str, Any] = {"tokens": [0, 0], "prompt_length": 0, "position": 2, "temperature": 0}
    assert sample(logits.clone(), [row(frequency_penalty=0.4, **twice)]).tokens == [0]
    assert sample(logits.clone(), [row(frequency_penalty=0.6, **twice)]).tokens == [1]
    assert sample(torch.tensor([[-1.0, -1.5]]), [row(repetition_penalty=2.0, tokens=[0], position=1, temperature=0)]).tokens == [1]


def test_no_end_of_text_below_min_tokens() -> None:
    logits = torch.tensor([[9.0, 1.0, 8.0, 2.0]])
    options: dict[str, Any] = {"temperature": 0, "min_tokens": 3, "stop_token_ids": (2,), "eos_ids": (0,), "prompt_length": 8}
    assert sample(logits.clone(), [row(position=10, **options)]).tokens == [3]
    assert sample(logits.clone(), [row(position=11, **options)]).tokens == [0]


def test_a_complete_grammar_ends_even_below_min_tokens() -> None:
    masks = allocate_mask(1, 8)
    set_only(masks[0], [5])
    assert sample(LOGITS[None].clone(), [row(min_tokens=50, eos_ids=(5,))], masks).tokens == [5]


def test_masks_apply_to_their_rows() -> None:
    masks = allocate_mask(3, 8)
    set_only(masks[0], [5])
    set_only(masks[2], [3, 2])
    assert sample(LOGITS.repeat(3, 1), [row(temperature=0)] * 3, masks).tokens == [5, 0, 2]
    rows = [row(seed) for seed in range(200)]
    masks = allocate_mask(200, 8)
    for one in masks:
        set_only(one, [1, 5])
    counts = torch.bincount(torch.tensor(sample(LOGITS.repeat(200, 1), rows, masks).tokens), minlength=8)
    assert int(counts.sum()) == int(counts[[1, 5]].sum())


def test_logprobs_are_of_the_models_own_distribution() -> None:
    expected = torch.log_softmax(LOGITS, -1)
    rows = [row(logprobs=2, temperature=0.3, logit_bias={3: 100.0}), row(), row(logprobs=0, temperature=0)]
    first, second, third = sample(LOGITS.repeat(3, 1), rows).logprobs
    assert first is not None
    assert first.token == 3
    assert first.logprob == pytest.approx(float(expected[3]))
    assert [token for token, _ in first.top] == [0, 6]
    assert [logprob for _, logprob in first.top] == pytest.approx([float(expected[0]), float(expected[6])])
    assert second is None
    assert third is not None
    assert (third.token, third.top) == (0, [])


def test_prompt_logprobs_score_the_given_tokens() -> None:
    torch.manual_seed(0)
    logits = torch.randn(3, 20)
    scored = prompt_logprobs(logits, [4, 5, 6], 1)
    expected = torch.log_softmax(logits, -1)
    assert [one.logprob for one in scored] == pytest.approx([float(expected[n, 4 + n]) for n in range(3)])
    assert [one.top[0][0] for one in scored] == logits.argmax(-1).tolist()
    assert prompt_logprobs(logits[:0], [], 3) == []


def test_bfloat16_logits_are_taken() -> None:
    assert sample(torch.tensor([[0.0, 2.0, 1.0]], dtype=torch.bfloat16), [row(temperature=0, logprobs=1)]).tokens == [1]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_broken_logits_are_an_error_that_names_the_row(bad: float) -> None:
    logits = LOGITS.repeat(2, 1)
    logits[1, 4] = bad
    with pytest.raises(SamplingError, match=r"row\(s\) \[1\] hold NaN or infinity"):
        sample(logits, [row(temperature=0), row()])


@pytest.mark.parametrize("how", [{}, {"temperature": 0}, {"top_p": 0.5}, {"top_k": 2, "min_p": 0.1}])
def test_a_row_without_any_token_left_fails_alone(how: dict[str, Any]) -> None:
    logits = torch.stack([torch.full((8,), -math.inf), LOGITS[:8]])
    drawn = sample(logits, [row(**how), row(temperature=0)])
    assert "rule out the whole vocabulary" in drawn.errors[0]
    assert list(drawn.errors) == [0]
    assert drawn.tokens[1] == int(LOGITS[:8].argmax())


def test_a_penalty_near_zero_makes_no_logit_infinite() -> None:
    drawn = sample(torch.tensor([[0.0, 2.0, -3.0]]), [row(temperature=0, repetition_penalty=1e-45, tokens=[1, 2])])
    assert drawn.errors == {}
    assert drawn.tokens == [1]


def test_a_wrong_number_of_rows_is_refused() -> None:
    with pytest.raises(ValueError, match="2 rows"):
        sample(LOGITS[None], [row(), row()])
    assert sample(torch.zeros(0, 8), []).tokens == []
