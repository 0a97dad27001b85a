"""A small process that outlives ours for a moment, and then kills what our workers started (design 13.6, H33).

When this process is killed hard, the kernel kills its workers so fast (lifeline.py) that they cannot take along what they
started themselves. The guardian sees the end of a pipe whose other end only we hold, and kills the workers' process groups.
A process that left its worker's group by a session of its own is out of its reach.
"""

import contextlib
import os
import signal
import subprocess
import sys

END_S = 5.0


class Guardian:
    """Our end of the pipe. A guardian that was itself killed is replaced at the next `start`."""

    def __init__(self):
        self._groups: set[int] = set()
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Makes sure that the process is there. Raises OSError where none can be made."""
        if self._process is not None and self._process.poll() is None:
            return
        self.close()
        command = [sys.executable, "-I", "-S", __file__]  # only the standard library: there in a few milliseconds
        quiet = subprocess.DEVNULL
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=quiet, stderr=quiet, bufsize=0, start_new_session=True
        )
        for group in self._groups:
            self._tell(f"+{group}")

    def watch(self, group: int) -> None:
        """Has the process group killed when we die."""
        self._groups.add(group)
        self._tell(f"+{group}")

    def forget(self, group: int) -> None:
        """The process group has ended: its number may soon be another's."""
        self._groups.discard(group)
        self._tell(f"-{group}")

    def close(self) -> None:
        """Lets the process end, which kills the groups that were not forgotten."""
        if self._process is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.close()  # pyright: ignore[reportOptionalMemberAccess]
            try:
                self._process.wait(END_S)
            except subprocess.TimeoutExpired:  # it was stopped
                self._process.kill()
                self._process.wait()
            self._process = None

    def _tell(self, text: str) -> None:
        if self._process is not None and self._process.stdin is not None:
            with contextlib.suppress(OSError):  # it was killed
                self._process.stdin.write(f"{text}\n".encode())


def main() -> None:
    """The guardian's own process: reads until the pipe ends."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # they may be meant for everybody; we go last
        signal.signal(number, signal.SIG_IGN)
    groups: set[int] = set()
    for line in sys.stdin:
        (groups.add if line[0] == "+" else groups.discard)(int(line[1:]))
    for group in groups:
        with contextlib.suppress(OSError):
            os.killpg(group, signal.SIGKILL)


if __name__ == "__main__":
    main()
