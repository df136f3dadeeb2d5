"""The compile pool under an injected clock, and the cache."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from engine.grammar.cache import CompileCache
from engine.grammar.compiling import CompilePool, Outcome
from engine.messages import Grammar

DEADLINE_S = 10.0


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Gates:
    """A compiler whose compilations end when the test lets them."""

    def __init__(self) -> None:
        self.events: dict[str, threading.Event] = {}
        self.calls: list[str] = []

    def __call__(self, grammar: Grammar) -> str:
        self.calls.append(grammar.text)
        assert self.events.setdefault(grammar.text, threading.Event()).wait(DEADLINE_S)
        if grammar.text == "bad":
            raise ValueError("bad it is")
        if grammar.text == "worse":
            raise KeyError("lost")
        return grammar.text.upper()

    def open(self, *texts: str) -> None:
        for text in texts:
            self.events.setdefault(text, threading.Event()).set()


def until(pool: CompilePool[str], good: Callable[[list[Outcome[str]]], bool]) -> list[Outcome[str]]:
    found: list[Outcome[str]] = []
    end = time.monotonic() + DEADLINE_S
    while not good(found):
        assert time.monotonic() < end, f"only {found}"
        found += pool.poll()
        threading.Event().wait(0.001)
    return found


def submit(pool: CompilePool[str], *texts: str) -> None:
    for text in texts:
        pool.submit(text, Grammar("regex", text))


def test_grammars_compile_once_each_and_failures_have_their_reason() -> None:
    gates = Gates()
    pool = CompilePool(gates, timeout_s=5, clock=Clock())
    submit(pool, "a", "a", "bad", "worse", "a")
    gates.open("a", "bad", "worse")
    found = {one.key: one for one in until(pool, lambda found: len(found) == 3)}
    assert found["a"] == Outcome("a", "A")
    assert found["bad"] == Outcome("bad", None, "bad it is")
    assert found["worse"].error == "the grammar compiler failed: KeyError: 'lost'"
    assert sorted(gates.calls) == ["a", "bad", "worse"]
    assert pool.close(DEADLINE_S)


def test_an_overrun_is_reported_its_late_end_too_and_meanwhile_the_same_grammar_is_refused() -> None:
    gates, clock = Gates(), Clock()
    pool = CompilePool(gates, timeout_s=5, clock=clock)
    submit(pool, "slow")
    clock.now = 5.0
    assert pool.poll() == []
    clock.now = 5.1
    assert pool.poll() == [Outcome("slow", None, "the grammar takes more than 5 s to compile (--grammar-compile-timeout)")]
    submit(pool, "slow", "a")
    gates.open("a")
    found = {one.key: one for one in until(pool, lambda found: len(found) == 2)}
    assert "takes more than 5 s" in found["slow"].error
    assert found["a"].compiled == "A"
    gates.open("slow")
    assert until(pool, lambda found: len(found) == 1) == [Outcome("slow", "SLOW", late=True)]
    assert pool.close(DEADLINE_S)


def test_too_many_overruns_refuse_what_waits_and_what_comes_until_one_ends() -> None:
    gates, clock = Gates(), Clock()
    pool = CompilePool(gates, timeout_s=5, clock=clock, workers=2, max_abandoned=2)
    submit(pool, "x", "y", "z")
    clock.now = 6.0
    outcomes = {one.key: one.error for one in pool.poll()}
    assert set(outcomes) == {"x", "y", "z"}
    assert outcomes["z"] == "no grammar can be compiled now: earlier ones overran their time and still run"
    submit(pool, "a")
    assert pool.poll()[0].error == outcomes["z"]
    gates.open("x")
    until(pool, lambda found: any(one.late for one in found))
    gates.open("a")
    submit(pool, "a")
    assert until(pool, lambda found: len(found) == 1) == [Outcome("a", "A")]
    assert not pool.close(0.0)
    gates.open("y")
    assert pool.close(DEADLINE_S)


def test_the_deadline_counts_from_when_a_compilation_begins_and_the_queue_is_bounded() -> None:
    gates, clock = Gates(), Clock()
    pool = CompilePool(gates, timeout_s=5, clock=clock, workers=1, max_waiting=1)
    submit(pool, "a", "b", "c")
    assert pool.poll() == [Outcome("c", None, "no grammar can be compiled now: 1 others wait", busy=True)]
    clock.now = 4.0
    gates.open("a")
    assert until(pool, lambda found: len(found) == 1)[0].key == "a"
    clock.now = 8.0
    assert pool.poll() == []
    gates.open("b")
    assert until(pool, lambda found: len(found) == 1)[0].compiled == "B"
    assert pool.close(DEADLINE_S)


def test_the_cache_gives_up_the_least_recently_used_and_first_what_nobody_needs() -> None:
    cache: CompileCache[str] = CompileCache(limit_bytes=30)
    for key in "abc":
        assert cache.put(key, key.upper(), 10) == []
        cache.need(key)
    cache.release("b")
    assert cache.get("a") == "A"
    assert cache.put("d", "D", 10) == ["b"]
    assert cache.put("e", "E", 10) == ["d"]
    assert cache.put("f", "F", 25) == ["e", "c", "a"]
    assert (cache.bytes, cache.get("a"), "f" in cache) == (25, None, True)
    assert cache.put("f", "F", 99) == []
    assert cache.get("f") == "F"
