"""Runs every program of a learner once, on nothing, and once more to time it, so that no job waits for a compiler."""

import dataclasses
from collections import deque
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from marlaas_jax.learner import rows
from marlaas_jax.learner.cost import CostModel, update_unit
from marlaas_jax.learner.executor import Chain, Executor
from marlaas_jax.lora.snapshot import fingerprint
from marlaas_jax.rl.packing import BlockShape, lay_out_sequence


def warm(
    executor: Executor, sampler_dtype: Any, cost: CostModel, clock: Callable[[], float], compiled: Callable[[str], None]
) -> None:
    """Compiles everything and calibrates the cost model; `compiled` is told the name of each program once it is there.

    Paging needs no program of its own: a job goes out by "extract" and comes in by "place".
    """
    known = set()

    def announce(program: str) -> None:
        if program not in known:
            known.add(program)
            compiled(program)

    for shape in (*executor.sizes.shapes, executor.sizes.probe):
        for timed in (False, True):
            chain = _padding(executor, shape)
            while chain.calls:
                start = clock()
                unit, out = chain.run()
                jax.block_until_ready(out)
                of_shape = f" of {shape.blocks} x ({shape.prompt} + {shape.rows} x {shape.suffix}) tokens"
                announce(unit.kind + (of_shape if unit.kind in ("forward", "backward") else ""))
                if timed:
                    cost.calibrate(unit, max(clock() - start, 1e-6))
    for bucket in executor.sizes.update_buckets:
        for _ in range(2):
            start = clock()
            jax.block_until_ready(executor.update([], [], at_least=bucket))
        cost.calibrate(update_unit(executor.model, executor.max_rank, bucket), max(clock() - start, 1e-6))
        announce(f"update of {bucket}")
    executor.wipe(0)
    announce("place")
    published = executor.published(0, sampler_dtype)
    announce("published")
    fingerprint(published, 0.0)
    announce("fingerprint")
    executor.extract(0)
    announce("extract")


def _padding(executor: Executor, shape: BlockShape) -> Chain:
    """Returns a micro-batch without blocks: training for the shapes of the sizes, scoring for the probe.

    One group of layers stands for all: the first forward and, for its input, the last backward.
    """
    sizes = executor.sizes
    layout = lay_out_sequence(shape, np.zeros(2, np.int32), sizes.capacity)
    slots = np.zeros(shape.blocks, np.int32)
    if shape == sizes.probe:
        chain = executor.score_chain(layout, slots)
    else:
        nowhere = np.full((sizes.num_rows, sizes.num_suffix), sizes.capacity, np.int32)
        layout = dataclasses.replace(layout, index_BT=nowhere)
        chain = executor.train_chain(layout, slots, rows.loss_rows(layout, [], *nowhere.shape))
    forwards = [call for call in chain.calls if call[0].kind == "forward"]
    backwards = [call for call in chain.calls if call[0].kind == "backward"]
    left_out = [*forwards[1:], *backwards[:-1]]
    chain.calls = deque(call for call in chain.calls if call not in left_out)
    return chain
