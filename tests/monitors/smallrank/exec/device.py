"""A stream of work on one thread, and events on it."""

import queue
import threading


class HostEvent:
    def __init__(self):
        self.reached = threading.Event()

    def synchronize(self):
        self.reached.wait()


class HostStream:
    def __init__(self):
        self._queue = queue.SimpleQueue()
        threading.Thread(target=self._work, name="device-stream", daemon=True).start()

    def _work(self):
        while True:
            self._queue.get()()

    def launch(self, work):
        self._queue.put(work)

    def record(self):
        event = HostEvent()
        self._queue.put(event.reached.set)
        return event
