"""Children that died under a living parent, orphans of an earlier start, a log that is piped in."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace

from monitors import engines, fleet
from monitors.judge.members import Members
from monitors.judge.scene import Process
from monitors.observe import process
from monitors.observe.stdin import Piped
from monitors.remote import Remote
from tests.monitors.cluster import until

PARENT = Process(1, 0, "S", "python -m sglang.launch_server")
RANKS = (Process(10, 1, "S", "sglang::scheduler_TP0", rank=0), Process(11, 1, "R", "sglang::scheduler_TP1", rank=1))


def looks(*tables: tuple[Process, ...]) -> Members:
    members = Members()
    for rows in tables:
        members = members.look(rows)
    return members


def test_a_zombie_under_a_living_parent_is_dead_at_the_second_look_and_stays_so() -> None:
    zombie = (PARENT, RANKS[0], replace(RANKS[1], state="Z", rank=None, title="sglang::schedul"))
    assert looks((PARENT, *RANKS), zombie).dead == ()
    assert [row.pid for row in looks((PARENT, *RANKS), zombie, zombie).dead] == [11]
    assert [row.pid for row in looks((PARENT, *RANKS), *[zombie] * 5).dead] == [11]


def test_one_that_was_waited_for_is_dead_as_well() -> None:
    assert [row.pid for row in looks((PARENT, *RANKS), *[(PARENT, RANKS[0])] * 3).dead] == [11]


def test_a_stop_and_a_restart_are_no_deaths() -> None:
    assert looks((PARENT, *RANKS), (), ()).dead == ()
    again = (replace(PARENT, pid=2), replace(RANKS[0], pid=20, ppid=2), replace(RANKS[1], pid=21, ppid=2))
    assert looks((PARENT, *RANKS), again, again, again).dead == ()
    assert looks((PARENT, *RANKS), (PARENT, RANKS[0]), (PARENT, *RANKS), (PARENT, *RANKS)).dead == (), "missed once by a look"


def test_a_rank_of_an_earlier_start_beside_its_successor_is_an_orphan() -> None:
    parent = replace(PARENT, pid=50, ppid=1)
    new = tuple(replace(row, pid=row.pid + 100, ppid=50) for row in RANKS)
    assert [row.pid for row in looks((parent, RANKS[1], *new)).orphans] == [11]
    assert looks((PARENT, *RANKS)).orphans == (), "in a container the launcher itself is init"
    assert looks((parent, *new)).orphans == ()


CHILD = "import setproctitle, sys, time\nsetproctitle.setproctitle('sglang::scheduler_TP0')\nprint(1, flush=True)\nsys.stdin.read()"


def test_a_real_zombie_keeps_its_place_in_the_table() -> None:
    child = subprocess.Popen([sys.executable, "-c", CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdout is not None and child.stdin is not None
    child.stdout.readline()
    dialect, here = engines.load("sglang"), Remote(fleet.Node(name="a"))

    def family() -> tuple[Process, ...]:
        rows = process.family(here, dialect, deadline_s=5).value
        assert rows is not None
        return rows

    def mine() -> list[Process]:
        rows = family()
        assert os.getpid() in {row.pid for row in rows}, "the parent is in the table"
        return [row for row in rows if row.pid == child.pid]

    try:
        members = Members().look(family())
        assert mine()[0].rank == 0
        child.stdin.close()
        (zombie,) = until(lambda: [row for row in mine() if row.state == "Z"], "the child ends and is not waited for")
        assert zombie.title.startswith("sglang::") and zombie.ppid == os.getpid()
        for _ in range(2):
            members = members.look(family())
        assert [row.pid for row in members.dead] == [child.pid]
    finally:
        child.stdout.close()
        child.wait(10)


def test_lines_of_a_pipe_come_once_and_its_end_is_a_gap() -> None:
    reader, writer = os.pipe()
    with os.fdopen(reader, "rb") as stream:
        piped = Piped(stream)
        assert piped.poll().value == []
        os.write(writer, b"one\ntwo \xff\nhal")
        assert until(lambda: piped.poll().value, "the lines")[:1] == ["one"]
        os.write(writer, b"f\n")
        os.close(writer)
        until(lambda: not piped.poll().ok, "the end is told")
        assert "ended" in piped.poll().reason
