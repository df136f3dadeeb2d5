"""Canaries: what their answers mean, and how they are asked of a real HTTP server."""

from __future__ import annotations

import http.server
import itertools
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from monitors import casefolder, fleet
from monitors.canaries import Canaries
from monitors.judge.canary import Answer, Canary
from monitors.judge.progress import Sample
from monitors.judge.verdict import Class
from monitors.observe import canary
from tests.monitors.cluster import until


def told(*answers: tuple[str, bool]) -> tuple[Canary, list[Answer]]:
    bird, found = Canary(), []
    for digest, loaded in answers:
        bird, answer = bird.take(digest, loaded=loaded)
        found.append(answer)
    return bird, found


def test_the_answer_is_recorded_at_rest_and_compared_under_load() -> None:
    bird, found = told(("x", True), ("a", False), ("a", False), ("a", True), ("a", True))
    assert bird.recorded == "a" and found[-2:] == [Answer.same, Answer.same]


def test_one_difference_is_a_near_tie_and_two_are_corruption() -> None:
    learnt = [("a", False), ("a", False)]
    _, found = told(*learnt, ("b", True), ("a", True))
    assert found[-2:] == [Answer.different, Answer.same]
    bird, found = told(*learnt, ("b", True), ("a", True), ("c", True))
    assert found[-1] is Answer.corrupt
    assert bird.wrong == 2 and bird.record() == {"recorded": "a", "under_load": ["b", "a", "c"]}


def test_what_a_canary_heard_is_judged_again_from_the_bundle(tmp_path: Path) -> None:
    """The verdict is the judge's, from what a bundle holds: a replay says the same."""
    (tmp_path / "health.txt").write_text("GET /health 200 0.002 s\n")
    (tmp_path / "progress.json").write_text(json.dumps({"canary": {"recorded": "a", "under_load": ["b", "a", "c"]}}))
    verdict = casefolder.judge(tmp_path)
    assert verdict.verdict is Class.health_lies and verdict.verdict.is_alarm and verdict.confidence >= 0.8
    assert "2 of the last 3 answers to the seeded canary" in verdict.evidence[0].text
    (tmp_path / "progress.json").write_text(json.dumps({"canary": {"recorded": "a", "under_load": ["a", "a"]}}))
    assert casefolder.judge(tmp_path).verdict is not Class.health_lies
    (tmp_path / "progress.json").write_text(json.dumps({"canary": "cut"}))
    assert casefolder.judge(tmp_path).verdict is not Class.health_lies


def test_differences_far_apart_are_not_added_up() -> None:
    far: list[tuple[str, bool]] = [("a", False), ("a", False), ("b", True), *[("a", True)] * 10, ("b", True)]
    assert told(*far)[1][-1] is Answer.different


def test_wrong_answers_that_go_on_are_declared_once_until_they_were_right_for_a_while(server: Asked, tmp_path: Path) -> None:
    """As the monitor asks: a bundle for each pair of wrong answers would push out the evidence of everything else."""
    api = f"http://127.0.0.1:{server.server_address[1]}"
    (tmp_path / "fleet.toml").write_text(f'[deployment.small]\nengine = "lastbatch"\napi = "{api}"\n[[deployment.small.node]]\nname = "a"\n'
                                         '[deployment.small.canary]\nload_every_s = 1\n')  # fmt: skip
    told: list[str] = []
    birds = Canaries(fleet.load(tmp_path / "fleet.toml").one(""), lambda event, **fields: told.append(str(fields.get("answer", event))))
    clock = itertools.count(0.0, 10.0)

    def answered(text: str, *, held: float, invocation: str = "first") -> dict[str, object] | None:
        """Send the next canary, and have it answered so."""
        server.text, before = text, len(told)
        found = None
        birds.turn(Sample(next(clock), held, 1, invocation=invocation))
        while len(told) == before:
            _, found = birds.turn(Sample(0.0, held, 1, invocation=invocation))
        return found

    for _ in range(2):
        answered("right", held=0)
    assert [answered("wrong", held=2) is None for _ in range(5)] == [True, False, True, True, True]
    assert all(answered("right", held=2) is None for _ in range(8))
    assert [answered("wrong", held=2) is None for _ in range(3)] == [True, False, True]
    assert [answered("wrong", held=2, invocation="second") is None for _ in range(3)] == [True, False, True]
    birds.close()


def test_a_server_that_does_not_repeat_itself_at_rest_is_said_to_be_unsteady() -> None:
    assert told(*((str(n), False) for n in range(8)))[1][-1] is Answer.unsteady


def test_another_answer_at_rest_is_another_server_and_is_learned_anew() -> None:
    bird, found = told(("a", False), ("a", False), ("z", False), ("z", False), ("z", True))
    assert bird.recorded == "z" and found[-1] is Answer.same


class Asked(http.server.ThreadingHTTPServer):
    prompts: list[str]
    text: str
    gate: threading.Event


@pytest.fixture
def server() -> Iterator[Asked]:
    class Handler(http.server.BaseHTTPRequestHandler):
        server: Asked

        def do_GET(self) -> None:
            self._give({"data": [{"id": "small"}]})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            self.server.prompts.append(body["prompt"])
            self.server.gate.wait(10)
            self._give({"choices": [{"text": f"{body['model']} {self.server.text}"}]})

        def _give(self, document: Any) -> None:
            data = json.dumps(document).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: object) -> None:
            """Not of interest."""

    made = Asked(("127.0.0.1", 0), Handler)
    made.prompts, made.text, made.gate = [], "six seven", threading.Event()
    made.gate.set()
    thread = threading.Thread(target=made.serve_forever)
    thread.start()
    yield made
    made.gate.set()
    made.shutdown()
    made.server_close()
    thread.join()


def flock(server: Asked, *, idle_s: float = 0.0, load_s: float = 0.0) -> canary.Flock:
    api = f"http://127.0.0.1:{server.server_address[1]}"
    return canary.Flock(api, idle_every_s=idle_s, load_every_s=load_s, deadline_s=10, headers={})


def test_nothing_is_sent_unless_asked_for(server: Asked) -> None:
    birds = flock(server)
    assert not birds.wanted
    for now in range(100):
        assert birds.turn(now, held=0, learned=False) is None
    birds.close()
    assert not server.prompts


def test_an_idle_server_gets_a_nonce_each_time_and_a_busy_one_gets_none(server: Asked) -> None:
    birds = flock(server, idle_s=30)
    assert birds.turn(0, held=2, learned=False) is None and birds.out_s is None
    assert birds.turn(1, held=0, learned=False) is None and birds.out_s == 1
    first, seeded, loaded = until(lambda: birds.turn(2, held=0, learned=False), "the answer")
    assert first.value is not None and first.value.nonce and not seeded and not loaded
    assert birds.turn(20, held=0, learned=False) is None and birds.out_s is None, "not so soon again"
    birds.turn(40, held=0, learned=False)
    until(lambda: birds.turn(41, held=0, learned=False), "the second answer")
    birds.close()
    assert len(set(server.prompts)) == 2


def test_the_seeded_canary_is_the_same_at_rest_and_under_load(server: Asked) -> None:
    birds = flock(server, load_s=30)
    birds.turn(0, held=0, learned=False)
    rest, seeded, loaded = until(lambda: birds.turn(1, held=0, learned=False), "the answer at rest")
    assert seeded and not loaded
    birds.turn(100, held=3, learned=True)
    busy, seeded, loaded = until(lambda: birds.turn(101, held=3, learned=True), "the answer under load")
    birds.close()
    assert seeded and loaded and busy.value.digest == rest.value.digest
    assert len(set(server.prompts)) == 1


def test_a_canary_that_is_not_answered_is_out_all_the_while(server: Asked) -> None:
    server.gate.clear()
    birds = flock(server, idle_s=5)
    birds.turn(0, held=0, learned=False)
    until(lambda: server.prompts, "the server has it")
    for now in range(1, 60):
        assert birds.turn(now, held=0, learned=False) is None and birds.out_s == 0
    birds.close()


def test_a_server_that_refuses_is_a_reason(server: Asked) -> None:
    reading = canary.ask("http://127.0.0.1:9", "small", seeded=True, deadline_s=2)
    assert reading.value is None and "canary" in reading.reason
