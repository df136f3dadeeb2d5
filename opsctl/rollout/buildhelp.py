"""Which flags a build knows, by its own ``--help``: for engines that cannot be asked for a configuration digest."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence

from opsctl.rollout.flags import Edit, EditError
from opsctl.service.manager import ServiceError, ServiceManager

_ASK_S = 120.0  # a build that imports its whole framework before it prints a line
_FLAG = re.compile(r"(?<![\w-])--([A-Za-z][A-Za-z0-9_.-]*)")
_FEWEST = 5  # a text with fewer flags is an excuse, not a reference


def known(text: str) -> frozenset[str]:
    """Names of the flags that a help text speaks of, without dashes. ``--[no-]x`` is both ``x`` and ``no-x``."""
    both = re.sub(r"--\[no-\]([\w.-]+)", r"--\1 --no-\1", text)
    return frozenset(name.rstrip(".-") for name in _FLAG.findall(both))


def ask(manager: ServiceManager, argv: Sequence[str]) -> frozenset[str]:
    """The flags of the build that ``argv`` starts, where it is installed. Raises ServiceError when it does not tell."""
    end = next((at for at, word in enumerate(argv) if at and word.startswith("--")), len(argv))
    said = ""
    for option in ("--help=all", "--help"):  # vLLM prints its flags only with the first; argparse refuses it elsewhere
        _, out, err = manager.run((*argv[:end], option), _ASK_S)
        flags = known(out)
        if len(flags) >= _FEWEST:
            return flags
        said = said or (err or out).strip()
    raise ServiceError(f"{manager.name}: `{' '.join(argv[:end])} --help` names no flags: {said[-200:] or 'it printed nothing'}")


def refuse_unknown(manager: ServiceManager, argv: Sequence[str], edits: Sequence[Edit]) -> None:
    """Raises EditError for a flag that the build does not know, with the name that was likely meant, and ServiceError
    when the build cannot be asked. A flag that is taken out need not be known any more."""
    flags = ask(manager, argv)
    for edit in edits:
        names = {edit.flag, edit.flag.replace("_", "-"), edit.flag.replace("-", "_"), edit.flag.partition(".")[0]}
        if edit.unset or names & flags:
            continue
        near = difflib.get_close_matches(edit.flag, sorted(flags), 1)
        hint = f"; did you mean --{near[0]}?" if near else ""
        raise EditError(f"{edit}: the build that {manager.name} runs on {manager.node} knows no --{edit.flag}{hint}")
