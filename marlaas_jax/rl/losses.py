"""Policy-gradient objectives as data: one compiled function serves rows of jobs with different losses.

Notation: pi is the policy being trained, mu the one that sampled, pi_prox the anchor of the clipped ratio, A the advantage.
Per token t of a row, with r_t = pi / pi_prox and w_t = min(pi_prox / mu, cap) (no gradient):

    GRPO, Dr.GRPO, DAPO   w_t * min(r_t A, clip(r_t, 1 - low, 1 + high) A)          PPO's clipped surrogate
    GSPO                  the same with s = exp(mean_t log r_t) in place of r_t
    CISPO                 w_t * sg(clip(r_t, 1 - low, 1 + high)) A log pi
    importance sampling   min(pi / mu, cap) A, whose gradient is sg(min(pi / mu, cap)) A grad log pi

and a row's loss is -weight * sum_t of these, plus weight * kl_weight * sum_t k3(pi, base). `weight` is the normaliser that
`objective.row_weights` fixes for a whole minibatch before its first micro-batch. One mask drives sums, normaliser and metrics.

pi_prox is log-linear between a given log-prob and the policy itself: anchor * proximal + (1 - anchor) * sg(log pi), so

    behaviour objective     proximal = mu,     anchor = 1        w_t = 1 and the ratio is against the sampler
    decoupled (AReaL)       proximal = scored when the batch starts, anchor = 1; or anchor = 0 while the weights are still those
    interpolated (A-3PO)    proximal = mu,     anchor = 1 / staleness (0 at staleness 0)

References: GRPO: Shao et al. 2024 (arXiv 2402.03300) eq. 3-4. Dr.GRPO: Liu et al. 2025 (2503.20783) section 3. DAPO: Yu et al.
2025 (2503.14476) eq. 8. GSPO: Zheng et al. 2025 (2507.18071) eq. 5-7. CISPO: MiniMax 2025 (2506.13585) eq. 4-5. Decoupled
objective: Hilton et al. 2022 (2110.00641) and AReaL, Fu et al. 2025 (2505.24298) eq. 5. A-3PO: 2512.06547. k3:
Schulman 2020, "Approximating KL divergence". Truncated importance weights: Wu et al. 2025 (LlamaRL, 2505.24034), AIPO.
"""

import dataclasses

import jax
import jax.numpy as jnp

from marlaas_jax.rl.objective import LOSS_IDS


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LossRows:
    """Rows of one micro-batch, of any jobs; T is the suffix position. Values outside the mask are not read."""

    mask_BT: jax.Array  # bool: True where the policy sampled the token and it is trained
    behaviour_BT: jax.Array  # float32: log mu
    proximal_BT: jax.Array  # float32: the given part of log pi_prox
    anchor_BT: jax.Array  # float32 in [0, 1]: weight of `proximal` in log pi_prox
    base_BT: jax.Array  # float32: log-prob of the base model; read where kl_weight > 0
    fresh_BT: jax.Array  # bool: sampled by the very weights that are trained, so log pi - log mu is sampler mismatch alone
    loss_id_B: jax.Array  # int32, see LOSS_IDS
    clip_low_B: jax.Array  # float32
    clip_high_B: jax.Array  # float32
    importance_cap_B: jax.Array  # float32
    kl_weight_B: jax.Array  # float32
    advantage_B: jax.Array  # float32
    weight_B: jax.Array  # float32, see row_weights


def k3(logprob: jax.Array, reference: jax.Array) -> jax.Array:
    """Returns Schulman's k3 of KL(pi || reference) from samples of pi: exp(-d) - 1 + d with d = logprob - reference."""
    difference = logprob - reference
    return jnp.expm1(-difference) + difference


def policy_loss(logprob_BT: jax.Array, rows: LossRows) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Returns (loss [B], metrics: per-row sums [B] over loss tokens, `ratio_max` excepted).

    A row that is not finite stays alone: no operation mixes rows, and masked positions are replaced before any arithmetic.
    """
    mask_BT = rows.mask_BT
    keep = lambda x_BT, other=0.0: jnp.where(mask_BT, x_BT, other)
    total = lambda x_BT: jnp.sum(keep(x_BT), axis=1)
    column = lambda x_B: x_B[:, None]
    logprob_BT, behaviour_BT = keep(logprob_BT), keep(rows.behaviour_BT)
    still_BT = jax.lax.stop_gradient(logprob_BT)
    anchor_BT = keep(rows.anchor_BT)
    # where(): 0 * inf must not reach the sum
    given_BT = jnp.where(anchor_BT > 0, anchor_BT * keep(rows.proximal_BT), 0.0)
    proximal_BT = given_BT + jnp.where(anchor_BT < 1, (1.0 - anchor_BT) * still_BT, 0.0)

    num_tokens_B = jnp.sum(mask_BT, axis=1).astype(jnp.float32)
    log_ratio_BT = logprob_BT - proximal_BT
    mean_log_ratio_B = jnp.sum(log_ratio_BT, axis=1) / jnp.maximum(num_tokens_B, 1.0)
    loss_id_B1 = column(rows.loss_id_B)
    is_sequence_B1 = loss_id_B1 == LOSS_IDS["sequence_clip"]
    ratio_BT = jnp.exp(jnp.where(is_sequence_B1, jnp.broadcast_to(column(mean_log_ratio_B), log_ratio_BT.shape), log_ratio_BT))

    cap_B1, advantage_B1 = column(rows.importance_cap_B), column(rows.advantage_B)
    off_policy_BT = jnp.exp(proximal_BT - behaviour_BT)
    truncated_BT = jax.lax.stop_gradient(jnp.minimum(off_policy_BT, cap_B1))
    low_B1, high_B1 = 1.0 - column(rows.clip_low_B), 1.0 + column(rows.clip_high_B)
    clipped_ratio_BT = jnp.clip(ratio_BT, low_B1, high_B1)
    clip_BT = truncated_BT * jnp.minimum(ratio_BT * advantage_B1, clipped_ratio_BT * advantage_B1)
    cispo_BT = truncated_BT * jax.lax.stop_gradient(clipped_ratio_BT) * advantage_B1 * logprob_BT
    behaviour_ratio_BT = jnp.exp(still_BT - behaviour_BT)
    importance_BT = jnp.minimum(behaviour_ratio_BT, cap_B1) * advantage_B1 * (1.0 + logprob_BT - still_BT)
    is_cispo_B1, is_importance_B1 = loss_id_B1 == LOSS_IDS["cispo"], loss_id_B1 == LOSS_IDS["importance_sampling"]
    objective_BT = jnp.where(is_importance_B1, importance_BT, jnp.where(is_cispo_B1, cispo_BT, clip_BT))

    has_kl_B1 = column(rows.kl_weight_B) > 0
    kl_BT = jnp.where(has_kl_B1 & mask_BT, k3(logprob_BT, jnp.where(has_kl_B1, keep(rows.base_BT), still_BT)), 0.0)
    loss_B = rows.weight_B * (rows.kl_weight_B * total(kl_BT) - total(objective_BT))

    outside_low_BT, outside_high_BT = ratio_BT < low_B1, ratio_BT > high_B1
    bound_BT = (outside_high_BT & (advantage_B1 > 0)) | (outside_low_BT & (advantage_B1 < 0))
    bound_BT = jnp.where(is_cispo_B1, outside_low_BT | outside_high_BT, bound_BT)
    bound_BT = jnp.where(is_importance_B1, behaviour_ratio_BT > cap_B1, bound_BT)
    drift_BT = jnp.expm1(still_BT - behaviour_BT) - (still_BT - behaviour_BT)  # k3 of KL(mu || pi) from samples of mu
    shown_BT = jnp.where(is_importance_B1, behaviour_ratio_BT, ratio_BT)
    metrics = {
        "tokens": num_tokens_B,
        "loss": loss_B,
        "clipped": total(bound_BT.astype(jnp.float32)),
        "ratio": total(shown_BT),
        "ratio_max": jnp.max(keep(shown_BT), axis=1),
        "off_policy_truncated": total((off_policy_BT > cap_B1).astype(jnp.float32)),
        "behaviour_kl": total(drift_BT),
        "fresh_tokens": total(rows.fresh_BT.astype(jnp.float32)),
        "fresh_kl": total(jnp.where(rows.fresh_BT, drift_BT, 0.0)),
        "base_kl": total(kl_BT),
    }
    return loss_B, {name: jax.lax.stop_gradient(value) for name, value in metrics.items()}
