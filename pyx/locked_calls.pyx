"""Work under a lock that Ctrl-C cannot leave held.

Since Python 3.14, ``with lock`` in Python handles a signal after it has acquired the lock and before its block begins:
an exception of the handler then leaves the lock held for ever. Compiled code handles signals only in the Python
functions that it calls.
"""


def call_under(lock, work):
    """Call ``work()`` while the lock is held, and return its result."""
    with lock:
        return work()
