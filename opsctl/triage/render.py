"""The picture as text, by rich: what is the matter first, what it rests on below."""

from __future__ import annotations

import io
import shlex

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from monitors.judge.verdict import Verdict
from monitors.report.stacktree import Node
from opsctl.triage.faults import Question
from opsctl.triage.flags import DEFAULT, Flag
from opsctl.triage.picture import Picture

_FRAMES = 6  # of a chain that ranks share
_WIDTH = 132
_MOST_MISSING = 12


def text(picture: Picture, *, colour: bool = False, width: int = _WIDTH) -> str:
    sink = io.StringIO()
    console = Console(file=sink, force_terminal=colour, no_color=not colour, width=width, highlight=False)
    console.print(view(picture))
    return sink.getvalue().rstrip()


def view(picture: Picture) -> Group:
    parts: list[RenderableType] = [Text(f"{picture.source}  ({picture.engine})", style="bold")]
    parts += [*_faults(picture), *_services(picture), *_batches(picture), *_ranks(picture), *_stacks(picture), *_gpus(picture)]
    parts += [*_traces(picture), *_flags(picture), *_rest(picture)]
    return Group(*parts)


def _faults(picture: Picture) -> list[RenderableType]:
    parts: list[RenderableType] = []
    alarms = picture.alarms
    if len(alarms) > 1:
        parts.append(Text(f"{len(alarms)} faults at once, each with its own evidence", style="bold red"))
    for row in picture.down:
        parts.append(Text(f"DOWN  service {row.name} is {row.state} (result {row.result}, {row.restarts} restarts)", style="bold red"))
    if picture.is_down and picture.where:
        parts.append(Text(f"  start    opsctl service start-group {picture.where}", style="bold"))
    for fault in picture.faults:
        verdict = fault.verdict
        if not fault.told and fault.question is Question.serving and picture.is_down:
            parts.append(Text(f"{fault.question.value}  no", style="bold red"))
            continue
        if not fault.told:
            parts.append(Text(f"{fault.question.value}  {fault.answer}", style="yellow"))
            parts += [Text(f"  decide  {gap.reason}") for gap in verdict.missing if gap.what == "what would decide"]
            continue
        style = "bold red" if fault.is_alarm else "green" if verdict.verdict.value in ("healthy", "idle_not_hung") else "yellow"
        answer = f"{fault.question.value} {fault.answer}"
        parts.append(Text(f"{verdict.verdict.value}  (confidence {verdict.confidence:.2f})   {answer}", style=style))
        parts += _evidence(verdict, picture)
    return parts


def _evidence(verdict: Verdict, picture: Picture) -> list[RenderableType]:
    parts: list[RenderableType] = []
    for item in verdict.evidence:
        where = item.cite.artefact + (f":{item.cite.line}" if item.cite.line else "")
        parts.append(
            Text(
                f"  {'for    ' if item.supports else 'against'}  {item.text.partition(chr(10))[0]}  [{where}]",
                style="" if item.supports else "dim",
            )
        )
    parts += [Text(f"  suspect  {suspect}", style="bold") for suspect in verdict.suspects]
    parts += [Text(f"  decide   {gap.reason}") for gap in verdict.missing if gap.what == "what would decide"]
    if verdict.runbook:
        bundle = f" --bundle {shlex.quote(picture.saved)}" if picture.saved else ""
        words = f"opsctl runbook run {verdict.verdict.value} {picture.where}".rstrip() + bundle
        parts.append(Text(f"  next     {verdict.runbook}: {words}", style="bold"))
    return parts


def _services(picture: Picture) -> list[RenderableType]:
    if not picture.services:
        return []
    table = _table("service", "node", "role", "state", "invocation", "pid", "up s", "restarts", "result")
    for row in picture.services:
        up = f"{row.age_s:.0f}" if row.age_s is not None else "-"
        state = row.state or f"not asked: {row.error}"
        table.add_row(row.name, row.node, row.role, state, row.invocation[:8], str(row.pid or "-"), up, str(row.restarts), row.result)
    parts: list[RenderableType] = [table]
    if picture.seen:
        seen = picture.seen
        moved = f"nothing moved for {seen.quiet_s:.1f} of {seen.looked_s:.1f} s" if seen.quiet_s else f"looked for {seen.looked_s:.1f} s"
        parts.append(Text(f"now: {seen.state}, {seen.held:g} requests held, {moved}"))
    for one in picture.incidents:
        parts.append(Text(f"taken of this start: {one.id} ({one.reason or 'no reason given'}): {one.verdict}", style="yellow"))
    return parts


def _batches(picture: Picture) -> list[RenderableType]:
    if not picture.batches:
        return [Text("last batch: none in the evidence", style="dim")]
    table = _table("last batch", "role", "age s", "what", "where")
    for one in picture.batches:
        where = one.cite.artefact + (f":{one.cite.line}" if one.cite.line else "")
        table.add_row(one.kind, one.role, "-" if one.age_s is None else f"{one.age_s:.1f}", one.text, where)
    return [table]


def _ranks(picture: Picture) -> list[RenderableType]:
    if not picture.ranks:
        return []
    table = _table("rank", "node", "pid", "state", "phase", "device", "stands")
    for row in picture.ranks:
        style = "bold yellow" if row.odd else ""
        table.add_row(
            f"{row.rank}{' (odd)' if row.odd else ''}",
            row.node,
            str(row.pid or "-"),
            row.state,
            row.phase,
            row.device,
            row.stands,
            style=style,
        )
    return [table]


def _stacks(picture: Picture) -> list[RenderableType]:
    """The main threads of all ranks as one tree: where they part is where it matters."""
    parts: list[RenderableType] = []
    for name, roots in picture.trees[:1]:
        tree = Tree(Text(f"stacks of all ranks, {name}", style="dim"), guide_style="dim")
        for root in roots:
            _branch(tree, root)
        parts.append(tree)
    return parts


def _branch(tree: Tree, node: Node) -> None:
    frames = node.frames if len(node.frames) <= _FRAMES else [f"... {len(node.frames) - _FRAMES} frames", *node.frames[-_FRAMES:]]
    branch = tree.add(Text(f"[{', '.join(node.who)}] " + "\n".join(frames), style="bold yellow" if node.odd else ""))
    for child in node.children:
        _branch(branch, child)


def _gpus(picture: Picture) -> list[RenderableType]:
    if not picture.gpus:
        return []
    table = _table("GPU", "node", "util %", "mem %", "W", "cap W", "source")
    for gpu in picture.gpus:
        cells = ["-" if value is None else f"{value:.0f}" for value in (gpu.util, gpu.mem_util, gpu.power_w, gpu.limit_w)]
        table.add_row(str(gpu.index), gpu.node, *cells, gpu.source)
    return [table]


def _traces(picture: Picture) -> list[RenderableType]:
    return [Text(f"traceback of this invocation\n  {trace}".replace("\n", "\n  "), style="red") for trace in picture.tracebacks] or [
        Text("no traceback of this invocation", style="dim")
    ]


def _flags(picture: Picture) -> list[RenderableType]:
    parts: list[RenderableType] = []
    for what, rows in (("flag", picture.flags), ("file of the model", picture.files)):
        told = [flag for flag in rows if flag.state != "unknown"]
        if told:
            table = _table(what, "", "value, or what it means")
            for flag in told:
                by_default = "  (by default)" if flag.source == DEFAULT and flag.state == "set" else ""
                table.add_row(flag.name, flag.state, flag.text + by_default, style=_style(flag))
            parts.append(table)
        for why in dict.fromkeys(flag.text for flag in rows if flag.state == "unknown"):
            names = ", ".join(flag.name for flag in rows if flag.state == "unknown" and flag.text == why)
            parts.append(Text(f"not known: {names}: {why}", style="dim"))
    return parts


def _style(flag: Flag) -> str:
    return {"set": "", "not set": "yellow"}.get(flag.state, "dim")


def _rest(picture: Picture) -> list[RenderableType]:
    parts: list[RenderableType] = []
    if picture.health:
        parts.append(Text("health: " + "; ".join(picture.health)))
    if picture.metrics:
        parts.append(Text("metrics: " + ", ".join(f"{name} {value:g}" for name, value in picture.metrics.items())))
    for gap in picture.missing[:_MOST_MISSING]:
        parts.append(Text(f"missing  {gap.what}: {gap.reason}", style="dim"))
    if len(picture.missing) > _MOST_MISSING:
        parts.append(Text(f"missing  {len(picture.missing) - _MOST_MISSING} more; --json has them all", style="dim"))
    if picture.saved:
        parts.append(Text(f"bundle {picture.saved}"))
    return [*parts, Text(f"{picture.seconds:.1f} s", style="dim")]


def _table(*heads: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    for head in heads:
        table.add_column(head, overflow="fold")
    return table
