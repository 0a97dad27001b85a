"""Counts what JAX compiles in this process, so that a compile after warm-up is seen, and can be refused by tests."""

import jax

_EVENT = "/jax/core/compile/backend_compile_duration"
_counted = {"programs": 0}


def _count(event: str, duration_secs: float, **_: str | int) -> None:
    if event == _EVENT:
        _counted["programs"] += 1


jax.monitoring.register_event_duration_secs_listener(_count)


def count() -> int:
    """Returns how many programs were compiled, or fetched from the persistent cache, since this module was imported."""
    return _counted["programs"]
