"""Advantages by hand (H23, H24)."""

import math

import numpy as np
import pytest

from marlaas_jax.rl.advantages import group_advantages, is_live, live_share


def test_centred_only():
    np.testing.assert_allclose(group_advantages([1, 0, 0, 0], normalize_std=False), [0.75, -0.25, -0.25, -0.25])


def test_divided_by_the_sample_standard_deviation():
    rewards = [1.0, 0.0, 0.5, 0.25, 2.0]
    mean = sum(rewards) / 5
    std = math.sqrt(sum((r - mean) ** 2 for r in rewards) / 4)
    expected = [(r - mean) / (std + 1e-4) for r in rewards]
    np.testing.assert_allclose(group_advantages(rewards, normalize_std=True), expected, rtol=1e-6)


@pytest.mark.parametrize("normalize_std", [True, False])
@pytest.mark.parametrize("rewards", [[1, 1, 1, 1], [0, 0, 0, 0], [0.1, 0.1, 0.1], [0.7], [1 / 3] * 7])
def test_equal_rewards_give_exactly_zero_h23(rewards, normalize_std):
    assert np.all(group_advantages(rewards, normalize_std) == 0.0)


@pytest.mark.parametrize("normalize_std", [True, False])
def test_missing_and_non_finite_rewards_leave_the_statistics_h24(normalize_std):
    got = group_advantages([1, None, 0, math.nan, math.inf, 0], normalize_std)
    alone = group_advantages([1, 0, 0], normalize_std)
    np.testing.assert_array_equal(got[[0, 2, 5]], alone)
    np.testing.assert_array_equal(got[[1, 3, 4]], 0.0)


@pytest.mark.parametrize("rewards", [[None] * 4, [math.inf, 0, 0, 0], [1.0, None, None], []])
def test_nothing_left_to_compare_gives_zero_h24(rewards):
    got = group_advantages(rewards, normalize_std=True)
    assert got.shape == (len(rewards),) and np.all(got == 0.0)


def test_live_share_counts_groups_with_two_different_rewards():
    assert is_live([0, 1]) and not is_live([1, 1]) and not is_live([1, None]) and not is_live([1, math.nan])
    assert live_share([[0, 1], [1, 1], [None], [0, 0.5]]) == 0.5
    assert live_share([]) == 0.0
