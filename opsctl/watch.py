"""``opsctl watch``: the monitor's status page in a terminal."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import httpx
import typer
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from monitors.exit_codes import ExitCode
from opsctl.answer import Answer, Problem, Session

_HERE = "http://127.0.0.1:9178"
_BARS = " ▁▂▃▄▅▆▇█"
_COLOURS = {"busy": "green", "idle": "green", "slow": "yellow", "loading": "yellow", "stalled": "bold red", "ended": "bold red"}


def watch(
    context: typer.Context,
    url: str = typer.Option("", "--url", help=f"Where `hang-monitor run --status-port` serves. [default: $OPSCTL_MONITOR, else {_HERE}]"),
    once: bool = typer.Option(False, "--once", help="Print it once and leave."),
    as_json: bool = typer.Option(False, "--json", help="Print one JSON envelope and leave."),
) -> None:
    """Show what the hang monitor sees, live."""
    session: Session = context.obj
    url = url or session.env.get("OPSCTL_MONITOR") or _HERE
    try:
        found = _ask(url)
        if as_json:
            session.show(Answer("watch", found), as_json=True)
            return
        console = Console(file=session.stdout, no_color=bool(session.env.get("NO_COLOR")) or None)
        if once or not console.is_terminal:
            console.print(view(found))
            return
        with Live(view(found), console=console, refresh_per_second=2) as live:
            while True:
                time.sleep(1.0)
                live.update(view(_ask(url)))
    except (httpx.HTTPError, ValueError) as error:
        problem = Problem("unreachable", f"{error}", where=url, remedy="is hang-monitor running with --status-port?")
        session.show(Answer("watch", exit_code=ExitCode.UNREACHABLE, errors=(problem,)), as_json=as_json)


def _ask(url: str) -> Mapping[str, Any]:
    answer = httpx.get(f"{url.rstrip('/')}/status.json", timeout=5)
    answer.raise_for_status()
    found: Mapping[str, Any] = answer.json()
    return found


def view(found: Mapping[str, Any]) -> Group:
    """One row a deployment, with the curves of the last minutes; open incidents and gaps below."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    for head in ("deployment", "state", "held", "quiet s", "steps/s", "held, last minutes"):
        table.add_column(head)
    below: list[Text] = []
    for one in found["deployments"]:
        trail = one.get("trail", [])
        state = Text(one["state"], style=_COLOURS.get(one["state"], ""))
        rates = [sample["steps_per_s"] for sample in trail]
        held = bars([sample["held"] for sample in trail])
        table.add_row(one["deployment"], state, f"{one.get('held', 0):g}",
                      f"{one.get('quiet_s', 0):.1f}", f"{rates[-1]:.1f} {bars(rates)}" if rates else "-", held)  # fmt: skip
        if one.get("incident"):
            incident = one["incident"]
            below.append(Text(f"open: {incident['kind']} {incident['verdict']} {incident['bundle']}", style="red"))
        below += [Text(f"gap: {gap}", style="dim") for gap in one.get("gaps", ())]
    return Group(table, *below)


def bars(values: Sequence[float], width: int = 30) -> str:
    """A curve in one line of text, newest at the right."""
    last = list(values)[-width:]
    most = max([*last, 1e-9])
    return "".join(_BARS[min(8, round(8 * value / most))] for value in last)
