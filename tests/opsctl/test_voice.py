"""Whoever watches a rollout hears something at least every ten seconds, also while one question to a node is still out."""

from __future__ import annotations

import threading

from opsctl.service.voice import SILENCE_S, Voice


def test_a_silence_is_broken_with_what_is_waited_for_and_for_how_long() -> None:
    said: list[str] = []
    now = [0.0]
    voice = Voice(said.append, 9.0, lambda: now[0])
    voice("stopping lb.service@n1")
    for now[0] in (3.0, 8.9, 9.0, 12.0, 18.0):
        voice.remind()
    assert said[1:] == [
        "still at it after 9 s: stopping lb.service@n1",
        "still at it after 18 s: stopping lb.service@n1",
    ]
    with voice.quiet():
        now[0] = 90.0
        voice.remind()
    voice.remind()
    assert len(said) == 3 and SILENCE_S < 10


def test_it_speaks_while_the_command_itself_is_blocked_and_stops_with_it() -> None:
    heard = threading.Event()
    voice = Voice(lambda text: heard.set(), 0.02)
    with voice.kept_up():
        assert heard.wait(10)
    assert not any(thread.name == "voice" for thread in threading.enumerate())
