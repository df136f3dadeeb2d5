"""The fleet file: what is right is read, what is wrong is named with its place and a way out."""

from __future__ import annotations

from pathlib import Path

import pytest

from monitors import fleet

GOOD = """
[deployment.flash]
engine = "lastbatch"
api = "http://127.0.0.1:30000/"
watchdog_s = 300
[[deployment.flash.node]]
name = "a"
ssh = ""
[[deployment.flash.node.service]]
unit = "flash-decode.service"
role = "both"
ranks = [0, 1]
log = "journal"
[[deployment.flash.node]]
name = "b"
ssh = "-p 2222 b.example"
[[deployment.flash.node.service]]
unit = "flash-decode.service"
ranks = [2]
run_dir = "/run/flash"
[[deployment.flash.caller]]
name = "triage"
request = { messages = [{ role = "user", content = "..." }], response_format = { type = "json_object" } }
expect = "http 400"
probe = "never-live"
[page]
urls = ["json://127.0.0.1:9000/"]
"""


def problems(text: str) -> str:
    with pytest.raises(fleet.FleetError) as caught:
        fleet.parse(text, "fleet.toml")
    return str(caught.value)


def test_a_whole_file_is_read() -> None:
    read = fleet.parse(GOOD, "fleet.toml")
    one = read.one()
    assert (one.name, one.engine, one.api, one.service, one.boot_deadline_s) == (
        "flash",
        "lastbatch",
        "http://127.0.0.1:30000",
        "systemd",
        720,
    )
    assert [node.name for node in one.node] == ["a", "b"]
    assert one.caller[0].request["response_format"] == {"type": "json_object"}
    assert one.node[1].service[0].ranks == (2,) and one.node[1].service[0].run_dir == "/run/flash"
    assert read.page.urls == ("json://127.0.0.1:9000/",)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('engine = "lastbatch"', 'engine = "sglan"', 'fleet.toml: deployment.flash.engine: "sglan" has no dialect; known are'),
        ('engine = "lastbatch"', 'engine = "sglan"', 'did you mean "sglang"?'),
        ("watchdog_s", "watchdgo_s", 'deployment.flash.watchdgo_s: unknown key; did you mean "watchdog_s"?'),
        ('name = "a"\nssh', 'name = "a"\nshs', 'deployment.flash.node[0].shs: unknown key; did you mean "ssh"?'),
        ('role = "both"', 'rloe = "both"', 'deployment.flash.node[0].service[0].rloe: unknown key; did you mean "role"?'),
        (
            'unit = "flash-decode.service"\nrole',
            'unit = "flash-decode"\nrole',
            '"flash-decode" has no suffix; did you mean "flash-decode.service"?',
        ),
        ('unit = "flash-decode.service"\nrole = "both"\n', "", "deployment.flash.node[0].service[0].unit: this key is needed"),
        ("ranks = [2]", "ranks = [1]", "deployment.flash.node[1].service[0].ranks: rank 1 is also in deployment.flash.node[0].service[0]"),
        ('name = "b"', 'name = "a"', 'deployment.flash.node[1].name: "a" is also the name of node[0]'),
        ("http://127", "127", 'is no URL; did you mean "http://127.0.0.1:30000/"?'),
        ('"http 400"', '"http nope"', 'deployment.flash.caller[0].expect: "http nope" is no expectation'),
        (
            'expect = "http 400"',
            'expect_change = { to = "http 40", review_by = 2027-01-31 }',
            'deployment.flash.caller[0].expect_change.to: "http 40" is no expectation',
        ),
        (
            'expect = "http 400"',
            'expect_change = { to = "text" }',
            "deployment.flash.caller[0].expect_change.review_by: this key is needed",
        ),
        ("request = {", "request = { messags = [] }\nrequest_ = {", "deployment.flash.caller[0].request_: unknown key"),
        ("messages = [", "mesages = [", "deployment.flash.caller[0].request: has neither messages nor a prompt"),
        ("watchdog_s = 300", "watchdog_s = -1", "deployment.flash.watchdog_s: -1: "),
        ("watchdog_s = 300", 'service = "embedded"', "the embedded supervisor has no journal; give the path of its log file"),
        ("[page]", "[page", "fleet.toml: not valid TOML: "),
    ],
)
def test_what_is_wrong_is_named_with_its_place_and_a_way_out(old: str, new: str, said: str) -> None:
    assert old in GOOD
    assert said in problems(GOOD.replace(old, new, 1))


def test_every_problem_is_told_at_once() -> None:
    text = problems(GOOD.replace("lastbatch", "x").replace("watchdog_s", "w"))
    assert len(text.splitlines()) == 2


def test_a_deployment_is_chosen_by_name_and_a_wrong_name_is_answered_with_the_right_one() -> None:
    read = fleet.parse(GOOD, "f")
    assert read.one("flash") is read.one()
    with pytest.raises(fleet.FleetError, match='did you mean "flash"'):
        read.one("flahs")
    two = fleet.parse(
        GOOD + GOOD.replace("deployment.flash", "deployment.slow").replace("[page]\nurls", "[ignored]\nurls").split("[ignored]")[0], "f"
    )
    with pytest.raises(fleet.FleetError, match="say which with --deployment"):
        two.one()


def test_a_file_that_cannot_be_read_says_so(tmp_path: Path) -> None:
    with pytest.raises(fleet.FleetError, match=r"none\.toml: cannot be read: No such file"):
        fleet.load(tmp_path / "none.toml")


def test_bundles_go_where_the_fleet_file_says_then_to_the_state_folder() -> None:
    one = fleet.parse(GOOD, "f").one()
    assert fleet.bundle_root(one, {"STATE_DIRECTORY": "/var/lib/hm:/x"}) == Path("/var/lib/hm/bundles")
    assert fleet.bundle_root(one, {"HOME": "/home/u"}) == Path("/home/u/.local/state/lastbatch/bundles")
    named = fleet.parse(GOOD.replace("watchdog_s = 300", 'bundle_dir = "/b"'), "f").one()
    assert fleet.bundle_root(named, {"STATE_DIRECTORY": "/var/lib/hm"}) == Path("/b")


def test_replicas_may_share_ranks_and_each_has_one_api() -> None:
    head = "[deployment.d]\nengine = 'lastbatch'\napi = 'http://r:1'\n"
    node = "[[deployment.d.node]]\nname = '{0}'\nreplica = '{1}'\napi = '{2}'\n"
    node += "[[deployment.d.node.service]]\nunit = 'x.service'\nranks = [0]\n"
    read = fleet.parse(head + node.format("a", "one", "http://a:1") + node.format("b", "two", "http://b:1"), "f").one()
    assert [one.replica for one in read.node] == ["one", "two"]
    with pytest.raises(fleet.FleetError, match=r'node\[1\].api: "http://b:1", but replica "one"'):
        fleet.parse(head + node.format("a", "one", "http://a:1") + node.format("b", "one", "http://b:1").replace("[0]", "[1]"), "f")
