"""``opsctl bundle``: look at evidence: verify, show, diff, extract, pack. A bundle is a folder or its ``.tar.zst``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer

from monitors import report
from monitors.capture import archive, compare, manifest
from monitors.exit_codes import ExitCode
from opsctl.answer import Answer, Problem, Session

app = typer.Typer(no_args_is_help=True, help="Look at evidence. A bundle is a folder or its .tar.zst.")

BUNDLE = typer.Argument(help="A bundle: its folder, or its .tar.zst.")
OTHER = typer.Argument(help="The other one.")
ARCHIVE = typer.Argument(help="A .tar.zst.")
INTO = typer.Option(Path(), "--into", help="Folder to unpack to.")
JSON = typer.Option(False, "--json", help="Print one JSON envelope.")


@app.command()
def verify(context: typer.Context, bundle: Path = BUNDLE, as_json: bool = JSON) -> None:
    """Check every artefact against its digest. Exit 9 when one is missing or was changed."""
    with archive.opened(bundle) as folder:
        checked = manifest.verify(folder)
    data = {"bundle": str(bundle), "ok": checked.ok, "items": checked.items, "problems": checked.problems, "notes": checked.notes}
    lines = [
        f"{bundle}: {'valid' if checked.ok else 'NOT VALID'}, {checked.items} artefacts",
        *(f"  note: {note}" for note in checked.notes),
    ]
    problems = tuple(Problem("digest", text, where=str(bundle)) for text in checked.problems)
    context.obj.show(
        Answer("bundle verify", data, "\n".join(lines), ExitCode.DONE if checked.ok else ExitCode.FOUND, problems), as_json=as_json
    )


@app.command()
def show(context: typer.Context, bundle: Path = BUNDLE, as_json: bool = JSON) -> None:
    """Say what a bundle holds: verdict, evidence, artefacts, gaps."""
    with archive.opened(bundle) as folder:
        head = manifest.load(folder)
        text = report.markdown(folder)
    items = head.pop("items")
    context.obj.show(Answer("bundle show", {**head, "items": items}, text + _artefacts(items)), as_json=as_json)


@app.command()
def diff(context: typer.Context, before: Path = BUNDLE, after: Path = OTHER, as_json: bool = JSON) -> None:
    """Say what differs between two bundles: verdict, ranks, settings, tools, artefacts."""
    with archive.opened(before) as one, archive.opened(after) as two:
        found = compare.compare(one, two)
    data = [{"what": one.what, "before": one.before, "after": one.after} for one in found]
    lines = [f"{one.what}\n  - {_short(one.before)}\n  + {_short(one.after)}" for one in found] or ["no difference"]
    context.obj.show(Answer("bundle diff", data, "\n".join(lines)), as_json=as_json)


@app.command()
def extract(
    context: typer.Context, bundle: Path = ARCHIVE,
    into: Path = INTO, as_json: bool = JSON,
) -> None:  # fmt: skip
    """Unpack an archive and verify it."""
    if not bundle.is_file():
        raise manifest.BundleError(f"{bundle}: no such archive")
    folder = archive.unpack(bundle, into)
    checked = manifest.verify(folder)
    problems = tuple(Problem("digest", text, where=str(folder)) for text in checked.problems)
    code = ExitCode.DONE if checked.ok else ExitCode.FOUND
    context.obj.show(Answer("bundle extract", {"folder": str(folder), "ok": checked.ok}, str(folder), code, problems), as_json=as_json)


@app.command()
def pack(context: typer.Context, bundle: Path = BUNDLE, as_json: bool = JSON) -> None:
    """Write a bundle's folder as one .tar.zst beside it."""
    session: Session = context.obj
    manifest.load(bundle)
    packed = archive.pack(bundle)
    session.show(Answer("bundle pack", {"archive": str(packed), "bytes": packed.stat().st_size}, str(packed)), as_json=as_json)


def _artefacts(items: list[dict[str, Any]]) -> str:
    lines = ["", "## Artefacts", ""]
    lines += [
        f"  {item['sha256'][:12]}  {item['path']}  {item['start'][11:23]}..{item['end'][11:23]}"
        for item in items
        if item["outcome"] == "taken"
    ]
    return "\n".join(lines)


def _short(value: Any) -> str:
    text = "(absent)" if value is None else str(value)
    return text if len(text) <= 160 else text[:157] + "..."
