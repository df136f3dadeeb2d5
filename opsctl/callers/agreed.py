"""Changes of a caller's answers that were agreed to, and the day by which somebody must look again. Pure."""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence

import msgspec

from monitors.fleet import Caller, answer_class


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
    """``--expect-change NAME=CLASS`` with ``--review-by DATE``. Raises AgreedError."""
    found = {}
    names = [caller.name for caller in callers]
    for text in texts:
        name, equals, to = text.partition("=")
        if not equals or name not in names:
            known = f"; callers are {', '.join(names)}" if names else "; the fleet file names no callers"
            raise AgreedError(f"--expect-change {text}: write NAME=CLASS, NAME being a caller of the fleet file{known}")
        try:
            answer_class(to)
        except ValueError as error:
            raise AgreedError(f"--expect-change {text}: {error}") from error
        if not review_by:
            raise AgreedError(f"--expect-change {text}: say with --review-by YYYY-MM-DD when somebody must have looked again")
        try:
            day = datetime.date.fromisoformat(review_by)
        except ValueError as error:
            raise AgreedError(f"--review-by {review_by}: {error}; write YYYY-MM-DD") from error
        if day < (today or datetime.date.today()):
            raise AgreedError(f"--review-by {review_by}: is past; give the day by which somebody will have looked again")
        found[name] = Agreed(to, review_by, "--expect-change")
    return found


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
