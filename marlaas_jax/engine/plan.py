"""Arranges the running rows of one decode dispatch in blocks that share an adapter. Pure Python.

Blocks keep their adapter from one dispatch to the next where they can, used or not, because putting another adapter into a
block costs a copy of it.
"""

import dataclasses
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from marlaas_jax.engine.buckets import Form


@dataclasses.dataclass(frozen=True)
class Plan:
    """One dispatch's arrangement."""

    form: Form
    order: tuple[int, ...]  # decode slots in block order
    adapters: tuple[Any, ...]  # one per block


def choose_form(forms: Sequence[Form], rows_of_adapter: Mapping[Hashable, int]) -> Form:
    """Returns the first (cheapest) form that holds the rows: blocks hold rows of one adapter, so each adapter rounds up."""
    for form in forms:
        needed = sum(-(-count // form.block) for count in rows_of_adapter.values())
        if needed <= form.num_blocks:
            return form
    raise AssertionError(f"{sum(rows_of_adapter.values())} rows fit no form")


def arrange(
    forms: Sequence[Form],
    adapter_of_slot: Mapping[int, Hashable],
    num_slots: int,
    held: Mapping[int, Sequence[Hashable]],
    idle: Hashable,
) -> Plan:
    """Returns the plan for the running rows `adapter_of_slot`.

    held: number of blocks -> which adapter each block of such a form holds now. idle: the null adapter, for blocks that never
    held one.
    """
    counts = Counter(adapter_of_slot.values())
    form = choose_form(forms, counts)
    current = list(held.get(form.num_blocks, [idle] * form.num_blocks))
    missing = Counter({adapter: -(-count // form.block) for adapter, count in counts.items()})
    used: list[Hashable | None] = [None] * form.num_blocks
    for i, adapter in enumerate(current):
        if missing[adapter] > 0:
            missing[adapter] -= 1
            used[i] = adapter
    spare = [i for i, adapter in enumerate(used) if adapter is None]
    for adapter in missing.elements():
        used[spare.pop(0)] = adapter
    waiting: dict[Hashable, list[int]] = {}
    for slot in sorted(adapter_of_slot):
        waiting.setdefault(adapter_of_slot[slot], []).append(slot)
    others = iter([slot for slot in range(num_slots) if slot not in adapter_of_slot])
    order: list[int] = []
    for adapter in used:
        own = waiting.get(adapter, []) if adapter is not None else []
        taken, own[:] = own[: form.block], own[form.block :]
        order += taken + [next(others) for _ in range(form.block - len(taken))]
    adapters = tuple(held_one if one is None else one for one, held_one in zip(used, current, strict=True))
    return Plan(form, tuple(order), adapters)
