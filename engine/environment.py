"""Every environment variable that the engine reads or sets, for the reference page. A test compares it with the code."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Variable:
    name: str
    meaning: str


READ = (
    Variable("LASTBATCH_API_KEY", "the key that clients must send; `--api-key-file` comes first"),
    Variable("LASTBATCH_ADMIN_KEY", "the key for /admin; `--admin-key-file` comes first"),
    Variable("RUNTIME_DIRECTORY", "run directory given by systemd (RuntimeDirectory=); `--run-dir` comes first"),
    Variable("XDG_RUNTIME_DIR", "without the two above, the run directory is lastbatch/NAME in here, else /tmp/lastbatch-UID/NAME"),
    Variable("XDG_CACHE_HOME", "the default model lies in lastbatch/models in here; else in ~/.cache"),
)
