"""Seeds of imputers, as scikit-learn takes them."""

from __future__ import annotations

import secrets
from typing import Any

import numpy as np
from sklearn.utils import check_random_state


def seed_of(random_state: Any) -> int:
    """A seed of keyed noise, below 2^32; nothing global is read.

    Args:
        random_state: a seed; a generator of NumPy, old or new, that one is drawn from; None for one
            of the system's.

    Raises:
        ValueError: a seed is out of range, or it is something else.
    """
    if random_state is None:
        return secrets.randbits(32)
    if isinstance(random_state, np.random.Generator):
        return int(random_state.integers(2**32))
    if isinstance(random_state, int | np.integer) and not isinstance(random_state, bool):
        if not 0 <= int(random_state) < 2**32:
            raise ValueError(f"random_state must lie in [0, 2**32), got {random_state}")
        return int(random_state)
    try:
        if isinstance(random_state, bool):  # to scikit-learn it is the seed 0 or 1
            raise ValueError
        generator = check_random_state(random_state)
    except ValueError:
        raise ValueError(
            "random_state must be a whole number, a generator of NumPy or None, got "
            f"{random_state!r}"
        ) from None
    return int(generator.randint(2**32, dtype=np.uint32))


def mixed(seed: int, k: int) -> int:
    """The seed of part k of what has a seed, such as of the network of round k."""
    return (seed * 1_000_003 + k) % 2**63
