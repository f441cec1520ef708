"""Theory on one curvature, without noise: the edge of stability and what lies past it."""

import math

import numpy as np
import pytest

from sidestep.control.simulate import simulate, stability_edge, stability_map

LAGS = (0, 1, 2, 3, 8, 16, 32)


def losses_at(factor, lags, **options):
    """Losses at `factor` times the edge, by lag."""
    edge_options = {k: v for k, v in options.items() if k in ("optimizer", "momentum")}
    edges = {lag: stability_edge(lag, **edge_options) for lag in lags}
    runs = stability_map(
        lags, [factor * edge for edge in edges.values()], ["none"], dim=1, noise=0.0, **options
    )
    return {r.lag: r.loss for r in runs if r.lr == factor * edges[r.lag]}


def test_just_below_the_edge_descent_converges_and_just_above_it_diverges():
    below, above = (losses_at(factor, LAGS, steps=12_000) for factor in (0.95, 1.05))
    assert list(below) == list(above) == list(LAGS)
    assert all(loss is not None and loss < 1e-6 for loss in below.values()), below
    assert all(loss is None for loss in above.values()), above


@pytest.mark.parametrize("momentum", [0.5, 0.9])
def test_the_edge_of_momentum_is_where_momentum_turns_unstable(momentum):
    options = {"optimizer": "momentum", "momentum": momentum, "steps": 8000}
    lags = (0, 1, 2, 5, 12)
    below, above = (losses_at(factor, lags, **options) for factor in (0.95, 1.05))
    assert all(loss is not None and loss < 1e-6 for loss in below.values()), below
    assert all(loss is None for loss in above.values()), above


@pytest.mark.parametrize("lag", [1, 4, 11])
def test_the_edge_is_sharp_to_a_thousandth(lag):
    edge = stability_edge(lag)
    for factor, sign in ((0.999, -1), (1.001, 1)):
        run = simulate(lag, factor * edge, dim=1, noise=0.0, steps=3000, trajectory=True)
        peaks = [max(run.losses[start : start + 500]) for start in range(0, 3000, 500)]
        changes = np.sign(np.diff(np.log(peaks[1:])))
        assert changes.tolist() == [sign] * 4


@pytest.mark.parametrize("lag", [1, 2, 4, 8, 16])
def test_past_the_edge_the_mean_cosine_is_one_less_two_flips_a_period(lag):
    period = 4 * lag + 2
    run = simulate(
        lag,
        1.0005 * stability_edge(lag),
        dim=1,
        noise=0.0,
        steps=40 * period,
        trajectory=True,
    )
    cosines = run.cosines[-20 * period :]
    assert np.mean(cosines) == pytest.approx(1 - 2 / (2 * lag + 1), abs=1e-9)


def test_past_the_edge_a_synchronous_run_flips_its_sign_every_step():
    run = simulate(0, 2.01, dim=1, noise=0.0, steps=300, trajectory=True)
    assert run.cosines == pytest.approx([-1.0] * 299)


def test_known_edges():
    assert stability_edge(0) == pytest.approx(2.0)
    assert stability_edge(1) == pytest.approx(1.0)
    # 2 sin(pi/10) is the golden ratio's inverse.
    assert stability_edge(2) == pytest.approx((math.sqrt(5) - 1) / 2)
    assert stability_edge(8) == pytest.approx(2 / 10.84, rel=1e-3)  # "about 11-fold"
    assert stability_edge(32) == pytest.approx(2 / 41.4, rel=1e-3)  # "about 41-fold"
    for momentum in (0.0, 0.3, 0.9):
        options = {"optimizer": "momentum", "momentum": momentum}
        assert stability_edge(0, **options) == pytest.approx(2 * (1 + momentum))
        assert stability_edge(1, **options) == pytest.approx(1 - momentum)
    for lag in LAGS:
        assert stability_edge(lag, optimizer="momentum", momentum=0.0) == pytest.approx(
            stability_edge(lag)
        )


def test_there_is_no_edge_where_none_is_known():
    assert stability_edge(8, optimizer="adam") is None
    assert stability_edge(8, lag_kind="geometric") is None
    assert stability_edge(8, lag_kind="heavy", optimizer="momentum") is None
    # A random lag of mean 0 is the fixed lag 0.
    assert stability_edge(0, lag_kind="heavy") == stability_edge(0)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"lag": -1}, "lag=-1 "),
        ({"optimizer": "lion"}, "optimizer='lion' "),
        ({"momentum": 1.0}, "momentum=1.0 "),
        ({"lag_kind": "poisson"}, "lag_kind='poisson' "),
    ],
)
def test_a_wrong_argument_of_the_edge_is_named_with_its_value(arguments, says):
    with pytest.raises(ValueError) as raised:
        stability_edge(**({"lag": 8} | arguments))
    assert str(raised.value).startswith(says)
