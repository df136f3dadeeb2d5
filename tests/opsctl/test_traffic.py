"""Request rates from an access log, and clients that fall silent: pure."""

from __future__ import annotations

from opsctl.callers import traffic
from opsctl.callers.traffic import Rates


def line(second: int, caller: str, rid: str = "r1") -> str:
    return f"[2026-01-01 00:{second // 60:02}:{second % 60:02}] req rid={rid} caller={caller} shape=text prompt_sha=aa status=200"


def test_rates_are_of_the_last_window_by_the_logs_own_clock_and_leave_out_opsctl() -> None:
    log = ["[2026-01-01 00:00:00] boot", *(line(at, "old") for at in range(60)), *(line(at, "new") for at in range(60, 120, 2)),
           line(130, "x", "opsctl-1"), line(140, "x", "opsctl-2")]  # fmt: skip
    found = traffic.rates(log, 60)
    assert found.window_s == 60 and set(found.per_s) == {"new"}
    assert found.per_s["new"] == 19 / 60  # since 80 s
    assert traffic.rates(["req rid=a caller=b shape=text prompt_sha=c status=200"], 60) == Rates()


def test_a_caller_that_all_but_stops_is_named_and_one_whose_silence_may_be_chance_is_not() -> None:
    before = Rates(600, {"aaaa": 1.0, "bbbb": 0.1, "cccc": 1.0})
    found = traffic.collapses(before, {"cccc": 20}, 30, {"aaaa": "triage"})
    assert [(one.caller, one.promised, one.seen) for one in found] == [("triage", 30.0, 0)]
    assert "served elsewhere" in found[0].text


def test_a_record_made_while_a_client_is_silent_does_not_forget_it_for_a_while() -> None:
    old = Rates(600, {"aaaa": 1.0, "bbbb": 1.0}).stamped("2026-01-05T00:00:00+00:00")
    now = Rates(600, {"bbbb": 0.9, "cccc": 2.0}).stamped("2026-01-06T00:00:00+00:00")
    kept = now.after(old, "2026-01-01T00:00:00+00:00")
    assert kept.per_s == {"aaaa": 1.0, "bbbb": 0.9, "cccc": 2.0}
    assert kept.at_utc["aaaa"] == "2026-01-05T00:00:00+00:00"
    assert "aaaa" not in now.after(old, "2026-01-05T12:00:00+00:00").per_s  # a client that is gone for good
    assert Rates(5, {"aaaa": 0.2}).after(old, "").per_s["aaaa"] == 1.0  # five seconds tell nothing
