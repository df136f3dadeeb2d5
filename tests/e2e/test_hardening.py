"""What one client, one neighbour or one look into /proc must not be able to do to a server, on one that really runs."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from tests.e2e.serving import Served, serving, wait_for
from tests.tiny_models import EOS_ID, tiny_model

SECRETS = {"LASTBATCH_API_KEY": "sk-of-a-client-0123456789", "LASTBATCH_ADMIN_KEY": "sk-of-an-admin-0123456789"}
BOMB = "(a|b)?" * 1500
"""A third of it takes 5 s, and the time grows with the cube of the length."""
AMBIGUOUS = 'root ::= s\ns ::= s s s | s s | "a" | "b" | "ab"'


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("server")
    with serving(tiny_model(folder / "model", layers=2), folder, "--grammar-compile-timeout", "1", env=SECRETS) as found:
        yield found


def ask(served: Served, **body: object) -> httpx.Response:
    headers = {"Authorization": f"Bearer {SECRETS['LASTBATCH_API_KEY']}"}
    with httpx.Client(base_url=served.url, timeout=60, headers=headers) as client:
        return client.post("/v1/completions", json={"prompt": "x", "temperature": 0, **body})


def test_keys_from_the_environment_count_and_are_in_no_environment_any_more(served: Served) -> None:
    with served.client as client:
        assert client.post("/v1/completions", json={"prompt": "x"}).status_code == 401
    assert ask(served, max_tokens=2).status_code == 200
    family = [psutil.Process(served.process.pid), *served.descendants()]
    assert len(family) >= 3
    for process in family:
        environ = Path(f"/proc/{process.pid}/environ").read_bytes()
        assert b"XDG" in environ or b"PATH" in environ, "nothing could be read, so nothing is shown"
        assert not any(key.encode() in environ for key in SECRETS.values()), process.cmdline()


def test_a_grammar_without_an_end_is_refused_in_time_and_nothing_computes_on(served: Served) -> None:
    begun = time.monotonic()
    answer = ask(served, regex=BOMB, max_tokens=20)
    assert answer.status_code == 400, answer.text
    assert "takes more than 1 s to compile" in answer.json()["error"]["message"] or "too much memory" in answer.json()["error"]["message"]
    assert time.monotonic() - begun < 15
    assert ask(served, regex="(ab){2,4}", max_tokens=20).status_code == 200, "the next one is tried"
    trials = [one for one in served.descendants() if one.cmdline()[:1] == ["grammar-trial"]]
    assert len(trials) == 1, "the small parent alone is left"
    rank = psutil.Process(served.rank_pid(0))
    before = rank.cpu_times().user + rank.cpu_times().system
    threading.Event().wait(1.0)
    assert rank.cpu_times().user + rank.cpu_times().system - before < 0.5


def test_an_ambiguous_grammar_ends_its_own_request_and_its_neighbour_goes_on(served: Served) -> None:
    answers: list[httpx.Response] = []
    neighbour = threading.Thread(target=lambda: answers.append(ask(served, max_tokens=600, ignore_eos=True)))
    neighbour.start()
    wait_for(lambda: served.box(0).host.running, 20, "the neighbour to run")
    dear = ask(served, ebnf=AMBIGUOUS, max_tokens=900, logit_bias={str(EOS_ID): -100})
    assert dear.status_code == 400, dear.text
    assert "--grammar-step-budget" in dear.json()["error"]["message"]
    neighbour.join(60)
    assert answers and answers[0].json()["usage"]["completion_tokens"] == 600
