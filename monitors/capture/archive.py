"""A bundle as one file: ``ID.tar.zst`` beside the folder, made whole or not at all, and read back without trust."""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import zstandard

from monitors.capture.manifest import BundleError

SUFFIX = ".tar.zst"
_LEVEL = 10
_MOST_BYTES = 4 << 30  # what an archive may unpack to


def pack(folder: Path, target: Path | None = None) -> Path:
    """Write ``folder`` as an archive and return its path. Owner, group and times are left out, so that the same
    bundle gives the same bytes. Raises OSError."""
    where = target or folder.with_name(folder.name + SUFFIX)
    scratch = where.with_name(f".{where.name}.part")
    try:
        with scratch.open("wb") as raw:
            packer = zstandard.ZstdCompressor(level=_LEVEL)
            with packer.stream_writer(raw, closefd=False) as packed, tarfile.open(fileobj=packed, mode="w|") as tar:
                for path in sorted(found for found in folder.rglob("*") if found.is_file()):
                    if path.name.startswith("."):
                        continue
                    data = path.read_bytes()
                    entry = tarfile.TarInfo(str(PurePosixPath(folder.name, *path.relative_to(folder).parts)))
                    entry.size, entry.mode = len(data), 0o644
                    tar.addfile(entry, io.BytesIO(data))
            raw.flush()
            os.fsync(raw.fileno())
        scratch.rename(where)
    except OSError:
        scratch.unlink(missing_ok=True)
        raise
    return where


def unpack(archive: Path, into: Path) -> Path:
    """Unpack to a new folder below ``into`` and return it.

    Raises:
        BundleError: not such an archive; a name that leads out of the folder, a link or a device; or the folder exists.
        OSError: it cannot be read or written.
    """
    made: list[Path] = []
    try:
        return _unpack(archive, into, made)
    except BaseException:
        for folder in made:  # half a bundle would pass for one, and stand in the way of a second try
            shutil.rmtree(folder, ignore_errors=True)
        raise


def _unpack(archive: Path, into: Path, made: list[Path]) -> Path:
    """``made`` gets the folder once it is ours."""
    taken = 0
    try:
        with (
            archive.open("rb") as raw,
            zstandard.ZstdDecompressor().stream_reader(raw) as plain,
            tarfile.open(fileobj=plain, mode="r|") as tar,
        ):
            for entry in tar:
                parts = PurePosixPath(entry.name).parts
                if not entry.isfile() or len(parts) < 2 or parts[0] == "/" or ".." in parts:
                    raise BundleError(f"{archive}: {entry.name!r} is no plain file of one bundle")
                taken += entry.size
                if taken > _MOST_BYTES:
                    raise BundleError(f"{archive}: holds more than {_MOST_BYTES} bytes")
                if not made:
                    (into / parts[0]).mkdir(parents=True)
                    made.append(into / parts[0])
                if made != [into / parts[0]]:
                    raise BundleError(f"{archive}: holds more than one bundle")
                path = into.joinpath(*parts)
                path.parent.mkdir(parents=True, exist_ok=True)
                source = tar.extractfile(entry)
                assert source is not None
                with path.open("wb") as file:
                    shutil.copyfileobj(source, file)
    except (tarfile.TarError, zstandard.ZstdError, EOFError) as error:
        raise BundleError(f"{archive}: no whole {SUFFIX} archive: {error}") from error
    except FileExistsError as error:
        raise BundleError(f"{error.filename}: exists already; name another folder") from error
    if not made:
        raise BundleError(f"{archive}: the archive is empty")
    return made[0]


@contextlib.contextmanager
def opened(path: Path) -> Iterator[Path]:
    """The bundle as a folder: itself, or an archive unpacked for as long as the block runs. Raises BundleError."""
    if path.is_dir():
        yield path
        return
    if not path.is_file():
        raise BundleError(f"{path}: no such bundle")
    with tempfile.TemporaryDirectory(prefix="bundle-") as scratch:
        yield unpack(path, Path(scratch))
