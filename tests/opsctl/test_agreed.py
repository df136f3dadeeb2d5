"""What is agreed to of a caller's answers: by name, for those that are never sent, for those that are refused."""

from __future__ import annotations

import datetime
import time

import pytest

from monitors.fleet import Caller
from opsctl.callers import agreed
from opsctl.callers.agreed import AgreedError, parse

JSON = {"messages": [], "response_format": {"type": "json_object"}}
CALLERS = [
    Caller(name="chat", request={"messages": []}),
    Caller(name="scan", request=JSON, expect="json", probe="never-live"),
    Caller(name="triage", request=JSON, expect="json"),
]
TODAY = datetime.date(2026, 11, 30)


def told(*texts: str, review_by: str = "2026-12-30") -> dict[str, str]:
    return {name: one.to for name, one in parse(texts, review_by, CALLERS, TODAY).items()}


def test_what_is_expected_is_agreed_to_for_all_that_are_never_sent() -> None:
    assert told("*=expected") == {"scan": "json"}
    assert told("triage=expected") == {"triage": "json"}
    assert parse(["*=expected"], "2026-12-30", [], TODAY) == {}


def test_a_refusal_is_agreed_to_for_those_that_send_constrained_requests_and_never_for_plain_ones() -> None:
    assert told("*=http 400") == {"scan": "http 400", "triage": "http 400"}


@pytest.mark.parametrize("texts", [("*=http 400", "scan=text"), ("scan=text", "*=http 400")])
def test_a_caller_that_is_named_is_judged_by_that(texts: tuple[str, ...]) -> None:
    assert told(*texts) == {"scan": "text", "triage": "http 400"}


@pytest.mark.parametrize(
    ("text", "says"),
    [("*=json", "callers that are not named"), ("scam=json", "callers are chat, scan, triage"), ("scan=html", "no expectation")],
)
def test_what_cannot_be_agreed_to_is_said(text: str, says: str) -> None:
    with pytest.raises(AgreedError, match=says):
        told(text)


def test_the_day_is_the_one_of_utc_whatever_the_zone_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the two zones there is always one in which it is another day than in UTC."""
    today = datetime.datetime.now(datetime.UTC).date()
    yesterday = (today - datetime.timedelta(days=1)).isoformat()
    try:
        for zone in ("<-12>12", "<+14>-14"):
            monkeypatch.setenv("TZ", zone)
            time.tzset()
            now = datetime.datetime.now(datetime.UTC).date()
            if now == today:  # midnight did not come in between
                assert agreed.parse(["chat=json"], today.isoformat(), CALLERS)["chat"].to == "json"
                with pytest.raises(AgreedError, match="is past"):
                    agreed.parse(["chat=json"], yesterday, CALLERS)
    finally:
        monkeypatch.undo()
        time.tzset()
