"""Prompts by their token ids, so that server and reference read the same ones. A new seed is a cold prefix."""

from __future__ import annotations

import random
from collections.abc import Sequence

SCHEMA = {
    "type": "object",
    "properties": {
        "items": {
            "type": "array", "minItems": 6, "maxItems": 6,
            "items": {
                "type": "object",
                "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer", "minimum": 0, "maximum": 120},
                               "ok": {"type": "boolean"}},
                "required": ["name", "age", "ok"], "additionalProperties": False,
            },
        }
    },
    "required": ["items"], "additionalProperties": False,
}  # fmt: skip
QUESTION = "List six people as JSON with name, age and ok."
_PERIOD = 16


def random_ids(draw: random.Random, length: int, vocab: int) -> list[int]:
    """Ids with no pattern, from the upper part of the vocabulary (special tokens lie at its beginning)."""
    return [draw.randrange(min(300, vocab // 2), vocab) for _ in range(length)]


def repetitive_ids(draw: random.Random, length: int, vocab: int) -> list[int]:
    """One phrase of 16 random ids over and over, which a model goes on repeating."""
    phrase = random_ids(draw, _PERIOD, vocab)
    return (phrase * (length // _PERIOD + 1))[:length]


def several(draw: random.Random, count: int, length: int, vocab: int, *, repetitive: bool = False) -> Sequence[list[int]]:
    make = repetitive_ids if repetitive else random_ids
    return [make(draw, length, vocab) for _ in range(count)]
