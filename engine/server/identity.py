"""Who answers: the names and ids that every answer carries, so that it can be traced to a configuration and a start."""

from __future__ import annotations

import hashlib
import re
import uuid
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from engine.config import Settings

_RID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,127}")
_OWN = ("warmup-",)  # names under which the scheduler runs requests of its own


@dataclass(frozen=True)
class Identity:
    """``created`` is the start of the process in Unix seconds, as /v1/models gives it."""

    version: str
    served_name: str
    config_digest: str
    invocation_id: str
    created: int

    @property
    def fingerprint(self) -> str:
        """``system_fingerprint``: which configuration and which start of it gave an answer."""
        return f"lb-{self.config_digest[:12]}-{self.invocation_id[:8]}"

    @staticmethod
    def of(settings: Settings, *, model_folder: Path, invocation_id: str, now_unix_s: int) -> Identity:
        name = settings.model.served_name or model_folder.resolve().name
        return Identity(_version(), name, settings.digest, invocation_id.replace("-", ""), now_unix_s)


def _version() -> str:
    try:
        return metadata.version("lastbatch")
    except metadata.PackageNotFoundError:  # run from a source tree that was never installed
        return "0"


def request_id(asked: str | None) -> str:
    """The client's own ``x-request-id`` if it is 1 to 128 letters, digits or ``._:-``, else a new one.

    It goes into logs and names, so nothing else is taken from a client. A name that is the scheduler's own gets
    ``client-`` in front.
    """
    if not asked or not _RID.fullmatch(asked):
        return uuid.uuid4().hex
    return f"client-{asked}" if asked.startswith(_OWN) else asked


def prompt_sha(text: str) -> str:
    """The first 8 hex digits of the SHA-256 of the text a client knows it sent.

    For chat that is the text of the last user message (the last message, if none is the user's); for completions the
    prompt; for a prompt of ids, these in decimal with blanks between; for several prompts, the first. So whoever sent
    a nonce can find its log line, and nobody can read the prompt in it.
    """
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()[:8]
