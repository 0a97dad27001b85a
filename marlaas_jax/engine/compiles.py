"""Counts what JAX compiles in this process, so that a compile after warm-up is seen, and can be refused by tests."""

import jax

_EVENT = "/jax/core/compile/backend_compile_duration"
_REQUESTED, _CACHED = "/jax/compilation_cache/compile_requests_use_cache", "/jax/compilation_cache/cache_hits"
_counted = {"programs": 0, _REQUESTED: 0, _CACHED: 0}


def _count(event: str, duration_secs: float, **_: str | int) -> None:
    if event == _EVENT:
        _counted["programs"] += 1


def _count_cached(event: str, **_: str | int) -> None:
    if event in _counted:
        _counted[event] += 1


jax.monitoring.register_event_listener(_count_cached)
jax.monitoring.register_event_duration_secs_listener(_count)


def count() -> int:
    """Returns how many programs were compiled, or fetched from the persistent cache, since this module was imported."""
    return _counted["programs"]


def cached() -> tuple[int, int]:
    """Returns how many programs (came from the persistent cache, were compiled anew) since this module was imported."""
    return _counted[_CACHED], _counted[_REQUESTED] - _counted[_CACHED]
