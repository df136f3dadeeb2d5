"""The page that a dead-man sends from its own machine, where opsctl may not be installed.

What is due is written down first (``OWED/TOKEN.UNIT``, which outlives a reboot) and taken away when somebody took it:
a page that did not get out stays owed, and the next opsctl or monitor that comes by sends it. Ways, in order: a Python
there with apprise (every URL of the fleet file), any Python there, curl, wget. Without apprise only addresses that are
a plain HTTP POST can be told (``json://``, ``jsons://``, ``http://``, ``https://``). Addresses may hold secrets: they
lie in a file that root alone reads, and on no command line but curl's and wget's own.
"""

from __future__ import annotations

import json

from opsctl.service.manager import Lease

URLS = "page.urls"
PYTHON = r"""
import json, sys, urllib.request
folder, text = sys.argv[1:3]
title, urls = open(folder + "/page.title").read().strip(), open(folder + "/page.urls").read().split()
sent = False
try:
    import warnings
    warnings.simplefilter("ignore")
    import apprise
    for url in urls:
        one = apprise.Apprise()
        sent = bool(one.add(url) and one.notify(title=title, body=text)) or sent
except ImportError:
    body = json.dumps({"version": "1.0", "title": title, "message": text, "type": "failure", "attachments": []}).encode()
    for url in urls:
        scheme, _, rest = url.partition("://")
        if scheme not in ("json", "jsons", "http", "https"):
            continue
        address = ("https" if scheme.endswith("s") else "http") + "://" + rest
        try:
            request = urllib.request.Request(address, body, {"Content-Type": "application/json"})
            sent = urllib.request.urlopen(request, timeout=10).status < 300 or sent
        except OSError:
            pass
sys.exit(0 if sent else 1)
"""

_SCRIPT = r"""#!/bin/sh
# page.sh DIR TOKEN UNIT TEXT
dir=$1 token=$2 unit=$3; text="$4 Look: opsctl rollout status; prove it: opsctl rollout resume [$token]"
title=$(cat "$dir/page.title"); owed=@OWED@
mkdir -p "$owed" 2>/dev/null && printf '%s\n%s\n' "$title" "$text" >"$owed/$token.$unit" 2>/dev/null
sent() { rm -f "$owed/$token.$unit" "$dir/page.urls"; echo "opsctl: paged: $title"; exit 0; }
[ -s "$dir/page.urls" ] || { echo "opsctl: no address to page: $title"; exit 0; }
for python in @PYTHON@ python3; do
  command -v "$python" >/dev/null 2>&1 && timeout 30 "$python" "$dir/page.py" "$dir" "$text" && sent
done
while read -r url; do
  case $url in
    json://*|http://*) address="http://${url#*://}" ;;
    jsons://*|https://*) address="https://${url#*://}" ;;
    *) continue ;;
  esac
  body="{\"version\": \"1.0\", \"title\": \"$title\", \"message\": \"$text\", \"type\": \"failure\"}"
  head="Content-Type: application/json"
  command -v curl >/dev/null 2>&1 && timeout 15 curl -fsS -m 10 -H "$head" -d "$body" "$address" >/dev/null && sent
  command -v wget >/dev/null 2>&1 && timeout 15 wget -qO- -T 10 --header "$head" --post-data "$body" "$address" >/dev/null && sent
done <"$dir/page.urls"
echo "opsctl: NO PAGE WENT OUT, it is owed in $owed: $title"
"""


def files(lease: Lease, unit: str, where: str, python: str, owed: str) -> tuple[tuple[str, str], ...]:
    """(name, text) of what the dead-man's folder must hold. ``owed``: the folder of pages that are still due."""
    title = _plain(f"{lease.title or unit}: rollout left by its operator, {unit} on {where}")
    return (
        ("page.title", title + "\n"),
        (URLS, "".join(f"{url}\n" for url in lease.pages)),
        ("page.py", PYTHON),
        ("page.sh", _SCRIPT.replace("@OWED@", owed).replace("@PYTHON@", python)),
    )


def _plain(text: str) -> str:
    """What stands in a JSON string and in a shell's double quotes as it is."""
    return json.dumps("".join(c if c.isascii() and c.isprintable() and c not in '\\"`$' else "_" for c in text))[1:-1]
