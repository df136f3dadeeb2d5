"""The stage's gateway in front of the contract server, whose model is called ``contract``."""

from __future__ import annotations

from typing import Any

from opsctl.staging import gateway


class Gateway(gateway.Gateway):
    def __init__(self, upstream: str, **how: Any) -> None:
        super().__init__(upstream, model="contract", **how)
