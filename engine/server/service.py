"""What every route works with: made once in ``main`` (or by a test) and handed to the app."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path

from engine.config import Settings
from engine.messages import Ready
from engine.server.auth import Keys
from engine.server.errors import ApiError
from engine.server.identity import Identity
from engine.server.metrics import Meters
from engine.server.sampling_defaults import SamplingDefaults
from engine.server.size import longest_token
from engine.server.wire import Link
from engine.text.tokenizer import Tokenizer

_LOADING_RETRY_S = 5
_DRAINING_RETRY_S = 10


@dataclass
class Service:
    """``draining`` is the only thing that changes, once: at SIGTERM. ``longest_token`` is in characters."""

    settings: Settings
    identity: Identity
    tokenizer: Tokenizer
    link: Link
    meters: Meters
    keys: Keys
    run_directory: Path
    sampling: SamplingDefaults = field(default_factory=SamplingDefaults)
    draining: bool = False
    longest_token: int = field(init=False)
    _seeds: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self.longest_token = longest_token(self.tokenizer)
        self._seeds = random.Random(self.settings.model.random_seed or None)  # None: from the system's entropy

    def draw_seed(self) -> int:
        """A seed for a request that brings none."""
        return self._seeds.getrandbits(62)

    def serving(self) -> Ready:
        """What the scheduler said when it was ready.

        Raises:
            ApiError: 503 with Retry-After: it is not yet, or the server is going down.
        """
        if self.draining:
            raise ApiError(503, "the server is shutting down", code="draining", retry_after_s=_DRAINING_RETRY_S)
        if self.link.ready is None:
            raise ApiError(503, "loading: the model is not ready yet", code="loading", retry_after_s=_LOADING_RETRY_S)
        return self.link.ready

    @property
    def status(self) -> str:
        return "draining" if self.draining else "loading" if self.link.ready is None else "ready"

    def check_model(self, name: str | None) -> None:
        """Refuse another model's name (404). None, empty and ``default`` are this one."""
        if name and name not in (self.identity.served_name, "default"):
            text = f"the model {name!r} is not served here; this is {self.identity.served_name!r}"
            raise ApiError(404, text, code="model_not_found", param="model")
