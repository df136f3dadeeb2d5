"""Who is told, once: silences, acknowledgements, pages that could not go out, the word that it is over, the test button."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from monitors import fleet, silences
from monitors.cli import app
from monitors.exit_codes import ExitCode
from monitors.judge.incidents import Book, Decision, Incident
from monitors.pager import Pager
from tests.monitors.cluster import web

WEDGE = Incident("wedge", "wedge:inv:9", "inv", 0.0, "/bundles/one", "hang_tp_desync")
FLEET = """[deployment.small]
engine = "lastbatch"
api = "http://127.0.0.1:9"
[[deployment.small.node]]
name = "a"
[[deployment.small.node.service]]
unit = "small.service"
[page]
urls = ["{url}"]
"""


class Told:
    """A pager with its events, its receiver's address and its state folder."""

    def __init__(self, folder: Path, url: str) -> None:
        self.file = folder / "fleet.toml"
        self.file.write_text(FLEET.format(url=url))
        self.state = folder / "state"
        self.events: list[dict[str, Any]] = []
        self.pager = Pager(fleet.load(self.file), "small", self.state, lambda event, **more: self.events.append({"event": event, **more}))


def test_a_wedge_is_paged_once_and_its_end_is_told_once(tmp_path: Path) -> None:
    with web() as receiver:
        told = Told(tmp_path, f"json://127.0.0.1:{receiver.port}/")
        book = told.pager.page(Book(open=WEDGE), "hang_tp_desync", "body", WEDGE)
        assert book.told == "small: hang_tp_desync" and told.events[-1]["page_sent"] is True
        assert told.pager.page(book, "hang_tp_desync", "body", WEDGE) is book
        assert told.events[-1]["page_sent"] is None and "already" in told.events[-1]["reason"]
        assert told.pager.over(book, Decision.ended) is book, "that it died is no end of it"
        after = told.pager.over(book, Decision.recovered)
        assert after.told == "" and told.pager.over(after, Decision.recovered) is after
        assert [page["title"] for page in receiver.posted] == ["small: hang_tp_desync", "over: small: hang_tp_desync"]


def test_a_restart_is_told_as_one_and_its_end_when_the_server_serves(tmp_path: Path) -> None:
    with web() as receiver:
        told = Told(tmp_path, f"json://127.0.0.1:{receiver.port}/")
        book = told.pager.page(Book(open=WEDGE), "hang_tp_desync", "body", WEDGE)
        again = told.pager.restarting(replace(book, open=None))
        assert again.starting and told.pager.restarting(again) is again, "once"
        assert Book.from_json(json.loads(json.dumps(again.to_json()))) == again, "a monitor that starts again still owes the end"
        assert told.pager.over(again, Decision.restarted) == replace(again, told="", starting=False)
        titles = [page["title"].partition("small")[0] for page in receiver.posted]
        assert titles == ["", "restarting: ", "over: "] and [page["type"] for page in receiver.posted] == ["failure", "warning", "success"]
        told.pager.page(Book(), "parser_leak", "body", None)
        assert receiver.posted[-1]["type"] == "warning"


def test_a_silence_pages_nobody_until_its_end_and_other_classes_are_paged(tmp_path: Path) -> None:
    with web() as receiver:
        told = Told(tmp_path, f"json://127.0.0.1:{receiver.port}/")
        words = [
            "silence",
            "--state-dir",
            str(told.state),
            "--for-s",
            "60",
            "--deployment",
            "small",
            "--verdict",
            "hang_*",
            "--why",
            "drill",
        ]
        done = CliRunner().invoke(app, words)
        assert done.exit_code == 0 and "small hang_* until" in done.stdout and "drill" in done.stdout
        book = Book(open=WEDGE)
        assert told.pager.page(book, "hang_tp_desync", "body", WEDGE) is book and not receiver.posted
        assert told.events[-1]["page_sent"] is None and "silenced until" in told.events[-1]["reason"]
        told.pager.page(book, "crash", "body", None)
        assert [page["title"] for page in receiver.posted] == ["small: crash"]
        found = silences.load(told.state / "silences.json")
        assert silences.active(found, "small", "hang_tp_desync", time.time() + 61) is None
        CliRunner().invoke(app, [*words[:3], "--for-s", "0", "--deployment", "small", "--verdict", "hang_*"])
        assert silences.load(told.state / "silences.json") == []


def test_a_page_that_did_not_go_out_is_tried_again_each_minute_and_not_more_often(tmp_path: Path) -> None:
    with web() as receiver:
        told = Told(tmp_path, "json://127.0.0.1:9/")
        book = told.pager.page(Book(open=WEDGE), "hang_tp_desync", "body", WEDGE)
        assert told.events[-1]["page_sent"] is False and not book.paged
        assert told.pager.again(book, time.monotonic() + 30) is book
        told.file.write_text(FLEET.format(url=f"json://127.0.0.1:{receiver.port}/"))
        told.pager._settings = fleet.load(told.file).page  # the network is back
        book = told.pager.again(book, time.monotonic() + 61)
        assert told.events[-1] | {"reason": ""} == {
            "event": "page",
            "page_sent": True,
            "reason": "",
            "title": "small: hang_tp_desync",
            "tries": 2,
        }
        assert told.pager.again(book, time.monotonic() + 200) is book and len(receiver.posted) == 1


@pytest.mark.parametrize(("port", "code"), [(0, ExitCode.DONE), (9, ExitCode.INTERNAL)])
def test_the_test_button_sends_a_page_that_says_it_is_one(tmp_path: Path, port: int, code: ExitCode) -> None:
    with web() as receiver:
        told = Told(tmp_path, f"json://127.0.0.1:{port or receiver.port}/")
        done = CliRunner().invoke(app, ["page", "--fleet", str(told.file), "--test"])
        assert done.exit_code == code and json.loads(done.stdout)["page_sent"] is (code is ExitCode.DONE)
        assert [page["title"] for page in receiver.posted] == (["hang-monitor: test"] if code is ExitCode.DONE else [])
