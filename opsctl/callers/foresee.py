"""What each kind of client will see after a change, as far as flags tell it before anything is touched. Pure."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence

import msgspec

from monitors.engines import Dialect
from monitors.fleet import Caller
from opsctl.callers.answer import remedy
from opsctl.callers.request import Shape, shape_of


class Foreseen(msgspec.Struct, frozen=True):
    """``before`` is what the client got when it was last asked (empty: never asked), ``after`` what it will get
    (empty: flags do not tell). ``same``: nothing in the change decides it."""

    caller: str
    shape: str
    before: str
    after: str
    same: bool
    why: str

    @property
    def text(self) -> str:
        if self.same:
            return f"{self.caller}: {self.before or 'as now'}; {self.why}"
        return f"{self.caller}: {self.before or '(not asked yet)'} -> {self.after or 'not known before it is asked'}; {self.why}"


Argv = Sequence[str]


def foresee(
    callers: Sequence[Caller], before: Argv, after: Argv, *, env_changes: bool, program_changes: bool = False, dialect: Dialect,
    known: Mapping[str, str],
) -> tuple[Foreseen, ...]:  # fmt: skip
    """``known``: the classes that were recorded last, by caller. ``program_changes``: an image, a package, a model or a
    mounted file is another one."""
    old, new = flags_of(before), flags_of(after)
    changed = {name for name in old[1].keys() | new[1].keys() if old[1].get(name) != new[1].get(name)}
    whole = program_changes or env_changes or old[0] != new[0]
    return tuple(_one(caller, old[1], new[1], changed, dialect, whole=whole, before=known.get(caller.name, "")) for caller in callers)


def _one(
    caller: Caller, old: Mapping[str, str], new: Mapping[str, str], changed: set[str], dialect: Dialect, *, whole: bool, before: str
) -> Foreseen:
    shape = shape_of(caller.request)
    was, will = refused(old, shape, dialect), refused(new, shape, dialect)
    before = before or was[0]
    if will[0]:
        return Foreseen(caller.name, shape, before or caller.expect, will[0], will[0] == (before or caller.expect), will[1])
    if was[0]:
        return Foreseen(caller.name, shape, before, "", False, f"no longer refused by {was[1].split(' refuses ')[0]}")
    if whole:
        return Foreseen(caller.name, shape, before, "", False, "what runs or its environment is another")
    deciding = dialect.answers.deciding
    if not deciding:
        return Foreseen(caller.name, shape, before, "", not changed, f"which flags of {dialect.name} decide it is not known")
    decided = sorted(changed & (deciding.get("any", frozenset()) | deciding.get(shape, frozenset())))
    if decided:
        return Foreseen(caller.name, shape, before, "", False, f"--{', --'.join(decided)} decides it")
    return Foreseen(caller.name, shape, before, before, True, "nothing in this change decides it")


def refused(flags: Mapping[str, str], shape: Shape, dialect: Dialect) -> tuple[str, str]:
    """(the class of the refusal that these flags give to such requests, why); empty when they are served."""
    for rule in dialect.answers.refusals:
        if flags.get(rule.flag) == rule.value and shape in rule.shapes:
            return f"http {rule.status}", f"--{rule.flag} {rule.value} refuses {shape.replace('_', ' ')} requests"
    return "", ""


def flags_of(argv: Argv) -> tuple[tuple[str, ...], dict[str, str]]:
    """(what is no flag, flags with their values). What follows a flag is its value unless it begins with ``--``; a flag
    that is given twice has its values joined."""
    words: list[str] = []
    found: dict[str, str] = {}
    flag = ""
    for argument in argv:
        if argument.startswith("--"):
            name, equals, value = argument[2:].partition("=")
            found[name] = f"{found[name]} {value}".strip() if name in found else value
            flag = "" if equals else name
        elif flag:
            found[flag] = f"{found[flag]} {argument}".strip()
            flag = ""
        else:
            words.append(argument)
    return tuple(words), found


def undeclared(foreseen: Sequence[Foreseen], declared: Mapping[str, str], callers: Sequence[Caller]) -> tuple[str, ...]:
    """Changes that are certain, or that nobody will see because the request is never sent, and that nobody agreed to; one
    line each with what has to be done."""
    by_name = {caller.name: caller for caller in callers}
    certain = [
        f"{one.caller} would get {one.after} where it got {one.before} ({one.why}); its client must "
        f"{remedy(one.before, one.after, by_name[one.caller].remedy)}"
        for one in foreseen
        if one.after and not one.same and one.after != by_name[one.caller].expect and declared.get(one.caller) != one.after
    ]
    unseen = [
        f"{one.caller} is never sent beside traffic, and what it would get is not known ({one.why}): agree to what you expect "
        f"(--expect-change {shlex.quote(f'{one.caller}={by_name[one.caller].expect}')} --review-by DATE), and see it when nobody is "
        "served: opsctl callers record --never-live"
        for one in foreseen
        if not one.after
        and not one.same
        and by_name[one.caller].probe == "never-live"
        and declared.get(one.caller, one.before) == one.before  # what it gets already was agreed to for another change
    ]
    return (*certain, *unseen)
