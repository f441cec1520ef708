"""The `[loss]` section names exactly what `sidestep.losses` has."""

from typing import get_args

import pytest

from sidestep import losses
from sidestep.config import loss as config_loss
from sidestep.config.loading import load_config
from sidestep.config.loss import OPTIONS, LossConfig, option_key
from sidestep.config.rules import BEHAVIOUR_ANCHORS, BEHAVIOUR_POLICIES, GROUP_ADVANTAGES


@pytest.mark.parametrize(
    ("choices", "table"),
    [
        (config_loss.Policy, losses.POLICIES),
        (config_loss.Advantage, losses.ADVANTAGES),
        (config_loss.Anchor, losses.ANCHORS),
        (config_loss.Correction, losses.CORRECTIONS),
        (config_loss.KLEstimate, losses.KL_ESTIMATES),
    ],
)
def test_the_names_are_those_of_the_registry(choices, table):
    assert list(get_args(choices)) == list(table)


def test_the_aggregations_are_those_of_the_library():
    field = LossConfig.model_fields["aggregation"]
    assert get_args(field.annotation) == get_args(losses.Aggregation)


def test_the_settings_are_those_of_the_registry_and_each_has_a_key():
    entries = {**losses.POLICIES, **losses.CORRECTIONS}
    known = {
        name: tuple(option.name for option in losses.options_of(entry.options))
        for name, entry in entries.items()
    }
    assert {name: options for name, options in known.items() if options} == dict(OPTIONS)
    keys = {option_key(owner, option) for owner, options in OPTIONS.items() for option in options}
    assert keys == {
        name
        for name, field in LossConfig.model_fields.items()
        if field.default is None and name != "kl_estimate"
    }


def test_two_losses_share_a_key_for_their_clip_alone():
    owners = [option_key(owner, option) for owner, options in OPTIONS.items() for option in options]
    assert {key for key in owners if owners.count(key) > 1} == {"clip_low", "clip_high"}


def test_facts_of_the_rules_about_losses_are_those_of_the_registry():
    assert list(GROUP_ADVANTAGES) == [
        name for name, entry in losses.ADVANTAGES.items() if entry.min_group > 1
    ]
    assert list(BEHAVIOUR_POLICIES) == [
        name for name, entry in losses.POLICIES.items() if entry.ratio == "behaviour"
    ]
    # with these the ratio itself is to mu, at least in part
    assert set(BEHAVIOUR_ANCHORS) == {
        name for name, entry in losses.ANCHORS.items() if "rho" in entry.ratio
    }


def test_what_is_not_set_keeps_the_default_of_its_loss():
    config = load_config(None, ["loss.policy=gspo"]).loss
    assert losses.make_options(losses.POLICIES["gspo"].options, **config.options_of("gspo")) == (
        losses.POLICIES["gspo"].options()
    )
    config = load_config(None, ["loss.policy=bapo", "loss.bapo_low_stop=0.8"]).loss
    assert config.options_of("bapo") == {"low_stop": 0.8}


@pytest.mark.parametrize("method", losses.METHODS, ids=lambda method: method.name)
def test_the_recipe_lines_of_a_method_are_a_config(method, tmp_path):
    recipe = tmp_path / "recipe.toml"
    recipe.write_text("\n".join(method.recipe))
    assert (load_config(recipe) == load_config()) == (method.name == "PPO")  # the default
