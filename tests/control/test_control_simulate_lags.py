"""Random lags have the law, the mean and the cap that lags.py promises."""

import numpy as np
import pytest

from sidestep.control.simulate import simulate
from sidestep.control.simulate.lags import CAP, HEAVY_EXPONENT, draw_lags, survivals

KINDS = ("geometric", "heavy")
MEANS = (1, 2, 8, 32)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mean", MEANS)
def test_survivals_fall_from_below_one_and_sum_to_the_mean(kind, mean):
    survival = survivals(kind, mean)
    assert len(survival) == CAP * mean
    assert survival.sum() == pytest.approx(mean, rel=1e-12)
    assert survival[0] < 1 and (np.diff(survival) < 0).all() and survival[-1] > 0


def test_geometric_lags_have_no_memory():
    survival = survivals("geometric", 8)
    assert survival[1:] / survival[:-1] == pytest.approx(survival[0], rel=1e-9)
    # Almost the uncapped law, whose mean is q / (1 - q).
    assert survival[0] == pytest.approx(8 / 9, rel=1e-6)


def test_heavy_lags_have_the_tail_of_a_power():
    survival = survivals("heavy", 32)
    k = np.arange(1, len(survival) + 1)
    root = survival ** (-1 / HEAVY_EXPONENT)  # 1 + k / scale: a straight line
    slope = np.diff(root)
    assert slope == pytest.approx(slope[0], rel=1e-9)
    assert root[0] - slope[0] == pytest.approx(1.0, rel=1e-9)
    assert survival[k == 256] > 20 * survivals("geometric", 32)[k == 256]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mean", MEANS)
def test_drawn_lags_follow_the_survivals(kind, mean):
    lags = draw_lags(kind, mean, 40_000, seed=1)
    survival = survivals(kind, mean)
    assert lags.min() == 0 and lags.max() <= CAP * mean
    observed = (lags[:, None] >= np.arange(1, len(survival) + 1)).mean(axis=0)
    # Kolmogorov-Smirnov: 1.95 / sqrt(n) is exceeded once in a thousand.
    assert np.abs(observed - survival).max() < 1.95 / np.sqrt(40_000)


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_seed_draws_the_same_luck_for_every_mean(kind):
    short, long = (draw_lags(kind, mean, 500, seed=4) for mean in (3, 12))
    assert (short <= long).all() and (short < long).any()
    assert (draw_lags(kind, 3, 500, seed=4) == short).all()
    assert (draw_lags(kind, 3, 500, seed=5) != short).any()
    assert (draw_lags(kind, 3, 200, seed=4) == short[:200]).all()


@pytest.mark.parametrize("kind", KINDS)
def test_lags_do_not_come_from_the_numbers_that_make_the_noise(kind):
    of_the_noise = np.random.default_rng(4).random(2000)
    lags = draw_lags(kind, 8, 2000, seed=4)
    assert abs(np.corrcoef(lags, of_the_noise)[0, 1]) < 0.1


@pytest.mark.parametrize("kind", ("fixed", *KINDS))
def test_a_mean_of_zero_is_always_zero(kind):
    assert not draw_lags(kind, 0, 100, seed=0).any()


def test_a_fixed_lag_is_the_same_at_every_step():
    assert draw_lags("fixed", 7, 50, seed=3).tolist() == [7] * 50


@pytest.mark.parametrize("kind", KINDS)
def test_the_noise_is_the_same_for_every_kind_of_lag(kind):
    """At a learning rate of almost zero the weights stay where they are, so lags do not show."""
    fixed, random = (
        simulate(5, 1e-12, steps=60, lag_kind=k, trajectory=True) for k in ("fixed", kind)
    )
    assert random.cosines == pytest.approx(fixed.cosines, abs=1e-9)


@pytest.mark.parametrize("kind", KINDS)
def test_lags_that_vary_are_easier_than_a_fixed_one_of_the_same_mean(kind):
    assert simulate(8, 0.3).loss is None
    assert simulate(8, 0.3, lag_kind=kind).loss < 0.01


def test_the_displacement_is_that_of_each_steps_own_lag():
    """By hand: one dimension, no noise, full displacement. A lag of 0 (nothing moved) steps with
    the gradient itself; otherwise what remains is 0 if the policy has moved on down, for in one
    dimension everything is parallel.
    """
    lags = draw_lags("geometric", 2, 30, seed=0)
    thetas = [1.0]
    for step, lag in enumerate(lags):
        behaviour = thetas[max(step - lag, 0)]
        moved = thetas[-1] - behaviour
        still_pushes = behaviour * moved < 0
        thetas.append(thetas[-1] - 0.1 * (0.0 if still_pushes else behaviour))
    run = simulate(
        2,
        0.1,
        "displacement",
        dim=1,
        noise=0.0,
        steps=30,
        lag_kind="geometric",
        trajectory=True,
    )
    assert run.losses == pytest.approx([0.5 * theta**2 for theta in thetas[1:]], rel=1e-9)
