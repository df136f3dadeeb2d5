"""Where playbooks and runbooks lie: a site's own folder comes first, then those that ship with lastbatch.

The site's folder is ``$OPSCTL_PLAYBOOKS`` (``$OPSCTL_RUNBOOKS``), else ``playbooks`` (``runbooks``) beside the fleet file.
"""

from __future__ import annotations

import difflib
import errno
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path


class NotFound(ValueError):
    """No document of this name; the text says which there are."""


@dataclass(frozen=True)
class Shelf:
    """``kind`` is playbooks or runbooks, ``suffix`` what their files end in."""

    kind: str
    suffix: str
    site: Path | None

    @staticmethod
    def of(kind: str, suffix: str, env: Mapping[str, str], fleet_path: str = "") -> Shelf:
        """Raises OSError where the environment names a folder that is none: whoever set it would miss what is in it."""
        own = env.get(f"OPSCTL_{kind.upper()}")
        if own and not Path(own).is_dir():
            raise NotADirectoryError(errno.ENOTDIR, f"OPSCTL_{kind.upper()} names no folder", own)
        beside = Path(fleet_path).absolute().parent / kind if fleet_path else None
        return Shelf(kind, suffix, Path(own) if own else beside if beside is not None and beside.is_dir() else None)

    def all(self) -> dict[str, Path]:
        """Name to file, those of the site in the place of packaged ones of the same name."""
        packaged = Path(str(resources.files(self.kind)))
        folders = (packaged, *((self.site,) if self.site else ()))
        found = {path.stem: path for folder in folders for path in sorted(folder.glob(f"*{self.suffix}"))}
        return dict(sorted(found.items()))

    def find(self, name: str) -> Path:
        """The file of a name, or the file itself where the name is a path. Raises NotFound."""
        if "/" in name or name.endswith(self.suffix):
            path = Path(name)
            if path.is_file():
                return path
            raise NotFound(f"{name}: no such file")
        known = self.all()
        if name in known:
            return known[name]
        near = difflib.get_close_matches(name, known, 1)
        hint = f'did you mean "{near[0]}"?' if near else f"there are {', '.join(known)}"
        raise NotFound(f"no {self.kind.removesuffix('s')} {name!r}; {hint}")
