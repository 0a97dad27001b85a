"""A worker dies with its parent, whatever kills the parent (H33). Called once, early, by every worker's main.

Two ropes: the kernel's parent-death signal (Linux), and the end of a pipe whose other end only the parent holds (everywhere).
The parent's half is in the supervisor, which names the pipe and its own pid in the environment. What a worker has started is
ended by the guardian.
"""

import contextlib
import ctypes
import os
import signal
import sys
import threading

FD_VARIABLE = "MARLAAS_LIFELINE_FD"
PARENT_VARIABLE = "MARLAAS_PARENT_PID"
EXIT_ORPHANED = 4

_PR_SET_PDEATHSIG = 1


def hold() -> bool:
    """Ties this process to the parent named in the environment. Returns False where none is: a worker started by hand."""
    fd_text, parent_text = os.environ.pop(FD_VARIABLE, ""), os.environ.pop(PARENT_VARIABLE, "")
    if not fd_text:
        return False
    fd = int(fd_text)
    os.set_inheritable(fd, False)  # what this worker starts must not keep the pipe's reading end
    if sys.platform == "linux" and parent_text:  # else in a process namespace, whose first process dies with the parent
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != int(parent_text):  # it died before the signal was set
            os._exit(EXIT_ORPHANED)
    threading.Thread(target=_watch, args=(fd,), name="marlaas-lifeline", daemon=True).start()
    return True


def _watch(fd: int) -> None:
    while os.read(fd, 1):
        pass
    if os.getpgid(0) == os.getpid():  # we lead our own group: take along what we started
        with contextlib.suppress(OSError):
            os.killpg(0, signal.SIGKILL)
    os._exit(EXIT_ORPHANED)
