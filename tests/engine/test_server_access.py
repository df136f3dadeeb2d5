"""The one log line of a request, and the ids that lead to it. Never a prompt, an answer or a key."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engine.api_process import Api, api_process

LINE = re.compile(
    r"^\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\] req rid=(?P<rid>\S+) caller=(?P<caller>[0-9a-f]{8}|-) shape=(?P<shape>\w+|-) "
    r"prompt_sha=(?P<sha>[0-9a-f]{8}|-) status=(?P<status>\d+) in=(?P<prompt>\d+) out=(?P<out>\d+) finish=(?P<finish>\w+)"
    r"(?: reason=(?P<reason>\w+))?$",
    re.MULTILINE,
)
SECRET = "correct-horse-battery"


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    with api_process(tmp_path_factory.mktemp("api"), "--enable-faults", env={"LASTBATCH_API_KEY": SECRET}) as api:
        api.client.headers["authorization"] = f"Bearer {SECRET}"
        yield api


def line_of(api: Api, rid: str) -> dict[str, str]:
    found: list[dict[str, str]] = []

    def there() -> bool:
        found[:] = [match.groupdict("") for match in LINE.finditer(api.log()) if match["rid"] == rid]
        return bool(found)

    api.scheduler.wait_for(there, f"the line of {rid}")
    assert len(found) == 1
    return found[0]


def sha(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def test_a_client_that_knows_its_nonce_finds_its_line(api: Api) -> None:
    api.scheduler.script = api.scheduler.says("Hello.")
    messages = [{"role": "user", "content": "earlier"}, {"role": "assistant", "content": "a"},
                {"role": "user", "content": [{"type": "text", "text": "nonce "}, {"type": "text", "text": "4711"}]}]  # fmt: skip
    answer = api.client.post("/v1/chat/completions", json={"messages": messages})
    line = line_of(api, answer.headers["x-request-id"])
    usage = answer.json()["usage"]
    assert line == {
        "rid": answer.json()["id"].removeprefix("chatcmpl-"), "caller": sha(SECRET), "shape": "text", "sha": sha("nonce 4711"),
        "status": "200", "prompt": str(usage["prompt_tokens"]), "out": str(usage["completion_tokens"]), "finish": "stop", "reason": "",
    }  # fmt: skip


def test_the_shape_and_the_end_of_other_requests(api: Api) -> None:
    api.scheduler.script = api.scheduler.says("a b c d")
    tool = {"type": "function", "function": {"name": "f"}}
    for rid, route, body, expected in (
        ("json-1", "chat/completions", {"response_format": {"type": "json_object"}, "max_tokens": 2}, ("json", "200", "length")),
        ("tool-1", "chat/completions", {"tools": [tool], "stream": True}, ("tool", "200", "stop")),
        ("regex-1", "chat/completions", {"regex": "a"}, ("grammar", "200", "stop")),
        ("long-1", "chat/completions", {"max_tokens": 4000}, ("text", "400", "refused", "context_length_exceeded")),
        ("bad-1", "chat/completions", {"frob": 1}, ("-", "400", "refused", "unknown_parameter")),
        ("plain-1", "completions", {"prompt": "p"}, ("text", "200", "stop")),
        ("ids-1", "completions", {"prompt": [5, 6]}, ("text", "200", "stop")),
    ):
        parameters = body if "prompt" in body else {"messages": [{"role": "user", "content": "p"}], **body}
        api.client.post(f"/v1/{route}", json=parameters, headers={"x-request-id": rid})
        line = line_of(api, rid)
        assert (line["shape"], line["status"], line["finish"], line["reason"]) == (*expected, "")[:4], rid
    assert line_of(api, "plain-1")["sha"] == sha("p")
    assert line_of(api, "ids-1")["sha"] == sha("5 6")


@pytest.mark.parametrize("asked", ["", "a b", "x" * 129, "-x", "rid=1", "%0a"])
def test_an_id_that_could_forge_a_line_is_not_taken(api: Api, asked: str) -> None:
    answer = api.client.get("/health", headers={"x-request-id": asked})
    assert re.fullmatch(r"[0-9a-f]{32}", answer.headers["x-request-id"])


def test_an_id_of_the_schedulers_own_requests_is_told_apart(api: Api) -> None:
    answer = api.client.post("/v1/completions", json={"prompt": "Hi"}, headers={"x-request-id": "warmup-text"})
    assert answer.headers["x-request-id"] == "client-warmup-text"
    assert api.scheduler.requests[-1].rid == "client-warmup-text"
    assert line_of(api, "client-warmup-text")["status"] == "200"


def test_no_prompt_no_answer_and_no_key_is_logged(api: Api) -> None:
    api.scheduler.script = api.scheduler.says("an answer to keep")
    assert api.chat("a prompt to keep").status_code == 200
    assert api.client.post("/v1/chat/completions", content=b'{"messages": "a prompt to keep"').status_code == 400
    assert api.client.post("/admin/faults", json={"fault": "decode.slow:factor=3"}).status_code == 200
    assert api.chat("last").status_code == 200
    log = api.log()
    for word in ("to keep", SECRET, "decode.slow", "fault"):
        assert word not in log


def test_a_key_from_the_environment_is_in_it_no_more(api: Api) -> None:
    environ = Path(f"/proc/{api.process.pid}/environ").read_bytes()
    assert b"LASTBATCH_SETTINGS=" in environ, "nothing could be read, so nothing is shown"
    assert SECRET.encode() not in environ
