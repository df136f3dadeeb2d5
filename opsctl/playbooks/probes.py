"""Measuring what a playbook expects: each probe answers passed, failed, inconclusive or error, with its evidence."""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Callable, Mapping
from typing import Any

import httpx

from monitors import fleet, keyfile
from opsctl import commandline, cut
from opsctl.playbooks.actions import Place, executable
from opsctl.playbooks.process import end_in
from opsctl.playbooks.schema import Expectation
from opsctl.playbooks.tolerances import tolerated
from opsctl.rollout.checks import Check, failed, inconclusive, passed
from opsctl.rollout.checks import run as answered
from opsctl.rollout.probe import Api, ApiError

_CONNECT_S = 5.0
_SCHEMA = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"], "additionalProperties": False}


class Probes:
    """The probes of one deployment."""

    def __init__(self, deployment: fleet.Deployment, place: Place) -> None:
        self._place = place
        key = keyfile.read(deployment.api_key_file) if deployment.api_key_file else ""
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._api = Api(deployment.api, key)
        self._client = cut.client(deployment.api, headers)
        self._probes: Mapping[str, Callable[[dict[str, Any]], Check]] = {
            "answer": self._answer, "refusal": self._refusal, "constrained": self._constrained, "health": self._health,
            "ranks": self._ranks, "one_configuration": self._one_configuration, "setting": self._setting, "command": self._command,
        }  # fmt: skip

    def close(self) -> None:
        self._api.close()
        self._client.close()

    def check(self, one: Expectation) -> Check:
        try:
            return answered(one.probe, lambda: self._probes[one.probe](tolerated(one)))
        except RecursionError:
            return failed(one.probe, "an answer that nests without end")

    def _answer(self, tolerance: dict[str, Any]) -> Check:
        found = self._api.complete(tolerance["within_s"])
        said = f"{len(found.text)} characters in {found.seconds:.2f} s"
        return passed("answer", said, seconds=found.seconds) if found.text.strip() else failed("answer", "an empty text")

    def _refusal(self, tolerance: dict[str, Any]) -> Check:
        status, text, seconds = self._ask_for_json(tolerance["within_s"])
        said = f"HTTP {status} in {seconds:.2f} s"
        good = status == tolerance["status"]
        return passed("refusal", said, seconds=seconds) if good else failed("refusal", f"{said}, not {tolerance['status']}: {text[:200]}")

    def _constrained(self, tolerance: dict[str, Any]) -> Check:
        status, text, seconds = self._ask_for_json(tolerance["within_s"])
        if status != 200:
            return failed("constrained", f"HTTP {status}: {text[:200]}")
        try:
            fits = isinstance(json.loads(json.loads(text)["choices"][0]["message"]["content"])["ok"], bool)
        except (ValueError, LookupError, TypeError):
            fits = False
        return passed("constrained", f"JSON that fits in {seconds:.2f} s") if fits else failed("constrained", "an answer that does not fit")

    def _ask_for_json(self, within_s: float) -> tuple[int, str, float]:
        form = {"type": "json_schema", "json_schema": {"name": "probe", "schema": _SCHEMA}}
        body = {"model": self._api.model(), "messages": [{"role": "user", "content": "Say whether all is well."}], "max_tokens": 32,
                "temperature": 0, "response_format": form}  # fmt: skip
        begun = time.monotonic()
        status, text = self._request("POST", "/v1/chat/completions", within_s, json=body)
        return status, text, time.monotonic() - begun

    def _health(self, tolerance: dict[str, Any]) -> Check:
        return self._status("health", "/health", tolerance["within_s"])

    def _ranks(self, tolerance: dict[str, Any]) -> Check:
        return self._status("ranks", "/health_scheduler", tolerance["within_s"])

    def _status(self, name: str, route: str, within_s: float) -> Check:
        status, text = self._request("GET", route, within_s)
        if status == 404:
            return inconclusive(name, f"the server has no {route}")
        said = f"GET {route}: HTTP {status}"
        return passed(name, said) if status == 200 else failed(name, f"{said}: {text[:200]}")

    def _one_configuration(self, tolerance: dict[str, Any]) -> Check:
        ranks = self._info().get("ranks") or []
        digests = {str(rank.get("config_digest", ""))[:12] for rank in ranks}
        if not ranks or "" in digests:
            return inconclusive("one_configuration", "/server_info does not say what each rank runs with")
        said = ", ".join(f"rank {rank['rank']} {rank['config_digest'][:12]}" for rank in ranks)
        return passed("one_configuration", said) if len(digests) == 1 else failed("one_configuration", said)

    def _setting(self, tolerance: dict[str, Any]) -> Check:
        name, wanted = str(tolerance["name"]), tolerance["is"]
        found: Any = self._info().get("config")
        for part in name.split("."):
            if not isinstance(found, dict) or part not in found:
                return inconclusive("setting", f"/server_info says nothing of {name}")
            found = found[part]
        said = f"{name} is {found!r}"
        return passed("setting", said) if found == wanted else failed("setting", f"{said}, not {wanted!r}")

    def _command(self, tolerance: dict[str, Any]) -> Check:
        command = commandline.filled(str(tolerance["run"]), self._place.variables)
        ran = end_in(executable(command), tolerance["within_s"], env=self._place.env)
        expects = tolerance["expects"] if isinstance(tolerance["expects"], list) else [tolerance["expects"]]
        said = f"{shlex.join(command)}: {ran.ending}"
        return passed("command", said) if ran.code in expects else failed("command", f"{said}; {ran.said[-300:]}")

    def _info(self) -> dict[str, Any]:
        status, text = self._request("GET", "/server_info", _CONNECT_S)
        try:
            info = json.loads(text) if status == 200 else None
        except ValueError:
            info = None
        return info if isinstance(info, dict) else {}

    def _request(self, method: str, route: str, within_s: float, **more: Any) -> tuple[int, str]:
        """Status and text. Raises ApiError when they do not come in time: ``within_s`` holds for the whole of it."""
        timeout = httpx.Timeout(within_s, connect=min(_CONNECT_S, within_s))
        try:
            with cut.at_most(within_s) as limit:
                found = self._client.request(method, route, timeout=timeout, extensions=limit.extensions, **more)
                return found.status_code, found.content.decode(errors="replace")
        except httpx.HTTPError as error:
            raise ApiError(f"{method} {route}: {type(error).__name__}: {error} (at most {within_s:g} s)") from error
