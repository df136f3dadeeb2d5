"""Clients behind a gateway that answers by itself: found by a nonce that never arrives, and by requests that stop coming."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from monitors.fleet import Caller
from opsctl import cli
from opsctl.callers import path
from opsctl.callers.traffic import Rates
from opsctl.rollout import before
from opsctl.rollout.before import Before
from opsctl.rollout.probe import Api
from tests.opsctl.gateway import Gateway
from tests.opsctl.site import Site, wait_until

MakeSite = Callable[..., Site]


@pytest.fixture
def make_gateway() -> Iterator[Callable[..., Gateway]]:
    made: list[Gateway] = []

    def make(upstream: str, **how: Any) -> Gateway:
        made.append(Gateway(upstream, **how))
        return made[-1]

    yield make
    for one in made:
        one.close()


def caller(via: str, key_file: Path, more: str = "") -> str:
    return f"""[[deployment.d.caller]]
name = "triage"
request = {{ messages = [{{ role = "user", content = "one invoice" }}], response_format = {{ type = "json_object" }} }}
expect = "json"
via = "{via}"
api_key_file = "{key_file}"
{more}
"""


def callers(site: Site, *words: str) -> tuple[int, Any, str]:
    out, err = io.StringIO(), io.StringIO()
    code = cli.main(["callers", *words, "--fleet", str(site.folder / "fleet.toml"), "--json"], site.env, stdin=io.StringIO(),
                    stdout=out, stderr=err)  # fmt: skip
    return int(code), json.loads(out.getvalue()), err.getvalue()


def test_a_gateway_that_answers_over_the_new_400_is_found_by_a_nonce_that_never_arrived(
    make_site: MakeSite, make_gateway: Callable[..., Gateway], tmp_path: Path
) -> None:
    key = tmp_path / "key"
    key.write_text("sk-client\n")
    site = make_site()
    gateway = make_gateway(f"http://127.0.0.1:{site.port}", falls_back_on=(400,))
    site.fleet = caller(gateway.url, key, 'expect_change = { to = "http 400", review_by = 2999-01-31 }')
    site.write_fleet()
    well = site.apply("--set", "page-size=32")
    assert well.code == 0, well.err
    assert "a nonce through" in next(check["evidence"] for check in well.data["checks"] if check["name"] == "client path")
    ran = site.apply("--set", "grammar-backend=none")
    assert ran.code == 3, ran.err
    failed = ran.data["checks"][-1]
    assert (failed["name"], failed["data"]["verdicts"]) == ("client path", ["hosted_fallback"])
    assert "not by this server" in failed["evidence"]
    # The change is gone, the gateway hands on again; then it stops doing so, and the watch says so.
    assert callers(site, "watch", "--for", "0.5", "--every-s", "0.2")[0] == 0
    gateway.hosted = True
    code, answer, _ = callers(site, "watch", "--for", "20")
    assert code == 9 and answer["data"]["paths"] == {"triage": "hosted_fallback"} and answer["data"]["page_sent"] is True


def test_a_client_that_stops_asking_ends_the_watch_with_a_page_and_one_that_goes_on_does_not(make_site: MakeSite, tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("sk-client")
    site = make_site(fleet=caller("", key, 'expect_change = { to = "text", review_by = 2020-01-31 }'))
    who = hashlib.sha256(b"sk-client").hexdigest()[:8]
    assert callers(site, "watch", "--for", "1")[0] == 2  # nothing recorded yet
    before.write(site.folder / "state/lastbatch/rollouts/d", Before(at_utc="", rates=Rates(600, {who: 15.0})))
    stop = threading.Event()

    def client() -> None:
        body = {"messages": [{"role": "user", "content": "hello"}]}
        with httpx.Client(headers={"Authorization": "Bearer sk-client"}, timeout=5) as session:
            while not stop.wait(0.02):
                session.post(f"http://127.0.0.1:{site.port}/v1/chat/completions", json=body)

    thread = threading.Thread(target=client)
    thread.start()
    code, answer, _ = callers(site, "watch", "--for", "2", "--every-s", "0.5")
    stop.set()
    thread.join()
    assert code == 0, answer
    assert answer["data"]["callers"][0]["name"] == "triage" and answer["data"]["callers"][0]["seen"] >= 6
    assert "2020-01-31" in answer["data"]["overdue"][0] and answer["data"]["page_sent"] is True
    code, answer, _ = callers(site, "watch", "--for", "20", "--every-s", "0.2")
    assert code == 9 and answer["data"]["verdict"] == "hosted_fallback"
    assert "served elsewhere" in site.pages.got[-1]["title"] and "triage" in site.pages.got[-1]["message"]


def test_without_a_log_of_requests_the_token_counters_tell(make_site: MakeSite, make_gateway: Callable[..., Gateway]) -> None:
    site = make_site()
    api = Api(f"http://127.0.0.1:{site.port}")
    gateway = make_gateway(api.base)
    one = Caller(name="c", request={"messages": [{"role": "user", "content": "hello"}]}, via=gateway.url)

    def led() -> str:
        return path.follow(one, "n", 5.0, seen=None, counter=lambda: api.generated_tokens(("lastbatch:generation_tokens_total",))).kind

    assert led() == "here"
    gateway.hosted = True
    assert led() == "hosted_fallback"
    api.close()


def test_classes_are_recorded_at_rest_the_dangerous_ones_only_when_asked_for(make_site: MakeSite, tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("k")
    site = make_site(fleet=caller("", key, 'probe = "never-live"'))
    assert callers(site, "record")[1]["data"] == {"recorded": {}, "not_sent": ["triage"]}
    code, answer, _ = callers(site, "record", "--never-live")
    assert code == 0 and answer["data"]["recorded"]["triage"]["kind"] == "json"
    assert site.rollout("plan", "--set", "page-size=32").data["foreseen"][0]["before"] == "json"


def test_a_client_that_does_not_come_back_after_the_restart_is_flagged_in_the_window(make_site: MakeSite) -> None:
    site = make_site()

    def client() -> None:
        body = {"messages": [{"role": "user", "content": "x"}]}
        # The restart breaks it off: from then on it asks somebody else.
        with httpx.Client(headers={"Authorization": "Bearer k"}, timeout=5) as session, contextlib.suppress(httpx.HTTPError):
            while True:
                session.post(f"http://127.0.0.1:{site.port}/v1/chat/completions", json=body)
                time.sleep(0.02)

    def seconds() -> int:
        """In how many seconds of the server's log it has asked."""
        lines = site.services[0].log(site.services[0].snapshot().invocation_id)
        return len({line.text[:21] for line in lines if " req rid=" in line.text})

    thread = threading.Thread(target=client)
    thread.start()
    wait_until(lambda: seconds() >= 4, what="requests over some seconds")
    ran = site.apply("--set", "page-size=32", "--stable-s", "2")
    thread.join()
    assert ran.code == 3, ran.err
    window = ran.data["checks"][-1]
    assert (window["name"], window["outcome"]) == ("steady", "inconclusive")
    assert f"caller {hashlib.sha256(b'k').hexdigest()[:8]}: 0 requests" in window["evidence"]
