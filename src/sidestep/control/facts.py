"""What a host says about one optimizer step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

from sidestep.control.checks import plain_number, require_cosine, require_number
from sidestep.control.sharding import local

# Behaviour weights: by name, or a function that gives those of one name, so that a host need not
# hold them all at once.
Behaviour = Mapping[str, Tensor] | Callable[[str], Tensor]


@dataclass(frozen=True, slots=True)
class StepFacts:
    """Each None if the host did not say. Scalars of numpy and torch are taken as numbers.

    batch: which rollout batch the gradient is from.
    lag: mean lag of its tokens, in optimizer steps.
    drift: mean |ratio - 1| of its tokens.
    behaviour: weights of the policy that sampled it; for a batch of mixed versions the
        token-weighted mean of theirs. Laid out over ranks as the parameters are.
    expected: the cosine that fresh data would show (expected.py).

    Raises ValueError: batch no int or str (it is saved with the state); lag or drift below 0;
    expected no cosine; behaviour neither a mapping nor a function.
    """

    batch: int | str | None = None
    lag: float | None = None
    drift: float | None = None
    behaviour: Behaviour | None = None
    expected: float | None = None

    def __post_init__(self) -> None:
        for name in ("batch", "lag", "drift", "expected"):
            object.__setattr__(self, name, plain_number(getattr(self, name)))
        if self.batch is not None and not isinstance(self.batch, int | str):
            raise ValueError(f"batch={self.batch!r} must be an int or a str")
        for name, value in (("lag", self.lag), ("drift", self.drift)):
            if value is not None:
                require_number(name, value, at_least=0.0)
        if self.expected is not None:
            require_cosine("expected", self.expected)
        behaviour = self.behaviour
        if behaviour is not None and not isinstance(behaviour, Mapping) and not callable(behaviour):
            raise ValueError(
                f"behaviour: {type(behaviour).__name__} is neither a mapping from name to tensor "
                "nor a function of the name"
            )

    def behaviour_of(self, name: str, like: Tensor) -> Tensor:
        """The behaviour weights of one parameter whose local share is shaped as `like`.

        Raises ValueError if they are missing or shaped differently.
        """
        weights = self.behaviour
        if weights is None:
            raise ValueError("behaviour: no behaviour weights were given for this step")
        try:
            found = weights[name] if isinstance(weights, Mapping) else weights(name)
        except KeyError:
            raise ValueError(f"behaviour: it has no weights for parameter {name!r}") from None
        if not isinstance(found, Tensor):
            kind = type(found).__name__
            raise ValueError(f"behaviour: the weights for parameter {name!r} are a {kind}")
        found = local(found.detach())
        if found.shape != like.shape:
            raise ValueError(
                f"behaviour: the weights for parameter {name!r} have shape {tuple(found.shape)}, "
                f"not {tuple(like.shape)}"
            )
        return found


def require_max_norm(max_norm: float | None) -> float | None:
    """None or a number above 0, as a plain number."""
    max_norm = plain_number(max_norm)
    if max_norm is not None:
        require_number("max_norm", max_norm, above=0.0)
    return max_norm
