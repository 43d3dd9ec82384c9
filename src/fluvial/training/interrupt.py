"""Ctrl-C, SIGTERM and SIGHUP, held back until it is safe to stop."""

from __future__ import annotations

import signal
import threading
import time
from typing import Any


class Interrupt:
    """Ctrl-C, SIGTERM and SIGHUP, held back until the step is whole. A second one does not wait.

    Args:
        patience: seconds after the first in which another is taken for the same.
    """

    def __init__(self, patience: float = 0.0) -> None:
        self.seen: int | None = None
        self._patience, self._since = patience, 0.0
        self._previous: dict[int, Any] = {}
        # only the main thread may handle signals; elsewhere an interrupt never arrives
        if threading.current_thread() is threading.main_thread():
            numbers = [signal.SIGINT, signal.SIGTERM]
            # there is none on Windows, and nohup has it ignored
            if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
                numbers.append(signal.SIGHUP)
            for number in numbers:
                self._previous[number] = signal.signal(number, self._handle)

    def _handle(self, number: int, frame: object) -> None:
        now = time.monotonic()
        if self.seen is None:
            self.seen, self._since = number, now
        elif now - self._since >= self._patience:
            self.raise_it()

    def raise_it(self) -> None:
        if self.seen is None or self.seen == signal.SIGINT:
            raise KeyboardInterrupt
        raise SystemExit(128 + self.seen)

    def close(self) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
