"""KL divergence to a reference model, as a term of the loss. _B sequences, _T tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, get_args

import torch

from sidestep.losses.ratios import bounded_log_ratio, k1, k2, k3

KLEstimate = Literal["k1", "k2", "k3"]

KL_ESTIMATES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {"k1": k1, "k2": k2, "k3": k3}


def kl_penalty(
    logprobs_BT: torch.Tensor,
    reference_logprobs_BT: torch.Tensor,
    mask_BT: torch.Tensor,
    estimate: KLEstimate = "k3",
) -> torch.Tensor:
    """KL(pi_theta || pi_ref) per token, with gradient: add kl_coef times it to the loss per token.

    k2: on samples of pi_theta its gradient is that of the divergence. k3: the value is unbiased and
    never negative, its gradient is that of KL(pi_ref || pi_theta). k1: the value is unbiased, but
    the gradient is grad log pi_theta, whose mean is 0: as a loss it pulls nowhere, and
    `check_kl` says so.
    The log-ratio is bounded to +-20 before exp, then the value to 10: a gap of 100 gives a finite
    value and a gradient of 0. 0 where masked.
    Raises ValueError for an unknown estimate or if shapes differ.
    Source: Schulman, joschu.net/blog/kl-approx.html; k3 in GRPO, arXiv 2402.03300; k2 in
    REINFORCE++, arXiv 2501.03262.
    """
    if estimate not in KL_ESTIMATES:
        known = ", ".join(get_args(KLEstimate))
        raise ValueError(f"estimate is {estimate!r}: it must be one of {known}")
    return KL_ESTIMATES[estimate](bounded_log_ratio(logprobs_BT, reference_logprobs_BT, mask_BT))
