"""The accepted run: what is accepted, where it is cut, and that nothing else is."""

from __future__ import annotations

import pytest

from engine.speculation.accept import accept_run


def test_a_plain_step_accepts_its_one_token() -> None:
    assert accept_run([], [5], room=9, stops=()).tokens == (5,)


def test_drafts_are_accepted_up_to_the_first_that_differs() -> None:
    assert accept_run([1, 2, 3], [1, 2, 9, 4], room=9, stops=()).tokens == (1, 2, 9)
    assert accept_run([1, 2, 3], [7, 2, 3, 4], room=9, stops=()).tokens == (7,)
    assert accept_run([1, 2, 3], [1, 2, 3, 4], room=9, stops=()).tokens == (1, 2, 3, 4)


def test_the_run_is_cut_at_a_stop_id() -> None:
    run = accept_run([1, 0, 3], [1, 0, 3, 4], room=9, stops={0})
    assert (run.tokens, run.finish, run.matched) == ((1, 0), "stop", 0)


def test_the_run_is_cut_at_the_room_that_is_left() -> None:
    run = accept_run([1, 2, 3], [1, 2, 3, 4], room=2, stops=())
    assert (run.tokens, run.finish) == ((1, 2), "length")


def test_a_stop_id_on_the_last_place_is_a_stop() -> None:
    assert accept_run([], [0], room=1, stops={0}).finish == "stop"


def test_a_wrong_number_of_drawn_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match="2 drafts need 3 drawn tokens, got 1"):
        accept_run([1, 2], [1], room=4, stops=())
    with pytest.raises(ValueError, match="room for 0"):
        accept_run([], [1], room=0, stops=())
