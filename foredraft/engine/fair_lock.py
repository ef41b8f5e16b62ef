"""A lock that threads get in turns: whoever works in a loop lets the others in between."""

from __future__ import annotations

import threading


class FairLock:
    """A reentrant lock that is not taken again over the heads of those who wait for it.

    Python's own lock goes to whoever asks first after its release, which is nearly always the
    thread that has just released it: one that steps an engine would keep all others out.

    Reentrant at any point, since a finalizer may run at any point: one that closes a stream takes
    the lock.
    """

    def __init__(self) -> None:
        self._lock, self._next = threading.RLock(), threading.RLock()

    def __enter__(self) -> None:
        if self._lock._is_owned():  # type: ignore[attr-defined]
            self._lock.acquire()
            return
        with self._next:  # the one who is next holds it until the lock is free
            self._lock.acquire()

    def __exit__(self, *exception: object) -> None:
        self._lock.release()
