"""``--unit-file``: another unit file for a service, read, checked and held against the present one before it is touched."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from opsctl.rollout.flags import EditError
from opsctl.service import fragment, unittext
from opsctl.service.manager import Command, ServiceError, ServiceManager, UnitFile, UnitSource

_MOST_BYTES = 1 << 20


@dataclass(frozen=True)
class UnitWish:
    """``service`` empty: for every service of the deployment."""

    file: str
    text: str
    service: str = ""

    def __str__(self) -> str:
        return f"--unit-file {self.service}={self.file}" if self.service else f"--unit-file {self.file}"

    def meant_for(self, manager: ServiceManager) -> bool:
        return self.service in ("", manager.name, unit_of(manager))


@dataclass(frozen=True)
class Replaced:
    """One service's unit file before and after. ``path``: where a commit puts it; ``trial``: where it lies until then;
    ``argv`` and ``env``: what the next start would run of it."""

    unit: UnitFile
    path: str
    trial: str
    before_path: str
    before: str
    after: str
    argv: tuple[str, ...]
    env: dict[str, str]
    notes: tuple[str, ...] = ()


def unit_of(manager: ServiceManager) -> str:
    """A systemd service's name without its node: ``lastbatch@flash.service@n1`` is of the unit before the last ``@``."""
    return manager.name.rpartition("@")[0]


def parse(text: str) -> UnitWish:
    """``FILE``, or ``UNIT=FILE`` for one service. Raises EditError."""
    name, equals, file = text.partition("=")
    service, file = (name, file) if equals else ("", text)
    try:
        path = Path(file)
        if path.exists() and (not path.is_file() or path.stat().st_size > _MOST_BYTES):
            raise EditError(f"--unit-file {text}: a unit file is a plain file of at most {_MOST_BYTES} bytes")
        data = path.read_bytes().decode()
    except (OSError, UnicodeDecodeError) as error:
        raise EditError(f"--unit-file {text}: {getattr(error, 'strerror', None) or error}; write --unit-file FILE, or UNIT=FILE") from error
    return UnitWish(str(Path(file).absolute()), data, service)


def wished(wishes: Sequence[UnitWish], manager: ServiceManager) -> UnitWish | None:
    """The file that is meant for a service; one that names it comes before one for all. Raises EditError for two."""
    named = [one for one in wishes if one.service and one.meant_for(manager)] or [one for one in wishes if not one.service]
    if len(named) > 1:
        raise EditError(f"{', '.join(map(str, named))}: {manager.name} can have one unit file")
    return named[0] if named else None


def replace(wish: UnitWish, manager: ServiceManager, now: Command) -> Replaced:
    """Touches nothing. Where the command line of the new file is that of the present one, what runs stays, a committed
    override with it; else the new file's counts.

    Raises EditError for a file that cannot be used or changes nothing, ServiceError for a unit that cannot be read."""
    source, unit = manager.unit_source(), unit_of(manager)
    site = [one for one in source.files[1:] if one[0] not in source.ours]
    path, text = source.files[0]

    def read(files: Sequence[tuple[str, str]]) -> unittext.Text:
        return unittext.read(files, unit, source.folders)

    if text == wish.text:
        raise EditError(f"{wish}: {manager.name} has this very file already ({path} on {manager.node})")
    _refuse_misread(manager, source, now)
    try:
        old, new = read([source.files[0], *site]), read([(wish.file, wish.text), *site])
    except ServiceError as error:
        raise EditError(f"{wish}: {error}") from error
    problems = new.problems()
    if problems:
        raise EditError(f"{wish}: {'; '.join(problems)}")
    override = read([one for one in source.files if one[0] in source.ours])
    same = new.argv == old.argv
    notes = (
        [] if path == source.path else [f"{manager.name}: is read from {path} now; the new file goes to {source.path}, which comes first"]
    )
    if override.argv and same:
        notes.append(f"{manager.name}: the command line stays the one of the committed override; the file's own is the same as before")
    elif override.argv:
        notes.append(f"{manager.name}: the file's command line takes the place of the committed override's; see what goes in the diff")
    if old.settings.get("User") != new.settings.get("User"):
        notes.append(f"{manager.name}: it will run as {new.settings.get('User') or 'root'}, not as {old.settings.get('User') or 'root'}")
    kept = UnitFile(fragment.name(wish.text, unit), source.own)
    return Replaced(kept, source.path, source.trial, path, text, wish.text, now.argv if same else new.argv, {**new.env, **override.env},
                    tuple(notes))  # fmt: skip


def _refuse_misread(manager: ServiceManager, source: UnitSource, now: Command) -> None:
    """The present files, read as the new ones will be, must give what systemd itself reads in them."""
    read = unittext.read(source.files, unit_of(manager), source.folders)
    if read.argv != now.argv or read.env != dict(now.env):
        raise ServiceError(f"{manager.name}: its present files are read otherwise here than by systemd ({list(read.argv)[:6]}..., not "
                           f"{list(now.argv)[:6]}...), so what a new file would run cannot be told; change it by hand, then "
                           "opsctl rollout verify")  # fmt: skip


def problems(wish: UnitWish, manager: ServiceManager) -> tuple[list[str], str]:
    """What the node's own ``systemd-analyze verify`` says against the file, and why it could not be asked."""
    found, why = manager.check_unit(wish.text)
    return [f"{wish}: {manager.node}: systemd-analyze verify: {line}" for line in found], why
