"""How late the event loop is: what a handler that blocks costs everybody else."""

import asyncio
import time
from collections import deque

INTERVAL_S = 0.05
KEPT = 1200  # a minute of intervals


class LagMeter:
    """Sleeps again and again and notes by how much it is woken too late."""

    def __init__(self) -> None:
        self._late_s: deque[float] = deque(maxlen=KEPT)

    async def run(self) -> None:
        """Measures until it is cancelled."""
        while True:
            due = time.monotonic() + INTERVAL_S
            await asyncio.sleep(INTERVAL_S)
            self._late_s.append(time.monotonic() - due)

    def quantile_s(self, share: float) -> float:
        """Returns the lag of the last minute that this share of the time was below; 0 before it was measured."""
        ordered = sorted(self._late_s)
        return max(0.0, ordered[min(len(ordered) - 1, int(share * len(ordered)))]) if ordered else 0.0
