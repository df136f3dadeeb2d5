from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opsctl.rollout.flags import Edit, EditError, edit, parse_env, parse_set, parse_unset, same_command

BASE = ("python", "-m", "engine.cli", "serve", "--tp", "3", "--disable-radix-cache", "--chunked-prefill-size", "-1", "--page-size=16")


@pytest.mark.parametrize(
    ("text", "after"),
    [
        ("grammar-backend=none", (*BASE, "--grammar-backend", "none")),
        ("--grammar-backend=none", (*BASE, "--grammar-backend", "none")),
        ("disable-overlap-schedule", (*BASE, "--disable-overlap-schedule")),
        ("tp=4", tuple("4" if word == "3" else word for word in BASE)),
        ("page-size=32", (*BASE[:-1], "--page-size", "32")),
        ("chunked-prefill-size=8", tuple("8" if word == "-1" else word for word in BASE)),
        ("fault=decode.crash:when=sequential", (*BASE, "--fault", "decode.crash:when=sequential")),
        ("disable-radix-cache", BASE),
    ],
)
def test_a_flag_is_set_in_its_place_or_at_the_end(text: str, after: tuple[str, ...]) -> None:
    assert edit(BASE, [parse_set(text)]) == after


@pytest.mark.parametrize(
    ("flag", "gone"), [("tp", ("--tp", "3")), ("disable-radix-cache", ("--disable-radix-cache",)), ("page-size", ("--page-size=16",))]
)
def test_a_flag_is_unset_with_its_value_and_nothing_else(flag: str, gone: tuple[str, ...]) -> None:
    assert edit(BASE, [parse_unset(flag)]) == tuple(word for word in BASE if word not in gone)


def test_what_cannot_be_edited_is_refused_with_the_option_named() -> None:
    with pytest.raises(EditError, match="--unset absent"):
        edit(BASE, [Edit("absent", unset=True)])
    with pytest.raises(EditError, match="--fault 2 times"):
        edit(("x", "--fault", "a", "--fault", "b"), [Edit("fault", "c")])
    for parse, text in ((parse_set, "=x"), (parse_set, "a b=c"), (parse_unset, ""), (parse_env, "A"), (parse_env, "1A=b")):
        with pytest.raises(EditError):
            parse(text)


@given(
    st.lists(
        st.tuples(st.sampled_from("abcdef"), st.one_of(st.none(), st.from_regex(r"[a-z0-9:=.]{0,8}", fullmatch=True))),
        unique_by=lambda p: p[0],
    ),
    st.sampled_from("abcdefgh"),
    st.text(max_size=8).filter(lambda text: not text.startswith("--")),
)
def test_a_set_then_unset_touches_no_other_flag(flags: list[tuple[str, str | None]], name: str, value: str) -> None:
    argv = ["prog", "serve", *(word for flag, v in flags for word in ([f"--{flag}"] if v is None else [f"--{flag}", v]))]
    changed = edit(argv, [Edit(name, value)])
    assert f"--{name}" in changed and changed[changed.index(f"--{name}") + 1] == value
    without = edit(changed, [Edit(name, unset=True)])
    kept = [pair for pair in flags if pair[0] != name]
    assert list(without) == ["prog", "serve", *(word for flag, v in kept for word in ([f"--{flag}"] if v is None else [f"--{flag}", v]))]


@pytest.mark.parametrize(
    ("planned", "running", "same"),
    [
        (("/bin/lastbatch", "serve", "--tp", "2"), ("/usr/bin/python3", "/bin/lastbatch", "serve", "--tp", "2"), True),
        (("/bin/lastbatch", "serve", "--tp", "2"), ("/bin/lastbatch", "serve", "--tp", "2"), True),
        (("/bin/lastbatch", "serve", "--tp", "2"), ("/bin/lastbatch", "serve", "--tp", "4"), False),
        (("/bin/lastbatch", "serve", "--tp", "2"), ("/bin/lastbatch", "serve", "--tp", "2", "--more"), False),
        (("/bin/lastbatch", "serve"), (), False),
    ],
)
def test_a_running_process_is_compared_by_its_arguments(planned: tuple[str, ...], running: tuple[str, ...], same: bool) -> None:
    assert same_command(planned, running) is same
