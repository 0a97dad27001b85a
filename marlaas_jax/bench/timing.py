"""Paired timing of alternatives in one process, and the machine's measured peaks to hold them against.

Times on a shared machine drift by more than the differences that matter, so alternatives are run in turn, round after round,
and compared within a round. Process CPU seconds stand beside wall seconds: they are the steadier figure where the machine is
busy. A function under test returns its arrays; the clock stops when they are ready.
"""

import dataclasses
import os
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True)
class Samples:
    """Seconds of one call of one alternative, one entry per round."""

    wall_s: tuple[float, ...]
    cpu_s: tuple[float, ...]  # of the whole process, all threads

    @property
    def median_s(self) -> float:
        """Median wall seconds of a call."""
        return statistics.median(self.wall_s)

    @property
    def best_s(self) -> float:
        """Least wall seconds of a call."""
        return min(self.wall_s)

    @property
    def median_cpu_s(self) -> float:
        """Median CPU seconds of a call."""
        return statistics.median(self.cpu_s)

    def as_dict(self) -> dict[str, float]:
        """Returns the figures for a JSON report."""
        return {"wall_median_s": self.median_s, "wall_best_s": self.best_s, "cpu_median_s": self.median_cpu_s}


@dataclasses.dataclass(frozen=True)
class Measured:
    """What a function returns that took its own time: work done in another process."""

    wall_s: float
    cpu_s: float


@dataclasses.dataclass(frozen=True)
class Ratio:
    """How many times longer one alternative takes than another, by three measures."""

    wall: float  # median over rounds of the ratio within the round
    cpu: float  # total CPU seconds of all rounds, one over the other
    best: float  # least wall seconds, one over the other

    def __str__(self) -> str:
        return f"{self.wall:.2f}|{self.cpu:.2f}|{self.best:.2f}"

    def as_dict(self) -> dict[str, float]:
        """Returns the figures for a JSON report."""
        return dataclasses.asdict(self)


def interleave(
    functions: Mapping[str, Callable[[], Any]], repeats: int = 7, warmup: int = 1, inner: int | Mapping[str, int] = 1
) -> dict[str, Samples]:
    """Returns seconds per call of each function, run in turn; the order rotates from round to round.

    `inner` calls make one sample (a mapping gives each function its own count); `warmup` untimed calls precede the first round.
    A function that returns `Measured` (with inner 1) is taken at its word.
    """
    counts = {name: inner if isinstance(inner, int) else inner[name] for name in functions}
    for function in functions.values():
        for _ in range(warmup):
            jax.block_until_ready(function())
    wall: dict[str, list[float]] = {name: [] for name in functions}
    cpu: dict[str, list[float]] = {name: [] for name in functions}
    names = list(functions)
    for round_number in range(repeats):
        shift = round_number % len(names)
        for name in names[shift:] + names[:shift]:
            function, count = functions[name], counts[name]
            cpu_start, start = time.process_time(), time.perf_counter()
            for _ in range(count):
                result = function()
            if isinstance(result, Measured):
                wall[name].append(result.wall_s)
                cpu[name].append(result.cpu_s)
                continue
            jax.block_until_ready(result)
            wall[name].append((time.perf_counter() - start) / count)
            cpu[name].append((time.process_time() - cpu_start) / count)
    return {name: Samples(tuple(wall[name]), tuple(cpu[name])) for name in names}


def ratio(a: Samples, b: Samples) -> Ratio:
    """Returns a's time over b's: above 1 means that b is faster. Both come from one `interleave`."""
    paired = statistics.median(x / y for x, y in zip(a.wall_s, b.wall_s, strict=True))
    # The process clock ticks in 1 ms on some systems: a sum over rounds is the finest figure that it gives.
    return Ratio(paired, sum(a.cpu_s) / max(sum(b.cpu_s), 1e-9), a.best_s / b.best_s)


def pin_to_cores(count: int) -> bool:
    """Binds this process to its first `count` cores, where the system can. Only of use before jax starts its threads."""
    if not hasattr(os, "sched_setaffinity"):
        return False
    cores = sorted(os.sched_getaffinity(0))[:count]
    os.sched_setaffinity(0, cores)
    return len(cores) == count


def num_cores() -> int:
    """Returns the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def matmul_peak(dtype: Any = jnp.float32, size: int = 1024, repeats: int = 5) -> float:
    """Returns the best FLOP/s seen in a square matrix product."""
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((size, size), dtype=np.float32), dtype)
    multiply = jax.jit(lambda a, b: a @ b)
    samples = interleave({"matmul": lambda: multiply(x, x)}, repeats, inner=4)["matmul"]
    return 2.0 * size**3 / samples.best_s


def read_bandwidth(megabytes: int = 256, repeats: int = 5) -> float:
    """Returns the best bytes/s seen in summing an array that fits no cache."""
    x = jnp.ones((megabytes * 1_000_000 // 4,), jnp.float32)
    total = jax.jit(jnp.sum)
    samples = interleave({"read": lambda: total(x)}, repeats)["read"]
    return x.nbytes / samples.best_s


def machine() -> dict[str, Any]:
    """Returns what a figure must name: device, cores, versions."""
    device = jax.devices()[0]
    return {
        "device": device.device_kind,
        "backend": jax.default_backend(),
        "num_devices": jax.device_count(),
        "cores": num_cores(),
        "load_average": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        "jax": jax.__version__,
        "numpy": np.__version__,
    }
