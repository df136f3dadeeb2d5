"""``python -m tests.slow.proof_on_engine [ROW...]``: what the proof of a rollout finds in the real engine, each for real.

Two ranks on two embedded services of this machine, a small random model in float32, two kinds of clients. Each row is one
``opsctl rollout apply``; afterwards the group must serve whatever the row says that it serves.
"""

from __future__ import annotations

import datetime
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.e2e.rollout_group import Group

CALLERS = """[[deployment.d.caller]]
name = "triage"
request = { messages = [{ role = "user", content = "one item" }], response_format = { type = "json_schema", json_schema = { name = "c", schema = { enum = ["a", "b"] } } }, temperature = 0, max_tokens = 16 }
expect = "json"
[[deployment.d.caller]]
name = "chat"
request = { messages = [{ role = "user", content = "hello" }], temperature = 0, max_tokens = 16, stream = true }
"""  # noqa: E501
REVIEW = (datetime.datetime.now(datetime.UTC).date() + datetime.timedelta(days=30)).isoformat()


@dataclass(frozen=True)
class Row:
    """``check`` must be the last one looked at, with ``outcome``; empty: nothing was touched."""

    name: str
    words: Sequence[str]
    code: int
    check: str
    outcome: str


ROWS = (
    Row("good change", ("--set", "max-queued-requests=99"), 0, "steady", "passed"),
    Row("answers.garbage: fluent nonsense", ("--set", "fault=answers.garbage"), 3, "drift", "failed"),
    Row("config.split: one rank runs another setting", ("--set", "fault=config.split:rank=1"), 3, "ranks", "failed"),
    Row("crash.after 12 requests", ("--set", "fault=crash.after:requests=12", "--stable-s", "10"), 3, "", "failed"),
    Row("decode.slow 16x, 50 % allowed", ("--set", "fault=decode.slow:factor=16", "--throughput-allowance", "50"), 3,
        "throughput", "failed"),
    Row("a client would get 400, undeclared", ("--set", "grammar-backend=none"), 2, "", ""),
    Row("a client gets 400, declared", ("--set", "grammar-backend=none", "--expect-change", "triage=http 400", "--review-by", REVIEW), 0,
        "steady", "passed"),
)  # fmt: skip


def main(names: Sequence[str]) -> int:
    """Prints one line a row; 1 when one did not go as it must."""
    wrong = 0
    with tempfile.TemporaryDirectory(prefix="lb-proof-") as folder:
        group = Group(Path(folder))
        file = Path(folder) / "fleet.toml"
        file.write_text(file.read_text().replace("[page]", f"{CALLERS}[page]"))
        try:
            group.start()
            for row in ROWS:
                if names and not any(row.name.startswith(name) for name in names):
                    continue
                start = time.monotonic()
                code, answer, err = group.rollout("apply", "--yes", *row.words)
                checks: list[dict[str, Any]] = (answer["data"] or {}).get("checks", [])
                last = checks[-1] if checks else {"name": "", "outcome": "", "evidence": answer["errors"][0]["message"]}
                good = code == row.code and row.check in ("", last["name"]) and row.outcome in ("", last["outcome"]) and group.answers()
                wrong += not good
                told = f"{last['name']} {last['outcome']}: {last['evidence'][:200]}"
                took = time.monotonic() - start
                print(f"{'ok   ' if good else 'WRONG'} {row.name:<44} exit {code} {told} ({took:.0f} s)", flush=True)
                if not good:
                    print(err, flush=True)
        finally:
            group.close()
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
