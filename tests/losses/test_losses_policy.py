import losses_reference as reference
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sidestep.losses import clip_is_active, ppo_objective

bounded = settings(deadline=None, max_examples=60)  # no deadline: machines are shared

RATIOS = torch.tensor([[0.5, 0.9, 1.0, 1.1, 2.0]])


@pytest.mark.parametrize(
    ("advantage", "loss", "slope"),
    [
        (2.0, [-1.0, -1.8, -2.0, -2.2, -2.6], [-2.0, -2.0, -2.0, -2.0, 0.0]),
        (-2.0, [1.6, 1.8, 2.0, 2.2, 4.0], [0.0, 2.0, 2.0, 2.0, 2.0]),
        (0.0, [0.0] * 5, [0.0] * 5),
    ],
)
def test_ppo_by_hand_with_clip_from_0_8_to_1_3(advantage, loss, slope):
    ratio = RATIOS.clone().requires_grad_()
    value = ppo_objective(ratio, torch.full((1, 5), advantage), clip_low=0.2, clip_high=0.3)
    value.sum().backward()
    assert value.tolist() == [pytest.approx(loss, abs=1e-6)]
    assert ratio.grad.tolist() == [pytest.approx(slope, abs=1e-6)]


@bounded
@given(
    log_ratio=st.floats(-20.0, 20.0),
    advantage=st.floats(-100.0, 100.0),
    clip_low=st.floats(0.01, 0.99),
    clip_high=st.floats(0.01, 10.0),
)
def test_ppo_equals_plain_float64(log_ratio, advantage, clip_low, clip_high):
    ratio = torch.tensor([[log_ratio]], dtype=torch.float64).exp()
    advantages = torch.tensor([[advantage]], dtype=torch.float64)
    value = ppo_objective(ratio, advantages, clip_low, clip_high)
    expected = reference.ppo_term(log_ratio, advantage, clip_low, clip_high)
    assert value.item() == pytest.approx(expected, rel=1e-12, abs=1e-12)


@bounded
@given(
    ratio=st.floats(0.0, 1e6, width=32) | st.sampled_from([0.8, 1.28, 1.0]),
    advantage=st.floats(-10.0, 10.0, width=32, allow_subnormal=False),
)
def test_the_clip_is_active_exactly_where_the_gradient_is_cut(ratio, advantage):
    ratio_BT = torch.tensor([[ratio]], requires_grad=True)
    advantages_BT = torch.tensor([[advantage]])
    ppo_objective(ratio_BT, advantages_BT, 0.2, 0.28).sum().backward()
    cut = advantage != 0 and float(ratio_BT.grad) == 0
    assert bool(clip_is_active(ratio_BT.detach(), advantages_BT, 0.2, 0.28)) == cut


def test_gradient_equals_finite_differences_on_both_sides_of_both_clips():
    ratio = torch.tensor([[0.5, 0.85, 1.25, 2.0]], dtype=torch.float64, requires_grad=True)
    for sign in (1.0, -1.0):
        advantages = torch.full((1, 4), 1.7 * sign, dtype=torch.float64)
        assert torch.autograd.gradcheck(
            lambda r, a=advantages: ppo_objective(r, a, 0.2, 0.3), ratio
        )


@pytest.mark.parametrize("clip_low", [0.0, -0.1, 1.0, float("nan")])
def test_a_lower_clip_outside_0_to_1_is_named(clip_low):
    for function in (ppo_objective, clip_is_active):
        with pytest.raises(ValueError, match="clip_low is"):
            function(RATIOS, RATIOS, clip_low, 0.2)


@pytest.mark.parametrize("clip_high", [0.0, -0.1, float("nan")])
def test_an_upper_clip_that_is_not_above_0_is_named(clip_high):
    for function in (ppo_objective, clip_is_active):
        with pytest.raises(ValueError, match="clip_high is"):
            function(RATIOS, RATIOS, 0.2, clip_high)
