"""Users that nobody is: one for each confined worker, so that no two can touch each other (only root can hand them out)."""

import os
import pwd
import threading

from marlaas_jax.workers.sandbox.processes import all_seen

FIRST, LAST = 61184, 65519  # what systemd gives to services that have no user of their own


class Identities:
    """Hands out user numbers that have no name, no process and no file. Thread-safe."""

    def __init__(self):
        self._lock = threading.Lock()
        self._taken: set[int] = set()
        self._next = FIRST + os.getpid() % (LAST - FIRST)  # another service begins elsewhere

    def take(self) -> int:
        """Returns a number that is in nobody's use. Raises OSError when there is none."""
        with self._lock:
            busy = self._taken | {process.uid for process in all_seen()}
            for _ in range(FIRST, LAST + 1):
                number = self._next
                self._next = FIRST if number == LAST else number + 1
                if number not in busy and not _has_name(number):
                    self._taken.add(number)
                    return number
        raise OSError(f"all users from {FIRST} to {LAST} are in use")

    def give_back(self, number: int) -> None:
        """Ends the use of a number; none of its processes may be left."""
        with self._lock:
            self._taken.discard(number)


def _has_name(number: int) -> bool:
    try:
        pwd.getpwuid(number)
    except KeyError:
        return False
    return True
