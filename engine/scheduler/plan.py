"""What rank 0 decides and every rank carries out: one plan a step, sent before it is launched.

A plan is complete in itself. A rank needs no clock, no queue and no allocator of its own to follow it, so ranks
cannot part by deciding differently. What a rank does compute for itself is the accepted run of its own rows, from
tokens that rank 0 drew and the group shared.
"""

from __future__ import annotations

import msgspec

from engine.messages import RankInfo, Sampling


class Enter(msgspec.Struct, kw_only=True):
    """A request that ranks have not seen (or that was retracted and comes back with the tokens it had)."""

    rid: str
    tokens: list[int]  # the prompt, and after a retraction the output so far
    prompt_length: int
    sampling: Sampling
    room: int  # output tokens it may have in all
    grammar: str = ""  # key of a grammar that rank 0 has compiled
    logprobs: int = -1
    prompt_logprobs: int = -1
    warmup: bool = False


class Row(msgspec.Struct, array_like=True):
    """One request's part in a step.

    A prefill row computes ``tokens[start : start + count]`` and draws a token if ``draws``. A decode row
    (``count == 0``) computes what is not in the KV cache yet (one token, as a rule) and up to ``drafts`` drafted ones.
    ``pages`` is the whole page table when it has changed since the last row of this request, else None.
    """

    rid: str
    start: int
    count: int
    draws: bool
    drafts: int
    pages: list[int] | None

    @property
    def most(self) -> int:
        """The most tokens this row can add to the KV cache."""
        return self.count or 1 + self.drafts


class Plan(msgspec.Struct, tag=True, kw_only=True):
    """One step. ``leaves`` are forgotten before ``enters`` are taken. Without rows nothing is computed."""

    step: int
    kind: int  # blackbox.BatchKind
    rows: list[Row]
    enters: list[Enter] = []
    leaves: list[str] = []

    def without(self, gone: set[str]) -> Plan:
        """The same plan less the rows of requests that ended since it was made."""
        if not any(row.rid in gone for row in self.rows):
            return self
        return msgspec.structs.replace(self, rows=[row for row in self.rows if row.rid not in gone])


class Arm(msgspec.Struct, tag=True):
    """Arm a fault on every rank."""

    spec: str


class Disarm(msgspec.Struct, tag=True):
    name: str


class Open(msgspec.Struct, tag=True):
    """The warm-up is over: real requests come from now on."""


class Stop(msgspec.Struct, tag=True):
    """Rank 0 is done: leave the groups and exit 0."""


class Hello(msgspec.Struct, tag=True):
    """From a rank to rank 0, once it has loaded. ``pages``: as many KV pages as it has memory for."""

    info: RankInfo
    pages: int
    paths: dict[str, str] = {}


class Begin(msgspec.Struct, tag=True):
    """From rank 0 to every rank: the number of KV pages that all of them take."""

    pages: int


RankMessage = Plan | Begin | Arm | Disarm | Open | Stop | Hello
encode = msgspec.msgpack.Encoder().encode
decode = msgspec.msgpack.Decoder(RankMessage).decode
