"""The fixed list of shapes that generation runs in: what does not fit is padded, never compiled.

Prompts are prefilled in a few lengths, one at a time or `prefill_batch` at once. A decode dispatch attends to one of a few
context lengths and runs its rows in one of a few forms: all slots under one adapter, in blocks of 4, each for itself, or a
quarter of the slots when no more are busy.
"""

import dataclasses

from marlaas_jax.errors import InvalidConfig

MAX_PROGRAMS = 24
BLOCK = 4  # rows that share an adapter in the middle form; groups are usually a multiple of it
SMALLEST = 16
EXACT_PLACE, EXACT_DECODE = "place adapters in blocks of 1", "decode all rows in blocks of 1"  # see Buckets.exact_form


@dataclasses.dataclass(frozen=True)
class Form:
    """How a decode dispatch arranges its rows: `num_rows / block` blocks under one adapter each."""

    num_rows: int
    block: int

    @property
    def num_blocks(self) -> int:
        """Number of adapters that the form holds."""
        return self.num_rows // self.block


@dataclasses.dataclass(frozen=True)
class Buckets:
    """All static shapes of one engine."""

    num_slots: int
    max_context: int
    prefill_lengths: tuple[int, ...]
    prefill_rows: tuple[int, ...]
    context_lengths: tuple[int, ...]
    score_lengths: tuple[int, ...]
    forms: tuple[Form, ...]  # cheapest first
    in_blocks: bool = True  # rows that share an adapter are put together; False: only for the exact form

    def prefill_length(self, num_tokens: int) -> int:
        """Returns the shortest prefill that holds a prompt."""
        return _at_least(self.prefill_lengths, num_tokens)

    def prefill_row_count(self, num_prompts: int) -> int:
        """Returns the smallest batch that holds so many prompts."""
        return _at_least(self.prefill_rows, num_prompts)

    def context_length(self, num_tokens: int) -> int:
        """Returns the shortest attention that reaches `num_tokens` positions."""
        return _at_least(self.context_lengths, min(num_tokens, self.max_context))

    def score_length(self, num_tokens: int) -> int:
        """Returns the shortest scoring pass that holds so many tokens."""
        return _at_least(self.score_lengths, num_tokens)

    @property
    def exact_form(self) -> Form:
        """How rows run of which one is exact: all slots, each for itself, so that neither neighbours nor slots matter."""
        return self.forms[-1]

    @property
    def block_counts(self) -> tuple[int, ...]:
        """The different numbers of blocks of all forms."""
        return tuple(sorted({form.num_blocks for form in self.forms}))

    def programs(self) -> list[str]:
        """Returns a name for each program that is compiled before the first request."""
        names = [f"prefill {rows}x{length}" for length in self.prefill_lengths for rows in self.prefill_rows]
        names += [f"insert {length}" for length in self.prefill_lengths]
        names += [
            f"decode {form.num_rows} rows in blocks of {form.block}, context {context}"
            for context in self.context_lengths
            for form in self.forms
        ]
        names += [f"place adapters in {count} blocks" for count in self.block_counts]
        if not self.in_blocks:
            names += [EXACT_PLACE, EXACT_DECODE]
        names += [f"score {length}" for length in self.score_lengths]
        return [*names, "write adapter", "fingerprint"]


def choose(
    num_slots: int,
    max_context: int,
    prefill_batch: int = 4,
    context_lengths: tuple[int, ...] = (),
    prefill_lengths: tuple[int, ...] = (),
    in_blocks: bool = True,
) -> Buckets:
    """Returns the buckets for these sizes; lengths that are given are taken as they are. Raises InvalidConfig.

    in_blocks: rows of one dispatch are arranged in blocks that share an adapter; False: they come in any order.
    """
    prefill_batch = min(prefill_batch, num_slots)
    prefill = _checked("prefill_buckets", prefill_lengths, max_context) or _spread(max_context, 3)
    context = _checked("context_buckets", context_lengths, max_context)
    rows = (1,) if prefill_batch == 1 else (1, prefill_batch)
    score = (prefill[0], max_context) if prefill[0] < max_context else (max_context,)

    def build(contexts: tuple[int, ...]) -> Buckets:
        return Buckets(num_slots, max_context, prefill, rows, contexts, score, _forms(num_slots, in_blocks), in_blocks)

    if context:
        buckets = build(context)
        if len(buckets.programs()) > MAX_PROGRAMS:
            raise InvalidConfig(
                f"engine.context_buckets={list(context_lengths)} with engine.prefill_buckets={list(prefill)}: "
                f"{len(buckets.programs())} programs to compile, at most {MAX_PROGRAMS} are allowed; give fewer"
            )
        return buckets
    fitting = [b for count in (3, 2, 1) if len((b := build(_spread(max_context, count))).programs()) <= MAX_PROGRAMS]
    if not fitting:
        raise InvalidConfig(
            f"engine.prefill_buckets={list(prefill)}: {len(prefill)} lengths make too many programs; name fewer"
        )
    return fitting[0]


def _forms(num_slots: int, in_blocks: bool) -> tuple[Form, ...]:
    few = num_slots // 4
    forms = [Form(few, 1)] if few >= 2 else []
    if in_blocks and num_slots > 1:
        forms.append(Form(num_slots, num_slots))
    if in_blocks and num_slots > BLOCK and num_slots % BLOCK == 0:
        forms.append(Form(num_slots, BLOCK))
    return (*forms, Form(num_slots, 1))


def _spread(max_context: int, count: int) -> tuple[int, ...]:
    """Returns the `count` longest of three lengths: max_context, a sixteenth of it but at least 64, and one between."""
    shortest = max(max_context // 16, min(64, max_context // 3))
    lengths = [max_context, int((shortest * max_context) ** 0.5), shortest][:count]
    return tuple(sorted({min(-(-length // SMALLEST) * SMALLEST, max_context) for length in lengths}))


def _checked(name: str, lengths: tuple[int, ...], max_context: int) -> tuple[int, ...]:
    for length in lengths:
        if not 1 <= length <= max_context:
            raise InvalidConfig(f"engine.{name}={list(lengths)}: {length} is not within 1 and engine.max_context={max_context}")
    # Whatever the context holds must fit somewhere.
    return tuple(sorted({*lengths, max_context})) if lengths else ()


def _at_least(sizes: tuple[int, ...], wanted: int) -> int:
    return next(size for size in sizes if size >= wanted)
