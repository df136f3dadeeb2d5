"""The address of a server, as a command line gives it."""

from __future__ import annotations

import httpx
import typer


def address(url: str) -> str:
    """The address itself, or empty. Raises typer.BadParameter for what is none, and for one that holds a secret: it is kept
    with the results and stands in every error."""
    if not url or "$" in url:  # a variable: the line stands in a document, and is only checked
        return url
    try:
        found = httpx.URL(url)
        whole = found.scheme in ("http", "https") and bool(found.host) and 0 < (found.port or 80) < 65536
    except (httpx.InvalidURL, ValueError) as error:
        raise typer.BadParameter(f"no address of a server: {error}") from error
    if found.userinfo or found.query:
        raise typer.BadParameter("an address is kept with the results: give a key by --api-key-file instead")
    if not whole:
        raise typer.BadParameter(f"{url}: no address of a server; write http://HOST:PORT")
    return url
