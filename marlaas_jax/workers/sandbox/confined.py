"""First code of a confined process: takes from itself what the rules say, then becomes the worker module.

    python -P -m marlaas_jax.workers.sandbox.confined RULES MODULE [ARGS...]

Whatever cannot be applied ends the process: no worker runs with less confinement than was stated at the service's start.
"""

import contextlib
import ctypes
import os
import resource
import runpy
import sys

import msgspec

from marlaas_jax.workers.sandbox import landlock
from marlaas_jax.workers.sandbox.rules import Rules

_PR_SET_KEEPCAPS, _PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS, _PR_CAP_AMBIENT, _PR_CAP_AMBIENT_RAISE = 8, 24, 38, 47, 2
_CAPABILITY_VERSION_3 = 0x20080522
_CAP_DAC_READ_SEARCH = 2


def apply(rules: Rules) -> None:
    """Confines this process and all that it starts. Raises OSError or ValueError where it cannot."""
    os.umask(0o077)
    if sys.platform == "linux":
        with open("/proc/self/oom_score_adj", "w") as file:
            file.write("1000")  # short of memory, the kernel ends this process first
        if os.geteuid() == 0:
            _stop_being_root(rules)
        _prctl(_PR_SET_NO_NEW_PRIVS, 1)
    limits = rules.limits
    sizes = {
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_AS: limits.address_space_bytes,
        resource.RLIMIT_FSIZE: limits.file_bytes,
        resource.RLIMIT_NOFILE: limits.open_files,
        resource.RLIMIT_CPU: limits.cpu_s,
    }
    if rules.nproc is not None:
        sizes[resource.RLIMIT_NPROC] = rules.nproc
    for kind, size in sizes.items():
        _, hard = resource.getrlimit(kind)
        size = size if hard == resource.RLIM_INFINITY else min(size, hard)
        resource.setrlimit(kind, (size, size))
    if rules.readable:
        landlock.restrict(rules.readable, rules.writable, network=rules.network)


def _stop_being_root(rules: Rules) -> None:
    """Becomes the user, or root without any of root's rights; none can come back."""
    assert not rules.keeps_reading or rules.readable
    kept = (_CAP_DAC_READ_SEARCH,) if rules.keeps_reading else ()
    for capability in range(64):
        if capability not in kept:
            with contextlib.suppress(OSError):  # beyond the last that this kernel knows, or gone already
                _prctl(_PR_CAPBSET_DROP, capability)
    if rules.user is not None:
        assert rules.group is not None
        _prctl(_PR_SET_KEEPCAPS, 1 if kept else 0)
        os.setgroups(())
        os.setresgid(rules.group, rules.group, rules.group)
        os.setresuid(rules.user, rules.user, rules.user)
    mask = sum(1 << capability for capability in kept)
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
    data = (ctypes.c_uint32 * 6)(mask, mask, mask)  # effective, permitted, inheritable; then the same for those above 31
    if ctypes.CDLL(None, use_errno=True).capset(header, data):
        raise OSError(ctypes.get_errno(), "capset")
    for capability in kept:  # for what it starts, too
        _prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_RAISE, capability)


def _prctl(option: int, value: int, more: int = 0) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, more, 0, 0):
        raise OSError(ctypes.get_errno(), f"prctl {option}")


def main() -> None:
    """Confines the process, then runs the module as `python -m` would."""
    encoded, module, *arguments = sys.argv[1:]
    apply(msgspec.json.decode(encoded, type=Rules))
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
