"""No finite input gives a loss or gradient that is not finite, whatever is combined."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from losses_support import CONSTANT

from sidestep.losses import (
    ANCHORS,
    CORRECTIONS,
    POLICIES,
    PolicyInputs,
    aggregate,
    anchor_logprobs,
    combine,
    count_denominators,
    make_options,
    off_policy_sums,
)

bounded = settings(deadline=None, max_examples=400)  # no deadline: machines are shared


@bounded
@given(data=st.data())
def test_no_finite_input_gives_a_loss_gradient_or_weight_that_is_not_finite(data):
    rows, columns = data.draw(st.integers(0, 3)), data.draw(st.integers(0, 4))

    def table(values):
        row = st.lists(values, min_size=columns, max_size=columns)
        drawn = data.draw(st.lists(row, min_size=rows, max_size=rows))
        return torch.tensor(drawn).view(rows, columns)

    # Log-ratios in +-200; log-probabilities above 0 are nonsense that must be survived too.
    logprobs = table(st.floats(-200.0, 0.0, width=32)).requires_grad_()
    behaviour = logprobs.detach() - table(st.floats(-200.0, 200.0, width=32))
    proximal = logprobs.detach() - table(st.floats(-200.0, 200.0, width=32))
    advantages = table(st.floats(-1e6, 1e6, width=32))
    mask = table(st.booleans())
    lag = table(st.integers(0, 40)).long()
    anchor = anchor_logprobs(
        data.draw(st.sampled_from(sorted(ANCHORS))),
        logprobs,
        behaviour,
        proximal_logprobs_BT=proximal,
        lag_BT=lag,
    )
    inputs = PolicyInputs(logprobs, anchor, behaviour, advantages, mask)
    entry = POLICIES[data.draw(st.sampled_from(sorted(POLICIES)))]
    options = make_options(entry.options)
    statistics = entry.statistics([inputs], options) if entry.statistics else None
    term = entry.term(inputs, options, statistics)
    names = data.draw(st.lists(st.sampled_from(sorted(CORRECTIONS)), min_size=1, unique=True))
    correction = combine(
        [CORRECTIONS[n].apply(inputs, make_options(CORRECTIONS[n].options)) for n in names]
    )
    aggregation = data.draw(st.sampled_from(["token", "sequence", "constant"]))
    loss = aggregate(
        aggregation, correction.weight_BT * term.loss_BT, mask, count_denominators(mask), CONSTANT
    )
    loss.backward()
    assert loss.isfinite()
    assert logprobs.grad.isfinite().all()
    assert (logprobs.grad[~mask.bool()] == 0).all()
    assert correction.weight_BT.isfinite().all() and (correction.weight_BT >= 0).all()
    total = off_policy_sums(inputs, term, correction, lag).total
    assert total.ratios.num_tokens == int(mask.sum())
