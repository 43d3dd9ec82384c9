"""Ctrl-C and SIGTERM, held back until it is safe to stop."""

from __future__ import annotations

import signal
import threading
from typing import Any


class Interrupt:
    """Ctrl-C and SIGTERM, held back until the step is whole. A second one does not wait."""

    def __init__(self) -> None:
        self.seen: int | None = None
        self._previous: dict[int, Any] = {}
        # only the main thread may handle signals; elsewhere an interrupt never arrives
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._previous[number] = signal.signal(number, self._handle)

    def _handle(self, number: int, frame: object) -> None:
        second, self.seen = self.seen is not None, number
        if second:
            self.raise_it()

    def raise_it(self) -> None:
        if self.seen == signal.SIGTERM:
            raise SystemExit(128 + signal.SIGTERM)
        raise KeyboardInterrupt

    def close(self) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
