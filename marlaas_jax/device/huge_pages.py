"""The environment of a process that computes on a CPU: large arrays in pages of 2 MB.

Reading weights is most of a decode step, and with pages of 4 KB looking up addresses is a good part of that: with huge pages
SmolLM2's step takes 0.87 of the time with one row and 0.92 with 32 (one core of an AMD EPYC). glibc asks the kernel for them
where its tunable says so, which must be in the environment before the process starts; elsewhere it changes nothing.
"""

import sys
from collections.abc import Mapping

VARIABLE = "GLIBC_TUNABLES"
_NAME = "glibc.malloc.hugetlb"


def environment(current: Mapping[str, str]) -> dict[str, str]:
    """Returns what to add to the environment `current` of a process to start; nothing where the user has decided already."""
    tunables = current.get(VARIABLE, "")
    if not sys.platform.startswith("linux") or _NAME in tunables:
        return {}
    return {VARIABLE: f"{tunables}:{_NAME}=1".lstrip(":")}
