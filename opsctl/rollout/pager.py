"""Who is told when a rollout did not end as wished: the fleet file's page URLs."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

from opsctl.rollout.result import Page


class UrlPager:
    """Any apprise URL. A page that is due and cannot go out is said in the result."""

    def __init__(self, urls: Sequence[str]) -> None:
        self._urls = tuple(urls)

    def page(self, title: str, body: str, key: str) -> Page:
        if not self._urls:
            return Page(False, "the fleet file names no page.urls")
        try:
            return _notify(self._urls, title, f"{body}\n[{key}]")
        except Exception as error:  # a broken pager must not break the revert that it tells of
            return Page(False, f"{type(error).__name__}: {error}")


def _notify(urls: Sequence[str], title: str, body: str) -> Page:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of modules that apprise imports when it first parses a URL
        import apprise  # slow, and only needed when something went wrong

        desk = apprise.Apprise()
        unknown = [number for number, url in enumerate(urls) if not desk.add(url)]
    if unknown:
        return Page(False, f"page.urls[{unknown[0]}] is no apprise URL")
    return Page(True) if desk.notify(title=title, body=body) else Page(False, "the pager's service did not take it")
