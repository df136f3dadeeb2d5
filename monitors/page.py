"""Tell people. Any service that apprise knows, by the URLs of the fleet file's [page] table."""

from __future__ import annotations

import concurrent.futures
import functools
import logging
import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

Kind = Literal["failure", "warning", "success"]  # apprise's words, by which a service picks its colour or its priority
_DEADLINE_S = 20.0
_USERINFO = re.compile(r"//[^/\s]*@")


@dataclass(frozen=True)
class Paged:
    """``sent`` is None when no page was due (nobody to send it to is False: a page was due and did not go out)."""

    sent: bool | None
    reason: str = ""


def send(urls: Sequence[str], title: str, body: str, *, kind: Kind = "warning", deadline_s: float = _DEADLINE_S) -> Paged:
    """Send to every URL, all at once. ``sent`` is true when at least one took it; ``reason`` names those that did not,
    without their credentials."""
    if not urls:
        return Paged(False, "the fleet file has no [page] urls")
    _apprise()  # here and not in a worker: warning filters belong to the whole process
    pool = concurrent.futures.ThreadPoolExecutor(len(urls))
    try:
        jobs = {pool.submit(_one, url, title, body, kind): url for url in urls}
        done, late = concurrent.futures.wait(jobs, timeout=deadline_s)
        problems = [f"{_safe(jobs[job])}: no answer in {deadline_s:.0f} s" for job in late]
        problems += [f"{_safe(jobs[job])}: {job.result()}" for job in done if job.result()]
        return Paged(len(problems) < len(urls), "; ".join(problems))
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _one(url: str, title: str, body: str, kind: Kind) -> str:
    """Why the page did not go out; empty when it did."""
    apprise = _apprise()
    try:
        sender = apprise.Apprise()
        if not sender.add(url):
            return "apprise knows no such address; see the list of services in its documentation"
        with apprise.LogCapture(level=logging.WARNING) as log:
            if sender.notify(body=body, title=title, notify_type=kind):
                return ""
            said = " ".join(log.getvalue().split())
            return said[-300:] or "the service did not take it"
    except Exception as error:  # a plug-in's own fault is one more reason why a page did not go out
        return f"{type(error).__name__}: {error}"


@functools.cache
def _apprise() -> Any:
    """apprise with its plug-ins loaded. Some of them import what this Python deprecates; that is not our caller's
    matter. Imported late, since a monitor that never pages need not pay for it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        import apprise

        apprise.Apprise().add("json://localhost/")
    return apprise


def _safe(url: str) -> str:
    """An address without its path's tokens and its password."""
    scheme, _, rest = _USERINFO.sub("//", url).partition("://")
    return f"{scheme}://{rest.split('/')[0].split('?')[0]}"
