"""A collective that completes at once, or never."""

import threading

CLOSED = threading.Event()


def all_reduce(box, sequence, nbytes, closed):
    box.collective_enqueued(1, sequence, nbytes)
    if closed:
        CLOSED.wait()
    box.collective_completed(1, sequence, nbytes)
