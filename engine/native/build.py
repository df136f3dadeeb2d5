"""Compile the C parts at first use, into the user's cache, and load them.

A library's file is named by a digest of its source, its flags, the machine and its libc, so a new version never meets
an old file. It is written beside its place and renamed: ranks that start at once may compile twice, and neither sees
half a file. Where there is no compiler the callers' fallback runs, and ``paths`` says so with the reason.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

_log = logging.getLogger("engine.native")
_SOURCES = Path(__file__).parent
_COMPILE_TIMEOUT_S = 120.0
_BASE_FLAGS = ("-O3", "-fPIC", "-shared", "-std=gnu11", "-Wall", "-Wno-psabi", "-Werror=implicit-function-declaration")
_LEVELS: tuple[tuple[str, tuple[str, ...], tuple[str, ...]], ...] = (
    ("avx512-bf16", ("avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_bf16", "fma"),
     ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512bf16", "-mavx2", "-mfma")),
    ("avx512", ("avx512f", "avx512bw", "avx512vl", "avx512dq", "fma"),
     ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx2", "-mfma")),
    ("avx2", ("avx2", "fma"), ("-mavx2", "-mfma")),
    ("portable", (), ()),
)  # fmt: skip


@dataclass(frozen=True)
class _Source:
    files: tuple[str, ...]
    flags: tuple[str, ...]
    by_level: bool  # compiled for the best instruction set of this CPU


_LIBRARIES: Mapping[str, _Source] = {
    "collectives": _Source(("collectives.c",), (), by_level=False),
    "kernels": _Source(("kernels.c", "kernels_typed.h", "panels.h", "vectors.h"), ("-fopenmp",), by_level=True),
}


@dataclass(frozen=True)
class _Loaded:
    library: ctypes.CDLL | None
    text: str  # what runs, or why nothing does


_lock = threading.Lock()
_loaded: dict[str, _Loaded] = {}


def library(name: str) -> ctypes.CDLL | None:
    """The library, compiled if need be; None where it cannot be had (``paths`` says why). Never raises for that.

    ``LASTBATCH_NATIVE=0`` in the environment turns the C parts off; the name of an instruction set (``avx512-bf16``,
    ``avx512``, ``avx2``, ``portable``) allows that one only.
    """
    return _load(name).library


def paths() -> dict[str, str]:
    """What runs for each library: ``C (avx512-bf16)``, or ``fallback: `` and the reason."""
    return {name: _load(name).text for name in _LIBRARIES}


def _load(name: str) -> _Loaded:
    with _lock:
        if name not in _loaded:
            try:
                _loaded[name] = _build(name, _LIBRARIES[name], os.environ)
            except (OSError, subprocess.SubprocessError) as error:
                _loaded[name] = _Loaded(None, f"fallback: {error}")
        return _loaded[name]


def _build(name: str, source: _Source, env: Mapping[str, str]) -> _Loaded:
    wanted = env.get("LASTBATCH_NATIVE", "")
    if wanted == "0":
        return _Loaded(None, "fallback: LASTBATCH_NATIVE=0")
    if wanted and wanted not in {level for level, _, _ in _LEVELS}:
        return _Loaded(None, f"fallback: LASTBATCH_NATIVE={wanted} is neither 0 nor one of {', '.join(level for level, _, _ in _LEVELS)}")
    folder = cache_folder(env)
    compiler = _compiler(env)
    levels = [(level, flags) for level, needs, flags in _LEVELS if _has(needs) and wanted in ("", level)] if source.by_level else [("", ())]
    failures = [] if levels else [f"LASTBATCH_NATIVE={wanted}: this CPU lacks it"]
    for level, extra in levels:
        flags = (*_BASE_FLAGS, *source.flags, *extra)
        path = folder / f"{name}-{_digest(source, flags)}.so"
        if not path.exists():
            if compiler is None:
                failures.append("no C compiler (gcc, cc or clang) on PATH")
                break
            failure = _compile(compiler, source, flags, path)
            if failure:
                failures.append(f"{level or name}: {failure}")
                continue
        try:
            return _Loaded(ctypes.CDLL(str(path)), f"C ({level})" if level else "C")
        except OSError as error:
            failures.append(f"{path}: {error}")
    return _Loaded(None, f"fallback: {'; '.join(failures)}")


def cache_folder(env: Mapping[str, str]) -> Path:
    """``$XDG_CACHE_HOME/lastbatch/native`` (``~/.cache`` by default); made if missing, for this user only."""
    base = env.get("XDG_CACHE_HOME")
    folder = (Path(base) if base else Path.home() / ".cache") / "lastbatch" / "native"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:  # a service user may have no home
        folder = Path(tempfile.gettempdir()) / f"lastbatch-native-{os.getuid()}"
        folder.mkdir(mode=0o700, exist_ok=True)
    if folder.stat().st_uid != os.getuid():
        raise PermissionError(f"{folder} belongs to another user; set XDG_CACHE_HOME")
    return folder


def _compiler(env: Mapping[str, str]) -> str | None:
    wanted = [env["CC"]] if env.get("CC") else ["gcc", "cc", "clang"]
    return next((found for name in wanted if (found := shutil.which(name, path=env.get("PATH")))), None)


def _compile(compiler: str, source: _Source, flags: Sequence[str], path: Path) -> str:
    """Compile to ``path``; the reason if that fails."""
    _log.info("Compiling %s (once; it is kept in %s)", source.files[0], path.parent)
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        done = subprocess.run([compiler, *flags, "-o", str(scratch), str(_SOURCES / source.files[0]), "-lm"],
                              capture_output=True, text=True, timeout=_COMPILE_TIMEOUT_S, check=False)  # fmt: skip
        if done.returncode:
            lines = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines() or ["no message"]
            return f"{compiler}: {lines[0]}"
        scratch.replace(path)
        return ""
    finally:
        scratch.unlink(missing_ok=True)


def _digest(source: _Source, flags: Sequence[str]) -> str:
    digest = hashlib.sha256()
    for file in source.files:
        digest.update((_SOURCES / file).read_bytes())
    digest.update("\0".join((*flags, platform.machine(), platform.libc_ver()[1])).encode())
    return digest.hexdigest()[:24]


def _has(needs: Sequence[str]) -> bool:
    return set(needs) <= _cpu_flags()


def _cpu_flags() -> frozenset[str]:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return frozenset()
    line = next((line for line in text.splitlines() if line.startswith("flags")), "")
    return frozenset(line.split())


def cpu_has(*flags: str) -> bool:
    """Whether /proc/cpuinfo names all these flags."""
    return _has(flags)
