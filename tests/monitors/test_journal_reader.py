"""systemd-python's reader beside journalctl, on the journal of a real systemd node."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from monitors import fleet
from monitors.observe import journal
from monitors.observe.batchlog import Entry
from monitors.remote import Remote
from tests.e2e.nodes import SystemdNode, boot, missing
from tests.monitors.cluster import until

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing() or "-")
pytest.importorskip("systemd.journal", reason="systemd-python is not installed")

UNIT = r"""[Service]
ExecStart=/bin/sh -c 'printf "plain line\n\033[31mred\033[0m \\377 end\n"; sleep 0.3; exit 3'
"""


@pytest.fixture
def node(tmp_path: Path) -> Iterator[SystemdNode]:
    made = boot("reader", tmp_path / "nodes")
    try:
        yield made
    finally:
        made.stop()


def folder(node: SystemdNode) -> str:
    found = [node.root / where for where in ("var/log/journal", "run/log/journal") if any((node.root / where).glob("*/*.journal"))]
    assert found, "the node keeps a journal"
    return str(found[0])


def start(node: SystemdNode) -> str:
    """Run the unit once; its invocation."""
    node.run(["systemctl", "start", "speaks.service"])
    until(lambda: b"failed" in node.run(["systemctl", "is-failed", "speaks.service"]).out, "the unit has ended")
    return node.run(["systemctl", "show", "-p", "InvocationID", "--value", "speaks.service"]).out.decode().strip()


def test_both_readers_give_the_same_entries_and_go_on_where_they_were(node: SystemdNode) -> None:
    node.run(["sh", "-c", "cat > /etc/systemd/system/speaks.service; systemctl daemon-reload"], stdin=UNIT.encode())
    first = start(node)
    native = journal.Native("speaks.service", folder(node))
    spoken: list[Entry] = []

    def heard(text: str, times: int) -> bool:
        spoken.extend(native.poll().value or [])
        return sum(text in entry.text for entry in spoken) >= times

    try:
        until(lambda: heard("Failed with result", 1), f"PID 1's word on the unit; so far {spoken}")
        assert {"plain line"} <= {entry.text for entry in spoken}
        assert any("red" in entry.text and "end" in entry.text for entry in spoken), "bytes that are no UTF-8 are a line as well"
        assert {entry.invocation for entry in spoken} == {first}
        second = start(node)
        until(lambda: heard("Failed with result", 2), "the second start")
        assert second != first and {entry.invocation for entry in spoken} == {first, second}
    finally:
        native.close()
    with Remote(fleet.Node(name="reader")) as remote:
        done = remote.run([*node.enter, "journalctl", "-o", "json", "--all", "--no-pager", "-u", "speaks.service"], deadline_s=20)
    told = [entry for line in done.out.decode().splitlines() if (entry := journal.journal_entry(line, 0)) is not None]
    assert [(entry.text, entry.invocation) for entry in told] == [(entry.text, entry.invocation) for entry in spoken]
