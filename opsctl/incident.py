"""``opsctl incident``: drafts from a bundle. A person finishes them; no number in them is made up."""

from __future__ import annotations

from pathlib import Path

import typer

from monitors import report as reporting
from monitors.capture import archive
from opsctl import wholefile
from opsctl.answer import Answer

app = typer.Typer(no_args_is_help=True, help="Draft the texts of an incident from its bundle.")

BUNDLE = typer.Argument(help="A bundle: its folder, or its .tar.zst.")
OUT = typer.Option(None, "--out", help="Write incident.md and upstream.md into this folder instead of standard output.")
JSON = typer.Option(False, "--json", help="Print one JSON envelope.")


@app.callback()
def _group() -> None:
    """Keeps ``report`` a word of its own while it is the only command."""


@app.command()
def report(context: typer.Context, bundle: Path = BUNDLE, out: Path | None = OUT, as_json: bool = JSON) -> None:
    """Draft the incident text and an upstream bug report; every number cites the artefact it was read from."""
    with archive.opened(bundle) as folder:
        texts = {"incident.md": reporting.incident(folder), "upstream.md": reporting.upstream(folder)}
    if out is not None:
        for name, text in texts.items():
            wholefile.write(out / name, text.encode(errors="backslashreplace"))
    written = [str(out / name) for name in texts] if out is not None else []
    text = "\n".join(written) if written else "\n".join(texts.values())
    data = {"incident": texts["incident.md"], "upstream": texts["upstream.md"], "files": written}
    context.obj.show(Answer("incident report", data, text), as_json=as_json)
