"""What ``import fluvial`` costs next to ``import torch``: medians of fresh processes, interleaved.

Aim: at most 1.3 times ``import torch``, also when a core name is taken from it.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time

STATEMENTS = {
    "import torch": "import torch",
    "import fluvial": "import fluvial",
    "fluvial.KeyedNoise": "from fluvial import KeyedNoise",
}
ROUNDS = 7
AIM = 1.3


def seconds(statement: str) -> float:
    begin = time.perf_counter()
    subprocess.run([sys.executable, "-c", statement], check=True)
    return time.perf_counter() - begin


def main() -> None:
    for statement in STATEMENTS.values():  # fills the file cache and writes the .pyc files
        seconds(statement)
    times: dict[str, list[float]] = {name: [] for name in STATEMENTS}
    for _ in range(ROUNDS):
        for name, statement in STATEMENTS.items():
            times[name].append(seconds(statement))
    base = statistics.median(times["import torch"])
    print(f"median of {ROUNDS} fresh processes; the interpreter's own start is in every row")
    for name, values in times.items():
        median = statistics.median(values)
        print(f"{name:20s} {median:6.2f} s   {median / base:5.2f} x torch   aim <= {AIM}")


if __name__ == "__main__":
    main()
