"""One cell of the simulation as plainly as it can be written: a loop over steps, lists of vectors.
What the fast version is tested against.
"""

import numpy as np


def run(
    lag_T,
    lr,
    control,
    *,
    dim=50,
    noise=0.1,
    seed=0,
    optimizer="sgd",
    momentum=0.9,
    high=0.3,
    max_skips=8,
    memory=0.98,
    spring=0.2,
):
    """Loss after every step and cosine from the second step on; ends where the fast version does.

    lag_T: the lag of every step.
    """
    rng = np.random.default_rng(seed)
    curvature = np.geomspace(1, 0.01, dim)
    thetas = [np.ones(dim)]
    gradients, behaviours, losses, cosines, skipped = [], [], [], [], []
    velocity, first, second, num_updates = np.zeros(dim), np.zeros(dim), np.zeros(dim), 0
    along = square = 0.0
    for step, lag in enumerate(lag_T):
        theta = thetas[-1]
        b = thetas[max(step - lag, 0)]
        g = curvature * b + noise * rng.standard_normal(dim) / np.sqrt(dim)
        d = theta - b
        applied, skip = g, False
        if step > 0:
            p = gradients[-1]
            cosine = g @ p / (np.linalg.norm(g) * np.linalg.norm(p) + 1e-12)
            cosines.append(cosine)
            went = b - behaviours[-1]
            along = memory * along + (1 - memory) * (g - p) @ went
            square = memory * square + (1 - memory) * went @ went
            if control in ("previous", "skip") and cosine > 0:
                applied = g - (g @ p) / (p @ p) * p
                in_a_row = skipped[::-1].index(False) if False in skipped else len(skipped)
                skip = control == "skip" and cosine > high and in_a_row < max_skips
        if d @ d > 0:
            share = g @ d / (d @ d)
            h = max(along / square, 0.0) if square > 1e-18 else 0.0
            spent = {"displacement": -share, "half": -0.5 * share}.get(control, 0.0)
            spent = max(spent, 0.0)
            if control == "secant":
                spent = min(h, -share) if share < 0 else h
            applied = applied + spent * d
        gradients.append(g)
        behaviours.append(b)
        skipped.append(skip)
        if not skip:
            num_updates += 1
            if optimizer == "sgd":
                direction = applied
            elif optimizer == "momentum":
                velocity = direction = momentum * velocity + applied
            else:
                first = 0.9 * first + 0.1 * applied
                second = 0.999 * second + 0.001 * applied**2
                direction = (first / (1 - 0.9**num_updates)) / (
                    np.sqrt(second / (1 - 0.999**num_updates)) + 1e-8
                )
            theta = theta - lr * direction - {"spring": spring}.get(control, 0.0) * d
        thetas.append(theta)
        losses.append(float(0.5 * (curvature * theta * theta).sum()))
        if not losses[-1] <= 1e8:
            break
    return losses, cosines, sum(skipped)
