from __future__ import annotations

import pytest

from opsctl.rollout.probe import Api, ApiError
from opsctl.rollout.reply import degenerate


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("One, two.", ""),
        ("\ufffd" * 24, ""),
        ("!!!", ""),
        ("", "empty"),
        (" \n", "empty"),
        ("!" * 16, "one character"),
    ],
)
def test_an_answer_is_judged_by_its_form(text: str, why: str) -> None:
    assert (why in degenerate(text)) if why else degenerate(text) == ""


def test_a_server_that_is_not_there_is_not_healthy_and_every_other_question_says_where_it_was_asked() -> None:
    api = Api("http://127.0.0.1:9")
    assert api.healthy() is False
    for ask in (api.server_info, lambda: api.complete(1.0), lambda: api.generated_tokens(("x",))):
        with pytest.raises(ApiError, match=r"http://127\.0\.0\.1:9/"):
            ask()
    api.close()
