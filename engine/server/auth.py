"""Who may ask: an API key for clients, an admin key for /admin. Keys are compared in constant time and never logged."""

from __future__ import annotations

import hmac
import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from starlette.requests import Request

from engine import keys
from engine.config import ConfigError, Settings
from engine.server.errors import ApiError


@dataclass(frozen=True)
class Keys:
    """Empty: none is configured."""

    api: str = field(default="", repr=False)
    admin: str = field(default="", repr=False)
    faults_enabled: bool = False

    @staticmethod
    def read(settings: Settings, env: Mapping[str, str]) -> Keys:
        """From the key files, else from LASTBATCH_API_KEY and LASTBATCH_ADMIN_KEY, which leave ``env``.

        Raises:
            ConfigError: a key file that is empty or cannot be read.
        """
        server = settings.server
        given = keys.take(env) | keys.received(env)
        return Keys(
            _key("--api-key-file", server.api_key_file) or given.get("LASTBATCH_API_KEY", ""),
            _key("--admin-key-file", server.admin_key_file) or given.get("LASTBATCH_ADMIN_KEY", ""),
            settings.launch.enable_faults,
        )

    def check_client(self, request: Request) -> None:
        """Raises ApiError 401: an API key is configured and this is not it."""
        if self.api and not _same(_sent(request), self.api):
            raise ApiError(401, "a valid API key is needed: Authorization: Bearer KEY", code="invalid_api_key")

    def check_admin(self, request: Request) -> None:
        """Raises ApiError 401 or 403. Without an admin key only this host may administer, and only for drills."""
        if self.admin:
            if not _same(_sent(request), self.admin):
                raise ApiError(401, "a valid admin key is needed: Authorization: Bearer KEY", code="invalid_admin_key")
        elif not self.faults_enabled or not _is_loopback(request):
            raise ApiError(403, "no admin key is configured: start with --admin-key-file FILE", code="admin_disabled")


def _key(flag: str, path: str) -> str:
    if not path:
        return ""
    try:
        key = Path(path).read_text(encoding="utf-8").strip()
    except (OSError, ValueError) as error:
        raise ConfigError(f"{flag}: {path}: {error}") from error
    if not key:
        raise ConfigError(f"{flag}: {path} is empty")
    return key


def _sent(request: Request) -> str:
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else ""


def _same(sent: str, key: str) -> bool:
    return hmac.compare_digest(sent.encode(), key.encode())


def _is_loopback(request: Request) -> bool:
    if request.client is None:
        return False
    try:
        address = ipaddress.ip_address(request.client.host)
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback
