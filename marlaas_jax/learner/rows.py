"""Fills the per-row data of one micro-batch's objectives. NumPy in, NumPy out (as LossRows)."""

# NumPy arrays are given where JAX arrays are named.
# pyright: reportArgumentType=false

from collections.abc import Sequence

import numpy as np

from marlaas_jax.rl.losses import LossRows
from marlaas_jax.rl.objective import Objective, anchor_weights
from marlaas_jax.rl.packing import Layout


def loss_rows(layout: Layout, owners: Sequence[tuple[Objective, int]], num_rows: int, num_suffix: int) -> LossRows:
    """Returns the rows of `layout`, padded to [B, T]; `owners` gives each block's (objective, version being trained)."""
    zeros = lambda: np.zeros((num_rows, num_suffix), np.float32)
    column = lambda value=0.0: np.full(num_rows, value, np.float32)
    mask, fresh = np.zeros((num_rows, num_suffix), bool), np.zeros((num_rows, num_suffix), bool)
    behaviour, proximal, anchor, base = zeros(), zeros(), zeros(), zeros()
    loss_id = np.zeros(num_rows, np.int32)
    low, high, cap, kl_weight, advantage, weight = column(), column(), column(1.0), column(), column(), column()
    for b, m, row in layout.rows:
        objective, version = owners[m]
        length = len(row.token_ids)
        mask[b, :length] = row.mask
        fresh[b, :length] = row.mask & (row.versions == version)
        behaviour[b, :length] = row.behaviour
        given = row.behaviour if row.proximal is None else row.proximal
        proximal[b, :length] = given
        # With one minibatch the weights at the start of the batch are the ones being trained: the anchor is the policy itself.
        is_start = objective.objective == "decoupled" and row.proximal is None
        anchor[b, :length] = 0.0 if is_start else anchor_weights(objective.objective, version - row.versions)
        if row.base is not None:
            base[b, :length] = row.base
        loss_id[b] = objective.loss_id
        low[b], high[b], cap[b] = objective.clip_low, objective.clip_high, objective.importance_cap
        kl_weight[b], advantage[b], weight[b] = objective.kl_weight, row.advantage, row.weight
    return LossRows(mask, behaviour, proximal, anchor, base, fresh, loss_id, low, high, cap, kl_weight, advantage, weight)
