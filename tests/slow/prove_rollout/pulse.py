"""A client that never stops asking, as a process of its own: ``pulse.py URL FILE [PAUSE [LIMIT]]`` appends ``SECONDS 0|1`` for
each completion that was asked for (monotonic time of the asking; 1: answered), PAUSE seconds apart, each given LIMIT at most."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import httpx

BODY = {"model": "", "messages": [{"role": "user", "content": "a pulse"}], "max_tokens": 4, "temperature": 0}


def main(url: str, file: Path, pause_s: float = 0.05, limit_s: float = 2.0) -> None:
    with httpx.Client(timeout=limit_s, trust_env=False) as client, file.open("a") as out:
        while True:
            begun = time.monotonic()
            try:
                good = client.post(f"{url}/v1/chat/completions", json=BODY).status_code == 200
            except httpx.HTTPError:
                good = False
            out.write(f"{begun:.3f} {int(good)}\n")
            out.flush()
            time.sleep(pause_s)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), *map(float, sys.argv[3:]))
