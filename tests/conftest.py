from __future__ import annotations

import signal


def pytest_configure() -> None:
    # what starts tests in the background may ignore Ctrl-C, and they and all they start would too
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
