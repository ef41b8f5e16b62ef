"""A first-come, first-served lock: a thread that takes it in a loop lets the others in between."""

from __future__ import annotations

import threading


class FairLock:
    """A reentrant lock that waiting threads get in the order of their requests.

    Python's own lock is nearly always taken again by the thread that has just released it, so a
    thread that steps an engine would keep all others out.

    It is reentrant at any point, because a finalizer that closes a stream takes it, and finalizers
    run at any point.
    """

    def __init__(self) -> None:
        self._lock, self._next = threading.RLock(), threading.RLock()

    def __enter__(self) -> None:
        if self._lock._is_owned():  # type: ignore[attr-defined]
            self._lock.acquire()
            return
        with self._next:  # the next waiter holds it until the lock is free
            self._lock.acquire()

    def __exit__(self, *exception: object) -> None:
        self._lock.release()
