"""Held work by counters before gauges."""

from __future__ import annotations

from monitors import engines
from monitors.judge.holding import Holding, Page
from monitors.observe import metrics
from tests.monitors.cluster import web


def after(*pages: Page) -> Holding:
    holding = Holding()
    for page in pages:
        holding = holding.take(page)
    return holding


def test_gauges_are_believed_until_they_are_caught() -> None:
    assert after(Page(gauges=3, tokens=10)).held() == 3
    assert after(Page(gauges=0, tokens=10)).held() == 0
    stuck = after(*(Page(gauges=0, tokens=100 * n) for n in range(8)))
    assert stuck.held() is None and stuck.complaint and stuck.held(line=2) == 2
    assert after(*(Page(gauges=0, tokens=100 * n) for n in range(8)), Page(gauges=1, tokens=900)).held() == 1


def test_a_gauge_that_is_read_just_before_and_after_short_requests_is_not_caught_at_once() -> None:
    once = after(Page(gauges=0, tokens=1), Page(gauges=0, tokens=9), Page(gauges=1, tokens=12), Page(gauges=0, tokens=19))
    assert once.held() == 0 and not once.complaint


def test_gauges_are_not_caught_by_short_requests_that_are_over_when_they_are_read() -> None:
    short = after(*(Page(gauges=0, tokens=100 * n, accepted=10 * n, answered=10 * n) for n in range(9)))
    assert not short.complaint and short.held() == 0
    open_all_along = after(*(Page(gauges=0, tokens=100 * n, accepted=10 * n + (n > 0), answered=10 * n) for n in range(9)))
    assert open_all_along.complaint and open_all_along.held() == 1


def test_requests_that_were_accepted_and_never_batched_are_held_whatever_the_gauges_say() -> None:
    page = [Page(gauges=0, tokens=50, accepted=10 + n, answered=10) for n in range(3)]
    assert after(*page).held() == 2
    # Requests that were lost count of long ago are not held for ever.
    leaky = after(Page(gauges=0, tokens=50, accepted=12, answered=10), Page(gauges=0, tokens=50, accepted=12, answered=10))
    assert leaky.held() == 0


def test_sglangs_own_http_counters_tell_a_request_that_no_scheduler_has_seen() -> None:
    """The counters of its HTTP process: probes and scrapes are none of the work, and a count from before is not held."""
    dialect, holding = engines.load("sglang"), Holding()

    def scraped(asked: int, answered: int) -> Page:
        text = f"""sglang:num_running_reqs{{tp_rank="0"}} 0.0
sglang:http_requests_total{{endpoint="/v1/chat/completions",method="POST"}} {asked}.0
sglang:http_responses_total{{endpoint="/v1/chat/completions",method="POST",status_code="200"}} {answered}.0
sglang:http_requests_total{{endpoint="/health",method="GET"}} {asked * 9}.0
sglang:http_requests_total{{endpoint="/v1/models",method="GET"}} 4.0"""
        return metrics.page(metrics.parse(text, metrics.names_of(dialect)), dialect)

    for asked, held in ((40, 0.0), (42, 2.0)):
        holding = holding.take(scraped(asked, 37))
        assert holding.held() == held


def test_what_vllms_api_process_has_in_hand_is_held_though_the_engines_gauges_stand_at_0() -> None:
    dialect = engines.load("vllm")
    pages = {"/metrics": (200, "vllm:num_requests_running 0.0\nvllm:num_requests_waiting 0.0\n"), "/load": (200, '{"server_load":3}')}
    with web(pages) as server:
        values = metrics.scrape(server.url, dialect, deadline_s=5).value
        assert values is not None and Holding().take(metrics.page(values, dialect)).held() == 3
        server.pages["/load"] = (404, "")  # an older server, or one that does not count
        values = metrics.scrape(server.url, dialect, deadline_s=5).value
        assert values is not None and Holding().take(metrics.page(values, dialect)).held() == 0


def test_a_server_that_starts_again_begins_a_new_count() -> None:
    again = after(
        Page(gauges=0, accepted=500, answered=500), Page(gauges=0, accepted=1, answered=0), Page(gauges=0, accepted=2, answered=0)
    )
    assert again.held() == 1


def test_without_metrics_the_last_batch_line_speaks() -> None:
    assert Holding().held() is None and Holding().held(line=4) == 4


def test_the_engines_own_counters_of_errors_tell_when_they_grow_and_not_after_a_restart() -> None:
    dialect = engines.load("lastbatch")
    name = "lastbatch:parse_failures_total"
    assert metrics.grown({name: 3.0}, {name: 5.0, "other": 9.0}, dialect) == {name: 2.0}
    assert metrics.grown({}, {name: 5.0}, dialect) == {}, "what was before the monitor's own start"
    assert metrics.grown({name: 7.0}, {name: 1.0}, dialect) == {}
