"""Findings that no artefact of one moment shows: what a monitor saw over time and wrote into ``progress.json``."""

from __future__ import annotations

from collections.abc import Iterator

from monitors.judge.finding import Finding
from monitors.judge.scene import Cite, Scene

_CITE = Cite("progress.json")


def find(scene: Scene) -> Iterator[tuple[str, Finding]]:
    wrong, asked = scene.canary
    if wrong:
        text = f"{wrong} of the last {asked} answers to the seeded canary under load differ from the one at rest"
        yield "answers_differ", Finding(text, _CITE)
    if scene.slots:
        yield "slots_leak", Finding(scene.slots, _CITE)
    if scene.markup:
        yield "leak_counter", Finding(scene.markup, _CITE)
