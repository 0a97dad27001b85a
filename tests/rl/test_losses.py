"""Every objective against a per-token loop in NumPy, for its value; against finite differences of that loop, or a gradient
derived by hand where the objective stops gradients, for its gradient."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from marlaas_jax.config import AlgorithmConfig
from marlaas_jax.rl.losses import LossRows, k3, policy_loss
from marlaas_jax.rl.objective import LOSS_IDS, anchor_weights, resolve, row_weights

B, T = 6, 7


def make_rows(seed: int, loss: str, **changes) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Returns (logprob [B, T], fields of LossRows) with ratios on both sides of every bound."""
    rng = np.random.default_rng(seed)
    objective = resolve(AlgorithmConfig(loss=loss))
    spread = 5e-4 if loss == "gspo" else 0.4
    logprob = rng.uniform(-4, -0.5, (B, T))
    full = lambda value, dtype=np.float64: np.full(B, value, dtype)
    mask = rng.random((B, T)) < 0.7
    mask[:, 0] = True
    mask[-1] = False  # a row with nothing to train
    fields = {
        "mask_BT": mask,
        "behaviour_BT": logprob + rng.normal(0, spread, (B, T)),
        "proximal_BT": logprob + rng.normal(0, spread, (B, T)),
        "anchor_BT": np.ones((B, T)),
        "base_BT": logprob + rng.normal(0, 0.5, (B, T)),
        "fresh_BT": mask & (rng.random((B, T)) < 0.5),
        "loss_id_B": full(objective.loss_id, np.int32),
        "clip_low_B": full(objective.clip_low),
        "clip_high_B": full(objective.clip_high),
        "importance_cap_B": full(1.3),
        "kl_weight_B": full(0.0),
        "advantage_B": rng.normal(0, 1, B),
        "weight_B": row_weights(mask.sum(1), objective.aggregation, 16).astype(np.float64),
    } | changes
    return logprob, fields


def as_rows(fields: dict[str, np.ndarray]) -> LossRows:
    keep = lambda x: x.astype(np.float32) if x.dtype == np.float64 else x
    return LossRows(**{name: keep(np.asarray(value)) for name, value in fields.items()})


def reference_row(logprob, still, f, b) -> float:
    """One row's loss by the published formulas, token by token; `still` is the log-prob where the gradient stops."""
    tokens = [t for t in range(T) if f["mask_BT"][b, t]]
    if not tokens:
        return 0.0
    advantage, cap = f["advantage_B"][b], f["importance_cap_B"][b]
    low, high = 1 - f["clip_low_B"][b], 1 + f["clip_high_B"][b]
    clip = lambda r: min(max(r, low), high)
    anchor, mu = f["anchor_BT"][b], f["behaviour_BT"][b]
    proximal = [anchor[t] * f["proximal_BT"][b, t] + (1 - anchor[t]) * still[t] for t in range(T)]
    kind = f["loss_id_B"][b]
    sequence_ratio = math.exp(sum(logprob[t] - proximal[t] for t in tokens) / len(tokens))
    total = 0.0
    for t in tokens:
        weight = min(math.exp(proximal[t] - mu[t]), cap)
        ratio = math.exp(logprob[t] - proximal[t])
        if kind == LOSS_IDS["clip"]:
            total += weight * min(ratio * advantage, clip(ratio) * advantage)
        elif kind == LOSS_IDS["sequence_clip"]:
            total += weight * min(sequence_ratio * advantage, clip(sequence_ratio) * advantage)
        elif kind == LOSS_IDS["cispo"]:
            total += weight * clip(math.exp(still[t] - proximal[t])) * advantage * logprob[t]
        else:
            total += min(math.exp(still[t] - mu[t]), cap) * advantage * (1 + logprob[t] - still[t])
        if f["kl_weight_B"][b] > 0:
            d = logprob[t] - f["base_BT"][b, t]
            total -= f["kl_weight_B"][b] * (math.exp(-d) - 1 + d)
    return -f["weight_B"][b] * total


def reference(logprob, fields) -> tuple[np.ndarray, np.ndarray]:
    """Returns (loss [B], its gradient [B, T] by central differences in float64)."""
    loss = np.array([reference_row(logprob[b], logprob[b], fields, b) for b in range(B)])
    gradient = np.zeros((B, T))
    step = 1e-6
    for b in range(B):
        for t in range(T):
            up, down = logprob[b].copy(), logprob[b].copy()
            up[t] += step
            down[t] -= step
            gradient[b, t] = (reference_row(up, logprob[b], fields, b) - reference_row(down, logprob[b], fields, b)) / (
                2 * step
            )
    return loss, gradient


def check(logprob, fields, rtol=2e-4):
    rows = as_rows(fields)
    run = jax.jit(lambda x: policy_loss(x, rows))
    loss, metrics = run(logprob.astype(np.float32))
    gradient = jax.grad(lambda x: jnp.sum(policy_loss(x, rows)[0]))(logprob.astype(np.float32))
    wanted, wanted_gradient = reference(logprob, fields)
    np.testing.assert_allclose(loss, wanted, rtol=rtol, atol=1e-6)
    np.testing.assert_allclose(gradient, wanted_gradient, rtol=rtol, atol=2e-5)
    assert np.all(np.asarray(gradient)[~fields["mask_BT"]] == 0.0)
    return metrics


LOSSES = ["grpo", "dr_grpo", "dapo", "gspo", "cispo", "importance_sampling"]


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("seed", [0, 1])
def test_behaviour_objective(loss, seed):
    logprob, fields = make_rows(seed, loss)
    fields["proximal_BT"] = fields["behaviour_BT"]
    check(logprob, fields)


@pytest.mark.parametrize("loss", LOSSES)
def test_decoupled_objective_with_given_proximal_logprobs(loss):
    check(*make_rows(2, loss))


@pytest.mark.parametrize("loss", LOSSES)
def test_interpolated_anchor(loss):
    logprob, fields = make_rows(3, loss)
    staleness = np.random.default_rng(0).integers(0, 4, (B, T))
    fields["anchor_BT"] = anchor_weights("decoupled_interpolated", staleness).astype(np.float64)
    fields["proximal_BT"] = fields["behaviour_BT"]
    check(logprob, fields)


@pytest.mark.parametrize("loss", LOSSES)
def test_kl_to_the_base(loss):
    logprob, fields = make_rows(4, loss, kl_weight_B=np.full(B, 0.3))
    fields["kl_weight_B"][1] = 0.0
    metrics = check(logprob, fields)
    assert metrics["base_kl"][0] > 0 and metrics["base_kl"][1] == 0


def test_rows_of_all_losses_in_one_call_equal_their_own_calls():
    parts = [make_rows(seed, loss) for seed, loss in enumerate(LOSSES)]
    logprob = np.concatenate([x for x, _ in parts])
    fields = {name: np.concatenate([f[name] for _, f in parts]) for name in parts[0][1]}
    together, _ = policy_loss(logprob.astype(np.float32), as_rows(fields))
    alone = np.concatenate([policy_loss(x.astype(np.float32), as_rows(f))[0] for x, f in parts])
    np.testing.assert_array_equal(together, alone)


def test_grpo_gradient_on_policy_is_the_policy_gradient():
    """At ratio 1 the gradient of a token is -A / (sequences * length), whatever the clip."""
    logprob, fields = make_rows(5, "grpo")
    fields["proximal_BT"] = fields["behaviour_BT"] = logprob
    gradient = jax.grad(lambda x: jnp.sum(policy_loss(x, as_rows(fields))[0]))(logprob.astype(np.float32))
    lengths = fields["mask_BT"].sum(1)
    expected = -fields["advantage_B"][:, None] / (5 * np.maximum(lengths, 1)[:, None]) * fields["mask_BT"]
    np.testing.assert_allclose(gradient, expected, rtol=1e-5)


def test_clipped_tokens_have_no_gradient_and_are_counted():
    """PPO's bounds, separate as in DAPO: only the side that the advantage pushes over is cut."""
    logprob = np.zeros((4, 1))
    ratio = np.array([1.3, 0.7, 1.3, 0.7])
    _, fields = make_rows(0, "dapo")
    fields = {name: value[:4, :1] if value.ndim == 2 else value[:4] for name, value in fields.items()}
    fields["mask_BT"] = np.ones((4, 1), bool)
    fields["behaviour_BT"] = fields["proximal_BT"] = logprob - np.log(ratio)[:, None]
    fields["advantage_B"] = np.array([1.0, 1.0, -1.0, -1.0])
    fields["weight_B"] = np.ones(4)
    rows = as_rows(fields)
    _, metrics = policy_loss(logprob.astype(np.float32), rows)
    gradient = jax.grad(lambda x: jnp.sum(policy_loss(x, rows)[0]))(logprob.astype(np.float32))
    np.testing.assert_array_equal(metrics["clipped"], [1, 0, 0, 1])
    np.testing.assert_allclose(gradient[:, 0], [0.0, -0.7, 1.3, 0.0], rtol=1e-6)


def test_k3_is_an_unbiased_non_negative_estimate_of_the_kl():
    rng = np.random.default_rng(0)
    p, q = rng.dirichlet(np.ones(8)), rng.dirichlet(np.ones(8))
    values = np.asarray(k3(jnp.log(p), jnp.log(q)))
    assert np.all(values >= 0)
    np.testing.assert_allclose((p * values).sum(), (p * np.log(p / q)).sum(), rtol=1e-5)


def test_a_row_with_nan_stays_alone():
    logprob, fields = make_rows(6, "grpo")
    clean, _ = policy_loss(logprob.astype(np.float32), as_rows(fields))
    fields["behaviour_BT"][2, 0] = math.nan
    loss, metrics = policy_loss(logprob.astype(np.float32), as_rows(fields))
    gradient = jax.grad(lambda x: jnp.sum(policy_loss(x, as_rows(fields))[0]))(logprob.astype(np.float32))
    others = [0, 1, 3, 4, 5]
    assert math.isnan(loss[2])
    np.testing.assert_array_equal(np.asarray(loss)[others], np.asarray(clean)[others])
    assert np.isfinite(np.asarray(gradient)[others]).all()
    assert np.isfinite(np.asarray(metrics["ratio"])[others]).all()


def test_values_outside_the_mask_are_never_read():
    logprob, fields = make_rows(7, "gspo")
    clean = policy_loss(logprob.astype(np.float32), as_rows(fields))
    dirty = dict(fields)
    for name in ("behaviour_BT", "proximal_BT", "base_BT", "anchor_BT"):
        dirty[name] = np.where(fields["mask_BT"], fields[name], math.nan)
    got = policy_loss(np.where(fields["mask_BT"], logprob, math.inf).astype(np.float32), as_rows(dirty))
    jax.tree.map(np.testing.assert_array_equal, clean, got)


@pytest.mark.parametrize(
    ("aggregation", "expected"),
    [("token", [1 / 8] * 2 + [0, 1 / 8]), ("sequence", [1 / 12, 1 / 9, 0, 1 / 3]), ("constant", [1 / 30, 1 / 30, 0, 1 / 30])],
)
def test_row_weights_leave_masked_rows_out_of_the_denominator_h25(aggregation, expected):
    lengths = np.array([4, 3, 0, 1])
    np.testing.assert_allclose(row_weights(lengths, aggregation, 10), expected, rtol=1e-6)
    assert np.all(row_weights(np.zeros(3, np.int64), aggregation, 10) == 0)


def test_defaults_of_the_losses():
    grpo, dr, dapo = (resolve(AlgorithmConfig(loss=name)) for name in ("grpo", "dr_grpo", "dapo"))
    assert (grpo.aggregation, grpo.normalize_std, grpo.clip_low, grpo.clip_high) == ("sequence", True, 0.2, 0.2)
    assert (dr.aggregation, dr.normalize_std) == ("constant", False)
    assert (dapo.aggregation, dapo.clip_low, dapo.clip_high) == ("token", 0.2, 0.28)
    assert resolve(AlgorithmConfig(loss="gspo")).loss_id == LOSS_IDS["sequence_clip"]
    mixed = resolve(AlgorithmConfig(loss="grpo", aggregation="token", normalize_std=False, clip_high=0.5))
    assert (mixed.aggregation, mixed.normalize_std, mixed.clip_low, mixed.clip_high) == ("token", False, 0.2, 0.5)
    assert {f.name for f in dataclasses.fields(mixed)} >= {"kl_weight", "minibatches", "mask_truncated"}


def test_a3po_anchor_is_one_over_staleness():
    np.testing.assert_allclose(anchor_weights("decoupled_interpolated", np.array([0, 1, 2, 4])), [0, 1, 0.5, 0.25])
    np.testing.assert_array_equal(anchor_weights("decoupled", np.array([0, 3])), [1, 1])
