"""A request whose answer is known: does the server answer at all, and does it answer the same under load?

The seeded canary is greedy and always the same. Its answer is recorded when it came twice alike from a server at rest;
what comes under load must equal it. A single difference is not enough: where a model runs in bf16 the batch may turn a
near tie. Pure; texts never enter, only their digests.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace

_ALIKE = 2  # so many equal answers at rest make the recorded one
_TRIES = 6  # at rest, before the canary is given up as one that this server does not answer steadily
_WINDOW = 8
_WRONG = 2  # so many of the window's answers under load that differ are corruption


class Answer(enum.StrEnum):
    learning = "learning"
    unsteady = "unsteady"  # the server at rest does not repeat itself: this canary says nothing here
    same = "same"
    different = "different"
    corrupt = "corrupt"


@dataclass(frozen=True)
class Canary:
    """Begin with ``Canary()``. ``recorded`` is the digest of the answer that must come; ``declared``: it has been said that answers are
    wrong, and a window of right ones has not come since."""

    recorded: str = ""
    at_rest: tuple[str, ...] = ()
    under_load: tuple[str, ...] = ()
    declared: bool = False

    def take(self, digest: str, *, loaded: bool) -> tuple[Canary, Answer]:
        """After one more answer. ``loaded``: other requests ran beside it."""
        if not self.recorded:
            if loaded:
                return self, Answer.learning
            seen = (*self.at_rest, digest)
            if seen.count(digest) >= _ALIKE:
                return replace(self, recorded=digest, at_rest=()), Answer.learning
            return replace(self, at_rest=seen[-_TRIES:]), Answer.unsteady if len(seen) >= _TRIES else Answer.learning
        if not loaded:
            # A server that answers otherwise at rest now is another one (a rollout): its answer is learned anew.
            return (self, Answer.same) if digest == self.recorded else (Canary(at_rest=(digest,)), Answer.learning)
        after = replace(self, under_load=(*self.under_load, digest)[-_WINDOW:])
        if after.wrong == 0 and len(after.under_load) == _WINDOW:
            after = replace(after, declared=False)
        if digest == self.recorded:
            return after, Answer.same
        return after, Answer.corrupt if after.wrong >= _WRONG else Answer.different

    @property
    def wrong(self) -> int:
        return sum(digest != self.recorded for digest in self.under_load)

    def started_anew(self) -> Canary:
        """Of another start of the server nothing is known but the answer that it owes."""
        return replace(self, under_load=(), declared=False)

    def record(self) -> dict[str, object]:
        """What a bundle keeps of it; the judge counts again."""
        return {"recorded": self.recorded, "under_load": list(self.under_load)}
