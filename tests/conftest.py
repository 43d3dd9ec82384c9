from __future__ import annotations

import os
import signal

# before torch is imported, and for all that tests start: their networks are too small to gain from
# more threads, and lose much where cores are busy
os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_configure() -> None:
    # what starts tests in the background may ignore Ctrl-C, and they and all they start would too
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
