"""The options that say what is to change, shared by ``rollout plan`` and ``rollout apply``."""

from __future__ import annotations

import dataclasses
import datetime
import functools
import inspect
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from monitors.fleet import Caller
from opsctl.callers import agreed
from opsctl.library import Shelf
from opsctl.rollout import document, flags, wish
from opsctl.rollout.deadlines import MOST_S, Asked
from opsctl.rollout.wish import Wish

_List = list[str]
_SECONDS: dict[str, Any] = {"metavar": "SECONDS", "min": 0.001, "max": MOST_S}
# Help panels would need rich markup; the order here is the order of --help.


@dataclass(frozen=True)
class Options:
    """Each field is an option; its annotation is what typer shows."""

    set_: Annotated[_List, typer.Option("--set", metavar="FLAG[=VALUE]", help="Set a flag, e.g. grammar-backend=none or "
                                        "disable-overlap-schedule. Repeatable.")]  # fmt: skip
    unset: Annotated[_List, typer.Option("--unset", metavar="FLAG", help="Take a flag out. Repeatable.")]
    env: Annotated[_List, typer.Option("--env", metavar="NAME=VALUE", help="Set a variable of the service's environment. Repeatable.")]
    overlay: Annotated[_List, typer.Option("--overlay", metavar="FILE=TARGET", help="Mount this file of yours over TARGET as the service "
                                           "sees it, read-only; proven by its SHA-256 in each process. Repeatable.")]  # fmt: skip
    remove_overlay: Annotated[_List, typer.Option("--remove-overlay", metavar="TARGET", help="Take an overlay away again. Repeatable.")]
    image: Annotated[str, typer.Option("--image", metavar="NAME", help="Another image for the container that the unit runs; both must be "
                                       "on the node already.")]  # fmt: skip
    package: Annotated[str, typer.Option("--package", metavar="FOLDER", help="Another environment to run the program from: FOLDER/bin/... "
                                         "beside the old one, which must stay.")]  # fmt: skip
    model: Annotated[str, typer.Option("--model", metavar="NAME", help="Another model; where both are paths, both must be there.")]
    unit_file: Annotated[_List, typer.Option("--unit-file", metavar="[UNIT=]FILE", help="Another systemd unit file, for every service or "
                                             "for UNIT. It hides the present one in /run until the commit puts it in /etc. "
                                             "Repeatable.")]  # fmt: skip
    playbook: Annotated[str, typer.Option("--playbook", metavar="NAME", help="The change that a playbook's rollout step describes, by name "
                                          "(opsctl playbook list) or file; what is given beside it comes after it.")]  # fmt: skip
    boot: Annotated[float | None, typer.Option("--boot-deadline-s", **_SECONDS, help="A start that is not ready by then has failed. "
                                               "[default: from recorded boots, at most the fleet file's boot_deadline_s]")]  # fmt: skip
    stable: Annotated[float | None, typer.Option("--stable-s", **{**_SECONDS, "min": 0.0}, help="How long it must hold before the commit. "
                                                 "[default: the fleet file's]")]  # fmt: skip
    lease: Annotated[float | None, typer.Option("--lease-s", **_SECONDS, help="Each node reverts by itself when this command is silent for "
                                                "so long. [default: 60]")]  # fmt: skip
    hold: Annotated[float | None, typer.Option("--hold-s", **_SECONDS, help="How long a held rollout waits for resume or abort. "
                                               "[default: the fleet file's, 3600]")]  # fmt: skip
    budget: Annotated[int | None, typer.Option("--failure-budget", metavar="N", min=0, help="Of several replicas so many may fail "
                                               "their proof and are started once more; one more, or the first replica, and everything "
                                               "reverts. [default: 0]")]  # fmt: skip
    incident: Annotated[bool, typer.Option("--incident", help="The server is down or wedged: go by the recorded baseline instead of a live "
                                           "one.")]  # fmt: skip
    allow_red: Annotated[bool, typer.Option("--allow-red", help="Go on although what runs now fails its proof.")]
    no_revert_target: Annotated[bool, typer.Option("--no-revert-target", help="Go on although no verified configuration is known; a revert "
                                                   "then goes back to what is configured now, good or bad.")]  # fmt: skip
    reason: Annotated[str, typer.Option("--reason", help="Why; kept in the journal and shown by history.")]
    expect: Annotated[_List, typer.Option("--expect-change", metavar="NAME=CLASS", help="A caller of the fleet file whose answers are "
                                          'meant to change, and to what: text, json, tool_call, "http 400", or expected (what the fleet '
                                          "file expects of it). *=expected: all that are never sent; *=\"http 400\": all that send "
                                          "constrained requests. Repeatable.")]  # fmt: skip
    review: Annotated[str, typer.Option("--review-by", metavar="YYYY-MM-DD", help="By when (UTC) somebody must have looked at "
                                        "--expect-change again.")]  # fmt: skip
    allowance: Annotated[float | None, typer.Option("--throughput-allowance", metavar="PCT", min=0.0, max=99.99, help="Measure speed "
                         "before and after; a loss above this fails. Off unless given here or in the fleet file: it is a load beside live "
                         "traffic, takes minutes, and says nothing on a machine that is busy with others.")]  # fmt: skip

    def wish(self, callers: Sequence[Caller], shelf: Shelf, *, attended: bool) -> Wish:
        """``shelf``: where playbooks are looked for. Raises BadParameter with the option that cannot be used."""
        today = datetime.datetime.now(datetime.UTC).date()
        try:
            told = document.change(self.playbook, shelf, today) if self.playbook else document.Change()
            all_ = self._after(told.options)
            env = {**told.env, **dict(flags.parse_env(text) for text in self.env)}
            times = Asked(all_.boot, all_.stable, Asked.lease_s if all_.lease is None else all_.lease, all_.hold)
            return Wish(
                (*told.edits, *wish.edits_of(self.set_, self.unset)), env, wish.overlays_of(all_.overlay),
                tuple(all_.remove_overlay), all_.image, all_.package, all_.model, times,
                all_.incident, all_.allow_red, all_.no_revert_target, attended,
                self.reason or (f"playbook {told.name}" if told.name else ""),
                agreed.parse(all_.expect, all_.review, callers, today), all_.allowance, wish.unit_files_of(all_.unit_file),
                all_.budget or 0,
            )  # fmt: skip
        except (flags.EditError, agreed.AgreedError) as error:
            raise typer.BadParameter(str(error)) from error

    def _after(self, told: Mapping[str, Any]) -> Options:
        """These options with those of a playbook before them, by name: what repeats is joined, else what is given here counts."""
        found: dict[str, Any] = {}
        for name, hint in typing.get_type_hints(Options, include_extras=True).items():
            said = told.get(_word(typing.get_args(hint)[1]))
            if said is not None:
                own = getattr(self, name)
                found[name] = [*said, *own] if isinstance(own, list) else said if own is None or own is False or own == "" else own
        return dataclasses.replace(self, **found)


def _word(option: Any) -> str:
    """What is typed for it. In an annotation typer takes the first word for the default, and mends that later."""
    return next(word for word in (option.default, *option.param_decls) if isinstance(word, str) and word.startswith("--"))


_EMPTY: dict[Any, Any] = {_List: [], str: "", bool: False}


def changing(command: Callable[..., None]) -> Callable[..., None]:
    """A command whose parameter ``options: Options`` is given on the command line field by field."""
    own = [p for p in inspect.signature(command, eval_str=True).parameters.values() if p.name != "options"]
    hints = typing.get_type_hints(Options, include_extras=True)
    added = [
        inspect.Parameter(one.name, inspect.Parameter.KEYWORD_ONLY, annotation=hints[one.name],
                          default=_EMPTY.get(typing.get_args(hints[one.name])[0]))
        for one in dataclasses.fields(Options)
    ]  # fmt: skip

    @functools.wraps(command)
    def run(**given: Any) -> None:
        command(options=Options(**{one.name: given.pop(one.name) for one in dataclasses.fields(Options)}), **given)

    run.__signature__ = inspect.Signature([p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in own] + added)  # type: ignore[attr-defined]
    del run.__wrapped__  # typer would read the annotations of what it wraps
    run.__annotations__ = {p.name: p.annotation for p in (*own, *added)}
    return run
