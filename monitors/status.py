"""A status page on loopback: ``/`` for a browser (it refreshes itself; JSON for whoever does not ask for HTML),
``/status.json``, and ``/metrics`` for Prometheus."""

from __future__ import annotations

import functools
import http.server
import json
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from importlib import resources
from typing import Any

import jinja2

from monitors.judge.progress import State
from monitors.trail import spark

Statuses = Callable[[], Sequence[Mapping[str, Any]]]


class StatusServer:
    """Serves in a thread of its own from construction to ``close``. Port 0 takes a free one (``port`` says which).

    Raises:
        OSError: the port is taken.
    """

    def __init__(self, port: int, statuses: Statuses, events: Mapping[str, int]) -> None:
        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                if self.path == "/metrics":
                    self._answer(200, "text/plain; version=0.0.4", prometheus(statuses(), events))
                elif self.path == "/" and "text/html" in self.headers.get("Accept", ""):
                    self._answer(200, "text/html; charset=utf-8", page(statuses(), events))
                elif self.path in ("/", "/status.json"):
                    self._answer(200, "application/json", json.dumps({"deployments": list(statuses()), "events": dict(events)}))
                else:
                    self._answer(404, "text/plain", "there are /, /status.json and /metrics\n")

            def _answer(self, code: int, kind: str, text: str) -> None:
                body = text.encode()
                self.send_response(code)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:
                """Scrapes are not worth a line."""

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self._server.daemon_threads = True
        self.port = int(self._server.server_address[1])
        self._thread = threading.Thread(target=self._server.serve_forever, name="status", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(5)


def page(statuses: Sequence[Mapping[str, Any]], events: Mapping[str, int]) -> str:
    """The page for a browser: states, open incidents, curves of the last minutes."""
    shown = []
    for status in statuses:
        trail = status.get("trail", ())
        curves = []
        for title, key in (("requests held", "held"), ("seconds since progress", "quiet_s"), ("steps a second", "steps_per_s")):
            values = [float(sample[key]) for sample in trail]
            if values:
                curves.append((title, spark(values), f"{values[-1]:g}"))
        shown.append({**status, "curves": curves})
    return _template().render(deployments=shown, events=dict(events))


@functools.cache
def _template() -> jinja2.Template:
    text = (resources.files("monitors") / "status.html.jinja").read_text(encoding="utf-8")
    return jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True).from_string(text)


def prometheus(statuses: Sequence[Mapping[str, Any]], events: Mapping[str, int]) -> str:
    """``hang_monitor_state`` is 1 for the state that a deployment is in and 0 for the others."""
    lines = ["# TYPE hang_monitor_state gauge"]
    for status in statuses:
        for state in State:
            value = int(status["state"] == state.value)
            lines.append(f'hang_monitor_state{{deployment="{status["deployment"]}",state="{state.value}"}} {value}')
    for name, key in (("hang_monitor_quiet_seconds", "quiet_s"), ("hang_monitor_held_requests", "held")):
        lines.append(f"# TYPE {name} gauge")
        lines += [f'{name}{{deployment="{status["deployment"]}"}} {status[key]}' for status in statuses if status.get(key) is not None]
    lines.append("# TYPE hang_monitor_incident_open gauge")
    lines += [f'hang_monitor_incident_open{{deployment="{s["deployment"]}"}} {int(bool(s.get("incident")))}' for s in statuses]
    lines.append("# TYPE hang_monitor_gaps gauge")
    lines += [f'hang_monitor_gaps{{deployment="{s["deployment"]}"}} {len(s.get("gaps", ()))}' for s in statuses]
    lines.append("# TYPE hang_monitor_events_total counter")
    lines += [f'hang_monitor_events_total{{event="{event}"}} {count}' for event, count in sorted(Counter(events).items())]
    return "\n".join(lines) + "\n"
