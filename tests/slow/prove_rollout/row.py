"""One row of the table: what was done to a rollout, and how it ended on every node."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

_REASON = 110  # characters of a reason in the table


@dataclass(frozen=True)
class Row:
    """``nodes``: what each node runs at the end (``old``, ``new``, ``down``, or what else it is). ``codes``: exit codes
    of the opsctl commands in order (None: it was killed). ``wanted`` and ``codes_wanted``: the ends that are right."""

    name: str
    engine: str
    nodes: tuple[str, ...]
    wanted: tuple[tuple[str, ...], ...]
    codes: tuple[int | None, ...]
    codes_wanted: tuple[tuple[int | None, ...], ...]
    pages: tuple[str, ...]
    page_due: bool
    serves: bool
    without_s: float
    boot_s: float
    notes: str = ""

    @property
    def problems(self) -> list[str]:
        found = []
        if self.nodes not in self.wanted:
            found.append(f"ends as {'/'.join(self.nodes)}")
        if self.codes not in self.codes_wanted:
            found.append(f"exit codes {self.codes}, wanted {' or '.join(map(str, self.codes_wanted))}")
        if self.page_due and not self.pages:
            found.append("no page went out")
        if not self.serves and not self.pages:
            found.append("A BROKEN SERVER AND NO PAGE")
        return found

    @property
    def cells(self) -> list[str]:
        codes = ", ".join("killed" if code is None else str(code) for code in self.codes)
        pages = "; ".join(dict.fromkeys(page.split(": ", 1)[-1] for page in self.pages)) or "none"
        boots = f"{self.without_s:.1f} s = {self.without_s / self.boot_s:.1f} boots" if self.boot_s else f"{self.without_s:.1f} s"
        verdict = "as it must" if not self.problems else "**" + "; ".join(self.problems) + "**"
        return [self.name, self.engine, " / ".join(self.nodes), codes, pages, boots, verdict + (f" ({self.notes})" if self.notes else "")]

    def data(self) -> dict[str, Any]:
        return {**asdict(self), "problems": self.problems}


def reason(answer: Mapping[str, Any]) -> str:
    """The first words of what opsctl gives as its reason; empty when it gives none."""
    why = str((answer.get("data") or {}).get("why") or "")
    return why if len(why) <= _REASON else f"{why[:_REASON].rsplit(' ', 1)[0]} ..."


HEAD = ["row", "server", "runs at the end (n1 / n2)", "exit code", "page", "without service", "as it must?"]


def table(rows: list[Row]) -> str:
    lines = [HEAD, ["---"] * len(HEAD), *(row.cells for row in rows)]
    return "\n".join("| " + " | ".join(cell.replace("|", "/") for cell in line) + " |" for line in lines)


def restored(data: dict[str, Any]) -> Row:
    """A row that an earlier run kept."""
    kept = {key: value for key, value in data.items() if key != "problems"}
    for key in ("nodes", "codes", "pages"):
        kept[key] = tuple(kept[key])
    for key in ("wanted", "codes_wanted"):
        kept[key] = tuple(tuple(one) for one in kept[key])
    return Row(**kept)
