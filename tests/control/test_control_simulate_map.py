"""The map: the prototype's numbers, and the fast version against the plain one."""

import subprocess
import sys

import numpy as np
import pytest
import torch
from simulate_golden import GOLDEN
from simulate_reference import run as run_plainly

from sidestep.control.simulate import (
    ALL_CONTROLS,
    LAG_KINDS,
    OPTIMIZERS,
    CellSummary,
    Setting,
    SimulationResult,
    simulate,
    stability,
    stability_map,
    summarise,
)
from sidestep.control.simulate.lags import draw_lags
from sidestep.control.simulate.setting import Cell

LEARNING_RATE = {"sgd": 0.3, "momentum": 0.03, "adam": 0.02}
EVERYTHING = {"lags": [0, 1, 5], "lrs": [0.05, 0.4], "controls": ALL_CONTROLS, "steps": 60}


def test_the_default_map_is_the_prototypes_table():
    results = stability_map()
    assert [(r.lag, r.lr, r.control) for r in results] == [row[:3] for row in GOLDEN]
    for result, (*_, loss, cosine, skipped) in zip(results, GOLDEN, strict=True):
        assert (result.loss is None) == (loss is None), result
        if loss is not None:
            assert result.loss == pytest.approx(loss, rel=1e-9, abs=0.0), result
        assert result.cosine == pytest.approx(cosine, rel=0.0, abs=1e-9), result
        assert result.skipped == skipped, result


@pytest.mark.parametrize("lag_kind", LAG_KINDS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_step_is_the_plain_versions(optimizer, lag_kind):
    for control in ALL_CONTROLS:
        for lag, lr in ((0, 1.0), (6, 1.0), (6, 6.0)):
            rate = lr * LEARNING_RATE[optimizer]
            common = {"dim": 7, "noise": 0.2, "seed": 3, "optimizer": optimizer, "max_skips": 3}
            fast = simulate(
                lag, rate, control, steps=70, lag_kind=lag_kind, trajectory=True, **common
            )
            lag_T = draw_lags(lag_kind, lag, 70, 3)
            losses, cosines, skipped = run_plainly(lag_T, rate, control, **common)
            assert fast.losses == pytest.approx(losses, rel=1e-9), (control, lag, rate)
            assert fast.cosines == pytest.approx(cosines, rel=0, abs=1e-9), (control, lag, rate)
            assert fast.skipped == skipped
            assert (fast.loss is None) == (len(losses) < 70 or not losses[-1] <= 1e8)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_cell_gets_the_same_bits_alone_and_in_a_map(optimizer):
    options = {"optimizer": optimizer, "lag_kind": "geometric", "steps": 60}
    results = stability_map([0, 3, 9], [0.1, 3.0], seeds=[0, 5], **options)
    for r in results:
        assert simulate(r.lag, r.lr, r.control, seed=r.seed, **options) == r


def test_cells_that_do_not_fit_side_by_side_get_the_same_bits(monkeypatch):
    whole = stability_map(**EVERYTHING)
    monkeypatch.setattr(stability, "_MOST_CELLS", 5)
    assert stability_map(**EVERYTHING) == whole
    monkeypatch.setattr(stability, "_MOST_BYTES", 1)
    assert stability_map(**EVERYTHING) == whole


def test_no_more_cells_run_side_by_side_than_fit_into_memory():
    cells = [Cell(1000, 0.1, "none", seed) for seed in range(1000)]
    chunks = list(stability._chunks(cells, Setting(steps=100_000)))
    assert [cell for chunk in chunks for cell in chunk] == cells
    values = 1001 * 50 + 2 * 100_000  # history, losses and cosines of one cell
    assert max(map(len, chunks)) == stability._MOST_BYTES // (8 * values) < 256


def test_progress_rises_to_the_whole_also_when_cells_diverge():
    seen = []
    results = stability_map(
        [0, 20], [0.1, 1.9], steps=130, progress=lambda done, total: seen.append((done, total))
    )
    assert any(r.loss is None for r in results)
    done = [at for at, _ in seen]
    assert done == sorted(done) and done[-1] == len(results) * 130
    assert {total for _, total in seen} == {len(results) * 130}


@pytest.mark.parametrize("lag_kind", LAG_KINDS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("control", ["displacement", "half", "secant"])
def test_at_lag_0_what_works_on_the_displacement_is_no_control_bit_by_bit(
    control, optimizer, lag_kind
):
    options = {"optimizer": optimizer, "lag_kind": lag_kind, "steps": 80, "trajectory": True}
    for lr in (0.05, 0.5):
        bare, controlled = (simulate(0, lr, c, **options) for c in ("none", control))
        assert (controlled.losses, controlled.cosines) == (bare.losses, bare.cosines)


def test_a_skip_that_is_never_allowed_is_previous():
    for optimizer in OPTIMIZERS:
        options = {"optimizer": optimizer, "steps": 200, "trajectory": True}
        projected = simulate(4, 0.1, "previous", **options)
        never = simulate(4, 0.1, "skip", max_skips=0, **options)
        assert (never.losses, never.skipped) == (projected.losses, 0)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_skipped_step_leaves_the_weights_and_skips_in_a_row_are_bounded(optimizer):
    run = simulate(4, 1e-4, "skip", max_skips=3, steps=80, optimizer=optimizer, trajectory=True)
    # Nothing turns at this rate, so from the second gradient on every cosine is near 1: three
    # skips, then one step on what noise left of the gradient, over and over.
    losses = np.array(run.losses)
    stays = losses[1:] == losses[:-1]
    assert stays.tolist() == [(step % 4) != 3 for step in range(79)]
    assert run.skipped == int(stays.sum())


@pytest.mark.parametrize("optimizer", ["momentum", "adam"])
def test_optimizers_are_torchs(optimizer):
    theta = torch.nn.Parameter(torch.ones(6, dtype=torch.float64))
    curvature = torch.from_numpy(np.geomspace(1, 0.01, 6))
    reference = {
        "momentum": lambda: torch.optim.SGD([theta], lr=0.05, momentum=0.7),
        "adam": lambda: torch.optim.Adam([theta], lr=0.05),
    }[optimizer]()
    losses = []
    for _ in range(100):
        reference.zero_grad()
        (0.5 * (curvature * theta * theta).sum()).backward()
        reference.step()
        losses.append(float((0.5 * (curvature * theta * theta).sum()).detach()))
    run = simulate(
        0, 0.05, dim=6, noise=0.0, steps=100, optimizer=optimizer, momentum=0.7, trajectory=True
    )
    assert run.losses == pytest.approx(losses, rel=1e-9)


def test_momentum_zero_is_sgd_bit_by_bit():
    sgd = simulate(8, 0.1, "secant", steps=200, trajectory=True)
    assert (
        simulate(8, 0.1, "secant", steps=200, optimizer="momentum", momentum=0.0, trajectory=True)
        == sgd
    )


def test_the_secant_control_recovers_the_fresh_gradient_where_there_is_one_curvature():
    """One dimension, no noise: the secant is exact, so a rate far past the edge contracts as a
    synchronous run does, by 1 - lr a step.
    """
    run = simulate(8, 0.5, "secant", dim=1, noise=0.0, steps=60, trajectory=True)
    losses = np.array(run.losses)
    rate = np.sqrt(losses[21:30] / losses[20:29])
    assert simulate(8, 0.5, dim=1, noise=0.0, steps=2000).loss is None
    assert rate == pytest.approx(0.5, abs=1e-6)


def test_noise_is_the_only_thing_that_a_seed_changes_at_a_fixed_lag():
    a, b = (simulate(3, 0.1, noise=0.0, seed=seed, steps=50) for seed in (0, 1))
    assert (a.loss, a.cosine) == (b.loss, b.cosine)
    a, b = (simulate(3, 0.1, seed=seed, steps=50) for seed in (0, 1))
    assert a.loss != b.loss


def test_a_run_that_leaves_floating_point_in_one_step_has_diverged():
    result = simulate(0, 1e300, steps=50)
    assert (result.loss, result.cosine, result.skipped) == (None, None, 0)
    result = simulate(0, 1e6, steps=50, trajectory=True)
    assert result.loss is None and len(result.losses) < 5


def test_a_run_of_one_step_has_a_loss_and_no_cosine():
    result = simulate(4, 0.1, "secant", steps=1)
    assert result.loss is not None and result.cosine is None


def test_a_summary_is_the_mean_over_seeds_and_one_divergence_counts():
    def result(lr, seed, loss, cosine, skipped):
        return SimulationResult(8, lr, "skip", seed, loss, cosine, skipped)

    calm, wild = summarise(
        [
            result(0.2, 0, 1.0, 0.5, 4),
            result(0.4, 0, 1.0, 0.9, 0),
            result(0.2, 1, 4.0, None, 7),
            result(0.4, 1, None, 0.7, 2),
            result(0.4, 2, 2.0, 0.2, 1),
        ]
    )
    assert calm == CellSummary(8, 0.2, "skip", 2.5, 0.5, 5.5, num_diverged=0, num_seeds=2)
    assert wild == CellSummary(
        8, 0.4, "skip", None, pytest.approx(0.6), 1.0, num_diverged=1, num_seeds=3
    )


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"lag": -1}, "lag=-1 "),
        ({"lag": 1.5}, "lag=1.5 "),
        ({"lr": 0.0}, "lr=0.0 "),
        ({"lr": float("inf")}, "lr=inf "),
        ({"control": "project"}, "control='project' is unknown: one of none, previous"),
        ({"seed": -1}, "seed=-1 "),
        ({"steps": 0}, "steps=0 "),
        ({"dim": 0}, "dim=0 "),
        ({"noise": -0.1}, "noise=-0.1 "),
        ({"optimizer": "adamw"}, "optimizer='adamw' is unknown: one of sgd"),
        ({"momentum": 1.0}, "momentum=1.0 "),
        ({"lag_kind": "pareto"}, "lag_kind='pareto' is unknown: one of fixed"),
        ({"high": 1.0}, "high=1.0 "),
        ({"max_skips": -1}, "max_skips=-1 "),
        ({"memory": 1.0}, "memory=1.0 "),
    ],
)
def test_a_wrong_argument_is_named_with_its_value(arguments, says):
    with pytest.raises(ValueError) as raised:
        simulate(**({"lag": 8, "lr": 0.1} | arguments))
    assert str(raised.value).startswith(says)


@pytest.mark.parametrize(
    ("axes", "says"),
    [
        ({"lags": []}, "lags=[] is empty"),
        ({"lrs": [0.1, 0.1]}, "lrs=[0.1, 0.1] names a value twice"),
        ({"controls": ()}, "controls=() is empty"),
        ({"seeds": range(0)}, "seeds=range(0, 0) is empty"),
    ],
)
def test_an_empty_or_doubled_axis_is_refused(axes, says):
    with pytest.raises(ValueError) as raised:
        stability_map(**axes)
    assert str(raised.value).startswith(says)


def test_the_start_loss_is_the_loss_of_weights_of_one():
    assert Setting(dim=3).start_loss == pytest.approx(0.5 * (1 + 0.1 + 0.01))


def test_the_simulation_needs_no_torch():
    code = (
        "import sys\nfrom sidestep.control.simulate import simulate\nsimulate(2, 0.1, steps=5)\n"
        "print('torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "False\n"


@pytest.mark.parametrize("lag", [1, 8, 32])
def test_a_spring_holds_at_any_lag_what_is_below_twice_its_pull(lag):
    """The largest curvature is 1; without a spring lag 8 diverges from 0.19."""
    held = simulate(lag, 0.38, "spring", spring=0.2, noise=0.0)
    assert held.loss is not None
    assert held.loss < 0.05 * Setting().start_loss
    assert simulate(32, 0.5, "spring", spring=0.1, noise=0.0).loss is None


def test_a_spring_of_one_gain_makes_stale_descent_fresh():
    fresh = simulate(0, 0.4, dim=1, noise=0.0, steps=40, trajectory=True)
    stale = simulate(9, 0.4, "spring", spring=0.4, dim=1, noise=0.0, steps=40, trajectory=True)
    assert stale.losses == pytest.approx(fresh.losses, rel=1e-9)
