"""Who is told when a rollout did not end as wished: the fleet file's page URLs. What did not get out stays owed."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Sequence
from pathlib import Path

from monitors import page
from opsctl.rollout.result import Page
from opsctl.service.manager import ServiceError, ServiceManager


class UrlPager:
    """Any apprise URL. A page that is due and cannot go out is said in the result, and written down in ``owed``: the
    next opsctl that comes by sends it."""

    def __init__(self, urls: Sequence[str], owed: Path | None = None) -> None:
        self._urls, self._owed = tuple(urls), owed

    def page(self, title: str, body: str, key: str) -> Page:
        """``key`` names the incident, the same in every page of one rollout."""
        found = self._send(title, f"{body}\n[{key}]")
        if not found.sent and self._owed is not None and self._urls:
            self._owe(title, f"{body}\n[{key}]")
        return found

    def _send(self, title: str, body: str) -> Page:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of modules that apprise imports when it first parses a URL
            sent = page.send(self._urls, title, body)
        return Page(sent.sent, sent.reason)

    def _owe(self, title: str, body: str) -> None:
        assert self._owed is not None
        self._owed.mkdir(parents=True, exist_ok=True, mode=0o700)
        text = f"{title}\n{body}\n"
        (self._owed / hashlib.sha256(text.encode()).hexdigest()[:16]).write_text(text)

    def owed(self) -> tuple[str, ...]:
        """Titles of what is owed on this machine."""
        files = sorted(self._owed.glob("*")) if self._owed is not None and self._owed.is_dir() else []
        return tuple(file.read_text().partition("\n")[0] for file in files)

    def settle(self, managers: Sequence[ServiceManager]) -> tuple[str, ...]:
        """Send what is owed here and on the services' machines; what happened, one line each. Never raises for a page
        that cannot go out or a machine that cannot be asked: it stays owed."""
        said = []
        for file in sorted(self._owed.glob("*")) if self._owed is not None and self._owed.is_dir() else []:
            title, _, body = file.read_text().partition("\n")
            sent = self._send(title, f"{body.strip()}\n(late: it could not go out when it was due)")
            if sent.sent:
                file.unlink(missing_ok=True)
            said.append(f"a page was owed ({title}): {'sent now' if sent.sent else f'still owed: {sent.reason}'}")
        seen: set[str] = set()
        for manager in managers:
            if manager.node in seen:
                continue
            seen.add(manager.node)
            try:
                due = manager.owed()
                sent_all = [self._send(text.partition("\n")[0], f"{text.partition(chr(10))[2]}\n(late)").sent for text in due]
                if due and all(sent_all):
                    manager.forget_owed()
            except (ServiceError, OSError) as error:
                said.append(f"{manager.node}: whether a page is owed there is not known: {error}")
                continue
            titles = [text.partition("\n")[0] for text in due]
            said += [
                f"{manager.node} owed a page ({t}): {'sent now' if ok else 'still owed'}" for t, ok in zip(titles, sent_all, strict=True)
            ]
        return tuple(said)
