"""Another image, package or model: an upgrade is an edit of the command line whose old side must still be there.

``--package`` is another environment beside the present one, never an installation over it: what is overwritten cannot
be gone back to. ``--image`` is another image of the container that a unit runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import PurePosixPath

from opsctl.rollout import flags
from opsctl.rollout.flags import Edit, EditError
from opsctl.service.manager import ServiceManager

_LOOK_S = 20.0
MODEL_FLAGS = ("model-path", "model")


def package(argv: Sequence[str], folder: str) -> tuple[str, ...]:
    """The same program of another environment: ``/opt/lb-1.2/bin/lastbatch`` becomes ``FOLDER/bin/lastbatch``."""
    program = PurePosixPath(argv[0])
    if program.parent.name != "bin" or not folder.startswith("/"):
        raise EditError(f"--package {folder}: give the absolute path of an environment with a bin folder; the service runs {program}")
    return (str(PurePosixPath(folder) / "bin" / program.name), *argv[1:])


def model(argv: Sequence[str], name: str) -> tuple[str, ...]:
    """Raises EditError when the command line does not name its model by a flag."""
    for flag in MODEL_FLAGS:
        if flags.value(argv, flag) is not None:
            return flags.edit(argv, [Edit(flag, name)])
    if "serve" in argv and argv.index("serve") + 1 < len(argv) and not argv[argv.index("serve") + 1].startswith("-"):
        at = argv.index("serve") + 1  # vLLM names it without a flag
        return (*argv[:at], name, *argv[at + 1 :])
    raise EditError(f"--model {name}: the command line names no model by {' or '.join('--' + flag for flag in MODEL_FLAGS)}")


def image(argv: Sequence[str], old: str, new: str) -> tuple[str, ...]:
    """Raises EditError when the image is not exactly one word of the command line."""
    places = [at for at, word in enumerate(argv) if word == old]
    if not old or len(places) != 1:
        raise EditError(f"--image {new}: the image that runs now ({old or 'unknown'}) is {len(places)} times in the command line, not once")
    return (*argv[: places[0]], new, *argv[places[0] + 1 :])


def missing(manager: ServiceManager, before: Sequence[str], after: Sequence[str], image_before: str, image_after: str) -> list[str]:
    """What is not there on the service's machine of the programs, models and images before and after. A model that is
    no absolute path (a hub's name) cannot be looked for. Raises ServiceError."""
    found = []
    for word, argv in (("old", before), ("new", after)):
        paths = [argv[0]] if before[0] != after[0] else []
        paths += [
            path
            for flag in MODEL_FLAGS
            if (path := _model_path(argv, flag)) and path != _model_path(after if word == "old" else before, flag)
        ]
        for path in paths:
            if manager.run(("test", "-e", path), _LOOK_S)[0]:
                found.append(f"{manager.name}: the {word} {path} is not there on {manager.node}")
    for word, name in (("old", image_before), ("new", image_after)):
        if image_before != image_after and not manager.has_image(name):
            found.append(f"{manager.name}: the {word} image {name} is not there on {manager.node}; pull it first")
    return found


def _model_path(argv: Sequence[str], flag: str) -> str:
    value = flags.value(argv, flag) or ""
    return value if value.startswith("/") else ""
