"""Who is told when a rollout did not end as wished: the fleet file's page URLs."""

from __future__ import annotations

from collections.abc import Sequence

from opsctl.rollout.result import Page


class UrlPager:
    """Any apprise URL. A page that is due and cannot go out is said in the result."""

    def __init__(self, urls: Sequence[str]) -> None:
        self._urls = tuple(urls)

    def page(self, title: str, body: str, key: str) -> Page:
        if not self._urls:
            return Page(False, "the fleet file names no page.urls")
        import apprise  # 40 ms, and only needed when something went wrong

        desk = apprise.Apprise()
        for url in self._urls:
            if not desk.add(url):
                return Page(False, "page.urls: one of them is no apprise URL")
        sent = desk.notify(title=title, body=f"{body}\n[{key}]")
        return Page(True) if sent else Page(False, "the pager's service did not take it")
