"""Keys, and the admin routes that only a key, or a drill on this host, opens."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from starlette.requests import Request

from engine.server.auth import Keys
from engine.server.errors import ApiError
from tests.engine.api_process import Api, api_process


@pytest.fixture(scope="module")
def keyed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    folder = tmp_path_factory.mktemp("api")
    api_key, admin_key = folder / "api.key", folder / "admin.key"
    api_key.write_text("client-key\n")
    admin_key.write_text("admin-key\n")
    with api_process(folder, "--enable-faults", "--api-key-file", str(api_key), "--admin-key-file", str(admin_key)) as api:
        yield api


@pytest.fixture(scope="module")
def drill(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    with api_process(tmp_path_factory.mktemp("api"), "--enable-faults", "--fault", "health.lie") as api:
        yield api


PROTECTED = [
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/completions"),
    ("GET", "/v1/models"),
    ("POST", "/tokenize"),
    ("GET", "/server_info"),
]


@pytest.mark.parametrize(("method", "path"), PROTECTED)
@pytest.mark.parametrize("sent", [None, "Bearer wrong", "Bearer admin-key", "Bearer", "Basic client-key", "Bearer clé"])
def test_client_routes_need_the_api_key(keyed: Api, method: str, path: str, sent: str | None) -> None:
    headers = {"authorization": sent.encode()} if sent else {}
    answer = keyed.client.request(method, path, headers=headers)
    assert "key" in keyed.refused(answer, 401, "invalid_api_key")


def test_with_the_key_it_answers_and_health_needs_none(keyed: Api) -> None:
    right = {"authorization": "Bearer client-key"}
    body = {"messages": [{"role": "user", "content": "Hi"}]}
    assert keyed.client.post("/v1/chat/completions", json=body, headers=right).status_code == 200
    assert keyed.client.get("/server_info", headers=right).status_code == 200
    for path in ("/health", "/health_generate", "/health_scheduler", "/metrics"):
        assert keyed.client.get(path).status_code == 200


def test_admin_routes_need_the_admin_key(keyed: Api) -> None:
    for sent in ("", "Bearer client-key"):
        keyed.refused(keyed.client.get("/admin/faults", headers={"authorization": sent}), 401, "invalid_admin_key")
    assert keyed.client.get("/admin/faults", headers={"authorization": "Bearer admin-key"}).json() == {"armed": []}


def test_faults_are_armed_listed_and_disarmed(drill: Api) -> None:
    assert drill.client.get("/admin/faults").json() == {"armed": ["health.lie"]}  # from the command line
    # Its health lies, so that is no sign of readiness.
    drill.scheduler.wait_for(lambda: drill.client.get("/server_info").json()["status"] == "ready", "ready")
    answer = drill.client.post("/admin/faults", json={"fault": "collective.skip:rank=1"})
    assert answer.json() == {"message": "armed", "armed": ["collective.skip:rank=1"]}
    drill.client.post("/admin/faults", json={"fault": "decode.slow"})
    assert drill.client.delete("/admin/faults?name=collective.skip").json()["armed"] == ["decode.slow"]
    assert drill.client.delete("/admin/faults").json()["armed"] == []
    assert drill.client.get("/admin/faults").json() == {"armed": []}


def test_what_the_scheduler_will_not_arm_is_a_400_with_its_reason(drill: Api) -> None:
    answer = drill.client.post("/admin/faults", json={"fault": "unknown.thing"})
    assert "unknown.thing" in drill.refused(answer, 400, "fault_refused", "fault")
    drill.refused(drill.client.post("/admin/faults", json={"spec": "x"}), 400, "unknown_parameter", "spec")


def test_without_enable_faults_and_without_an_admin_key_there_is_no_admin(tmp_path: Path) -> None:
    with api_process(tmp_path) as api:
        api.refused(api.client.get("/admin/faults"), 403, "admin_disabled")


def test_with_an_admin_key_but_without_enable_faults_there_are_no_faults(tmp_path: Path) -> None:
    with api_process(tmp_path, env={"LASTBATCH_ADMIN_KEY": "k"}) as api:
        api.refused(api.client.get("/admin/faults", headers={"authorization": "Bearer k"}), 403, "faults_disabled")


@pytest.mark.parametrize(
    ("host", "allowed"), [("127.0.0.1", True), ("127.8.8.8", True), ("::1", True), ("::ffff:127.0.0.1", True), ("10.0.0.1", False),
                          ("::ffff:10.0.0.1", False), ("somewhere", False), (None, False)]
)  # fmt: skip
def test_without_an_admin_key_only_this_host_may_run_drills(host: str | None, allowed: bool) -> None:
    request = Request({"type": "http", "headers": [], "client": (host, 1) if host else None})
    try:
        Keys(faults_enabled=True).check_admin(request)
        assert allowed
    except ApiError as error:
        assert (error.status, allowed) == (403, False)


def test_a_lie_keeps_health_at_200_through_a_shutdown(drill: Api) -> None:
    drill.client.post("/admin/faults", json={"fault": "health.lie"})
    drill.scheduler.script = drill.scheduler.hangs_after("x")
    with drill.client.stream("POST", "/v1/completions", json={"prompt": "x", "stream": True}):
        drill.process.terminate()
        drill.scheduler.wait_for(lambda: drill.chat(frobnicate=1).status_code == 503, "the drain")  # one taken before it would hang
        assert drill.client.get("/health").json() == {"status": "ready"}
    assert drill.process.wait(10) == 0
