"""The control's defaults are written twice, for its two kinds of users."""

import inspect

from sidestep import GradientControl
from sidestep.config import ControlConfig


def test_the_config_has_exactly_the_arguments_and_defaults_of_gradient_control():
    parameters = inspect.signature(GradientControl).parameters
    assert ControlConfig().arguments() == {name: p.default for name, p in parameters.items()}
