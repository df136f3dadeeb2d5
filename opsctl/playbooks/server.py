"""The deployment that a playbook acts on: its probes, its admin route for faults, its people."""

from __future__ import annotations

import httpx

from monitors import fleet, keyfile
from opsctl import cut
from opsctl.playbooks.actions import Place
from opsctl.playbooks.probes import Probes
from opsctl.playbooks.schema import Expectation
from opsctl.rollout.checks import Check
from opsctl.rollout.pager import UrlPager
from opsctl.rollout.result import Page

_LIFT_S = 15.0


class Deployed:
    def __init__(self, whole: fleet.Fleet, deployment: fleet.Deployment, place: Place) -> None:
        self._probes = Probes(deployment, place)
        self._pager = UrlPager(whole.page.urls)
        key = keyfile.read(deployment.admin_key_file) if deployment.admin_key_file else ""
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._admin = cut.client(deployment.api, headers)

    def close(self) -> None:
        self._probes.close()
        self._admin.close()

    def check(self, one: Expectation) -> Check:
        return self._probes.check(one)

    def arm(self, spec: str, deadline_s: float) -> None:
        self._faults("POST", deadline_s, json={"fault": spec})

    def lift(self) -> str:
        try:
            self._faults("DELETE", _LIFT_S)
        except OSError as error:
            return str(error)
        return ""

    def page(self, title: str, body: str, key: str) -> Page:
        return self._pager.page(title, body, key)

    def _faults(self, method: str, deadline_s: float, json: dict[str, str] | None = None) -> None:
        try:
            with cut.at_most(deadline_s) as limit:
                found = self._admin.request(method, "/admin/faults", json=json, timeout=deadline_s, extensions=limit.extensions)
        except httpx.HTTPError as error:
            raise OSError(f"{method} /admin/faults: {type(error).__name__}: {error}") from error
        if found.status_code != 200:
            raise OSError(f"{method} /admin/faults: HTTP {found.status_code}: {found.text[:200]}")
