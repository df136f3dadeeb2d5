"""How tokens are drawn where a request does not say: as the model's publisher recommends, or as OpenAI does.

SGLang's and vLLM's rule: of generation_config.json the drawing parameters count, ``do_sample`` does not. A small model at
temperature 1 writes gibberish, and its publisher knows.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from engine.config import ConfigError, Settings


class SamplingDefaults(Struct, frozen=True):
    """The fields' own defaults are OpenAI's; their ranges are those of requests. ``top_k`` 0: all."""

    temperature: Annotated[float, Meta(ge=0, le=2)] = 1.0
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] = 0
    min_p: Annotated[float, Meta(ge=0, le=1)] = 0.0
    repetition_penalty: Annotated[float, Meta(ge=0.01, le=100)] = 1.0

    @property
    def note(self) -> str:
        """What differs from OpenAI's, in words; empty: nothing."""
        usual = SamplingDefaults()
        return ", ".join(
            f"{name} {getattr(self, name):g}" for name in self.__struct_fields__ if getattr(self, name) != getattr(usual, name)
        )


def read_defaults(settings: Settings, folder: Path) -> SamplingDefaults:
    """The defaults under ``--sampling-defaults``.

    Raises:
        ConfigError: generation_config.json cannot be read, or holds a value that no request could have.
    """
    path = folder / "generation_config.json"
    if settings.model.sampling_defaults == "openai" or not path.is_file():
        return SamplingDefaults()
    try:
        found: Any = json.loads(path.read_text(encoding="utf-8"))
        given = {name: found[name] for name in SamplingDefaults.__struct_fields__ if found.get(name) is not None}
        return msgspec.convert(given, SamplingDefaults)
    except (OSError, ValueError, AttributeError, msgspec.ValidationError) as error:
        raise ConfigError(f"{path}: {error}; mend it, or give --sampling-defaults openai") from None
