"""The stacks of all ranks as one tree: where they go together, and where one goes another way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from monitors.judge.scene import Cite, Stack

_AT_REST = ("wait", "_recv_poll", "poll", "select", "epoll")


@dataclass
class Node:
    """One frame, or a chain of frames that the same ranks share. ``who`` are the ranks that stand in or under it."""

    frames: list[str]
    who: list[str]
    cite: Cite
    children: list[Node] = field(default_factory=list)
    odd: bool = False


def merge(stacks: Sequence[Stack], suspects: Sequence[str]) -> list[tuple[str, list[Node]]]:
    """``[(thread name, roots)]`` of the first samples, outermost frames first. A node is odd when only suspects stand in
    it, or, without suspects, when a minority does."""
    first = [stack for stack in stacks if not stack.sample]
    names: list[str] = []
    for stack in first:
        names += [thread.name for thread in stack.threads if thread.name not in names]
    names.sort(key=lambda name: (name != "MainThread", name))
    trees: list[tuple[str, list[Node]]] = []
    for name in names:
        roots: list[Node] = []
        whole: set[str] = set()
        for stack in first:
            for thread in stack.threads:
                if thread.name != name or not thread.frames:
                    continue
                whole.add(stack.who)
                level = roots
                for frame in reversed(thread.frames):
                    text = f"{frame.function}  {frame.file}{f':{frame.line}' if frame.line else ''}"
                    found = next((node for node in level if node.frames[0] == text), None)
                    if found is None:
                        found = Node([text], [], Cite(thread.cite.artefact, thread.cite.line))
                        level.append(found)
                    if stack.who not in found.who:
                        found.who.append(stack.who)
                    level = found.children
        if roots:
            trees.append((name or "(no name)", [_fold(root, whole, set(suspects)) for root in roots]))
    return trees


def _fold(node: Node, whole: set[str], suspects: set[str]) -> Node:
    """Frames that the same ranks share in a row become one node."""
    while len(node.children) == 1 and node.children[0].who == node.who:
        child = node.children[0]
        node.frames += child.frames
        node.children = child.children
    node.children = [_fold(child, whole, suspects) for child in node.children]
    here = set(node.who)
    split = here != whole
    node.odd = split and (here <= suspects if suspects & whole else len(here) * 2 < len(whole))
    return node
