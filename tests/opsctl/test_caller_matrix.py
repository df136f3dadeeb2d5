"""Every kind of client's request before and after a change, on a real HTTP process."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from typing import Any

import pytest

from monitors import fleet
from opsctl.callers import matrix
from opsctl.callers.agreed import Agreed
from opsctl.callers.foresee import Foreseen
from opsctl.rollout.checks import Outcome
from tests.opsctl.site import Ran, Site

MakeSite = Callable[..., Site]
JSON_CALLER = """[[deployment.d.caller]]
name = "triage"
request = { messages = [{ role = "user", content = "one invoice" }], response_format = { type = "json_object" } }
expect = "json"
"""
CHAT_CALLER = """[[deployment.d.caller]]
name = "chat"
request = { messages = [{ role = "user", content = "hello" }], stream = true }
"""
FUTURE = (datetime.datetime.now(datetime.UTC).date() + datetime.timedelta(days=30)).isoformat()


def check(ran: Ran, name: str) -> dict[str, Any]:
    found: dict[str, Any] = next(check for check in ran.data["checks"] if check["name"] == name)
    return found


def test_a_change_that_a_client_is_certain_to_see_is_refused_before_anything_is_touched_unless_it_is_agreed(make_site: MakeSite) -> None:
    site = make_site(fleet=JSON_CALLER + CHAT_CALLER)
    before = site.services[0].snapshot()
    plan = site.rollout("plan", "--set", "grammar-backend=none")
    assert [(one["caller"], one["after"], one["same"]) for one in plan.data["foreseen"]] == [
        ("triage", "http 400", False),
        ("chat", "", True),
    ]
    refused = site.apply("--set", "grammar-backend=none")
    assert refused.code == 2
    assert "triage would get http 400" in refused.errors[0]["message"] and "validate the JSON" in refused.errors[0]["message"]
    assert site.services[0].snapshot() == before
    agreed = ("--expect-change", "triage=http 400", "--review-by", FUTURE)
    ran = site.apply("--set", "grammar-backend=none", *agreed)
    assert ran.code == 0, ran.err
    rows = {row["caller"]: row for row in check(ran, "callers")["data"]["callers"]}
    assert (rows["triage"]["before"], rows["triage"]["after"]) == ("json", "http 400")
    assert "stop sending response_format" in rows["triage"]["must"] and rows["chat"]["must"] == ""
    assert "as agreed" in check(ran, "callers")["evidence"]
    assert "http 400, as planned" in check(ran, "json")["evidence"] and "http 400, as planned" in check(ran, "tool call")["evidence"]


def test_a_client_that_gets_prose_where_it_got_json_fails_the_rollout_and_the_report_says_who_must_change(make_site: MakeSite) -> None:
    site = make_site(fleet=JSON_CALLER + CHAT_CALLER)
    ran = site.apply("--set", "text-for=invoice")
    assert ran.code == 3, ran.err
    found = ran.data["checks"][-1]
    assert (found["name"], found["outcome"]) == ("callers", "failed")
    assert "triage: text (asked for JSON and got text that is none" in found["evidence"]
    assert "its client must validate each answer against the schema" in found["evidence"]
    assert [row["caller"] for row in found["data"]["callers"] if row["outcome"] == "failed"] == ["triage"]


def test_a_never_live_shape_is_sent_by_nobody_and_judged_by_what_flags_tell(make_site: MakeSite) -> None:
    site = make_site(fleet=JSON_CALLER + 'probe = "never-live"\n' + CHAT_CALLER)
    ran = site.apply("--set", "grammar-backend=none", "--expect-change", "*=http 400", "--review-by", FUTURE)
    assert ran.code == 0, ran.err
    assert "not sent (never-live), foreseen: --grammar-backend none refuses json" in check(ran, "callers")["evidence"]
    assert "json" not in [one["name"] for one in ran.data["checks"]]
    lines = "\n".join(line.text for line in site.services[0].log(site.services[0].snapshot().invocation_id))
    assert "shape=text" in lines and "shape=json" not in lines and "shape=tool" not in lines
    # What flags do not tell, and what nobody will ask, is agreed to or not begun; it is not called a pass.
    unknown = site.apply("--unset", "grammar-backend")
    assert unknown.code == 2 and "--expect-change triage=json" in unknown.errors[0]["message"], unknown.err
    same = site.apply("--unset", "grammar-backend", "--expect-change", "triage=http 400", "--review-by", FUTURE)
    assert same.code == 2, "what it gets already was agreed to for another change"
    back = site.apply("--unset", "grammar-backend", "--expect-change", "*=expected", "--review-by", FUTURE)
    assert back.code == 0, back.err
    assert "as agreed and not proven" in check(back, "callers")["evidence"]
    past = site.apply("--set", "grammar-backend=none", "--expect-change", "triage=http 400", "--review-by", "2025-01-31")
    assert past.code == 2 and "is past" in past.errors[0]["message"]
    lines = "\n".join(line.text for line in site.services[0].log(site.services[0].snapshot().invocation_id))
    assert "shape=text" in lines and "shape=json" not in lines  # nor is it sent then


def test_an_agreed_change_whose_review_is_past_pages(make_site: MakeSite) -> None:
    site = make_site(fleet=JSON_CALLER + 'expect_change = { to = "http 400", review_by = 2020-01-31 }\n')
    ran = site.apply("--set", "page-size=32")
    assert ran.code == 0, ran.err
    assert [page["title"] for page in site.pages.got] == ["d: an agreed change is to be reviewed"]
    assert "triage" in site.pages.got[0]["message"] and "2020-01-31" in site.pages.got[0]["message"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--expect-change", "triag=text", "--review-by", FUTURE), "callers are triage"),
        (("--expect-change", "triage=prose", "--review-by", FUTURE), "is no expectation"),
        (("--expect-change", "triage=text"), "--review-by"),
        (("--expect-change", "triage=text", "--review-by", "soon"), "write YYYY-MM-DD"),
    ],
)
def test_a_declaration_that_cannot_be_used_is_refused_with_what_to_write(make_site: MakeSite, words: tuple[str, ...], says: str) -> None:
    site = make_site(fleet=JSON_CALLER)
    ran = site.rollout("plan", "--set", "page-size=32", *words)
    assert ran.code == 2 and says in ran.errors[0]["message"]


def test_an_agreement_to_what_a_never_live_caller_gets_already_says_nothing_of_another_change() -> None:
    table = JSON_CALLER + 'probe = "never-live"\n'
    head = '[deployment.d]\nengine = "lastbatch"\napi = "http://127.0.0.1:1"\n[[deployment.d.node]]\nname = "n"\n'
    (caller,) = fleet.parse(head + table, "fleet.toml").one().caller
    seen = Foreseen("triage", "json", "http 400", "", False, "no longer refused by --grammar-backend none")

    def row(to: str) -> matrix.Row:
        (found,) = matrix.compare([caller], lambda request: pytest.fail("it was sent"), lambda: "", before={"triage": "http 400"},
                                  agreed={"triage": Agreed(to, FUTURE)}, foreseen={"triage": seen})  # fmt: skip
        return found

    assert row("http 400").outcome is Outcome.inconclusive
    assert row("json").outcome is Outcome.passed and "not proven" in row("json").text
