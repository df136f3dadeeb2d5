"""Who is told when a rollout did not end as wished: the fleet file's page URLs."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

from monitors import page
from opsctl.rollout.result import Page


class UrlPager:
    """Any apprise URL. A page that is due and cannot go out is said in the result."""

    def __init__(self, urls: Sequence[str]) -> None:
        self._urls = tuple(urls)

    def page(self, title: str, body: str, key: str) -> Page:
        """``key`` names the incident, the same in every page of one rollout."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of modules that apprise imports when it first parses a URL
            sent = page.send(self._urls, title, f"{body}\n[{key}]")
        return Page(sent.sent, sent.reason)
