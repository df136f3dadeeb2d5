"""Changes of a caller's answers that were agreed to, and the day by which somebody must look again. Pure."""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence

import msgspec

from monitors.fleet import Caller, answer_class
from opsctl.callers.request import shape_of

ANYBODY = "*"
"""In the place of a name: the callers that are not named themselves, see ``parse``."""
CONSTRAINED = ("json", "grammar", "forced_tool")
EXPECTED = "expected"
"""In the place of a class: what the fleet file expects of the caller."""


class Agreed(msgspec.Struct, frozen=True):
    """``review_by`` is an ISO date; ``where`` says where it was agreed: the fleet file or a rollout."""

    to: str
    review_by: str
    where: str = "the fleet file"

    def due(self, today: datetime.date) -> bool:
        return today > datetime.date.fromisoformat(self.review_by)


class AgreedError(ValueError):
    """A declaration that cannot be used; the text names the option and what to do."""


def parse(texts: Sequence[str], review_by: str, callers: Sequence[Caller], today: datetime.date | None = None) -> dict[str, Agreed]:
    """``--expect-change NAME=CLASS`` with ``--review-by DATE``; ``today`` is by UTC. Raises AgreedError.

    ``*=expected`` stands for every caller that is never sent (nobody would see that it gets again what it should), ``*=http
    400`` for every one that sends constrained requests; a plain question that gets 400 is never agreed to in passing."""
    found: dict[str, Agreed] = {}
    by_name = {caller.name: caller for caller in callers}
    names = list(by_name)
    today = today or datetime.datetime.now(datetime.UTC).date()
    for text in texts:
        name, equals, to = text.partition("=")
        if not equals or name not in (*names, ANYBODY):
            known = f"; callers are {', '.join(names)}" if names else "; the fleet file names no callers"
            raise AgreedError(f"--expect-change {text}: write NAME=CLASS, NAME being a caller of the fleet file{known}")
        try:
            if to != EXPECTED:
                answer_class(to)
        except ValueError as error:
            raise AgreedError(f"--expect-change {text}: {error}") from error
        if not review_by:
            raise AgreedError(f"--expect-change {text}: say with --review-by YYYY-MM-DD when somebody must have looked again")
        try:
            day = datetime.date.fromisoformat(review_by)
        except ValueError as error:
            raise AgreedError(f"--review-by {review_by}: {error}; write YYYY-MM-DD") from error
        if day < today:
            raise AgreedError(f"--review-by {review_by}: is past (UTC: {today}); give the day by which somebody will have looked again")
        if name == ANYBODY:
            if anybody_not(to):
                raise AgreedError(f"--expect-change {text}: {anybody_not(to)}")
            meant = [one for one in callers if (one.probe == "never-live" if to == EXPECTED else shape_of(one.request) in CONSTRAINED)]
            others = {one.name: Agreed(one.expect if to == EXPECTED else to, review_by, "--expect-change") for one in meant}
            found = {**others, **found}
        else:
            found[name] = Agreed(by_name[name].expect if to == EXPECTED else to, review_by, "--expect-change")
    return found


def anybody_not(to: str) -> str:
    """Why a class cannot be agreed to for callers that are not named; empty when it can."""
    if to == EXPECTED or to.startswith("http "):
        return ""
    return f'callers that are not named can get what is {EXPECTED} of them, or a refusal such as "http 400", not {to!r}'


def all_of(callers: Sequence[Caller], more: Mapping[str, Agreed]) -> dict[str, Agreed]:
    """Those of the fleet file, and over them ``more``."""
    found = {one.name: Agreed(one.expect_change.to, one.expect_change.review_by.isoformat()) for one in callers if one.expect_change}
    return {**found, **more}


def overdue(agreed: Mapping[str, Agreed], today: datetime.date) -> tuple[str, ...]:
    """What must be looked at again, one line each."""
    return tuple(
        f"{name}: its answers were agreed to become {one.to} until a review by {one.review_by}, which is past ({one.where}); change the "
        f"client, or the server back, or set a new date"
        for name, one in agreed.items() if one.due(today)
    )  # fmt: skip
