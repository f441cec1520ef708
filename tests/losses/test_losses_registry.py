"""Every name that a recipe can use has a function, a source, a golden test and a recipe line."""

import dataclasses
import re
import tomllib
from typing import get_args

import pytest
from test_losses_golden import ADVANTAGE_GOLDEN, CORRECTION_GOLDEN, POLICY_GOLDEN

from sidestep.losses import (
    ADVANTAGES,
    ANCHORS,
    CORRECTIONS,
    METHODS,
    POLICIES,
    Aggregation,
    Anchor,
    check_combination,
    make_options,
    options_of,
)

TABLES = {
    "loss.policy": POLICIES,
    "loss.correction": CORRECTIONS,
    "loss.advantage": ADVANTAGES,
    "loss.anchor": ANCHORS,
    "loss.aggregation": dict.fromkeys(get_args(Aggregation)),
}
OTHER_KEYS = {
    "loss.clip_low",
    "loss.clip_high",
    "rollout.drop_equal_rewards",
    "train.ess_learning_rate",
}
WITH_OPTIONS = [*POLICIES.values(), *CORRECTIONS.values()]


def settings_of(method):
    """Dotted key -> value of a method's recipe, read as TOML."""
    sections = tomllib.loads("\n".join(method.recipe))
    return {
        f"{section}.{key}": value
        for section, keys in sections.items()
        for key, value in keys.items()
    }


def test_every_name_has_a_golden_test():
    assert set(POLICY_GOLDEN) == set(POLICIES)
    assert set(CORRECTION_GOLDEN) == set(CORRECTIONS)
    assert set(ADVANTAGE_GOLDEN) == set(ADVANTAGES)
    assert set(ANCHORS) == set(get_args(Anchor))


@pytest.mark.parametrize("table", [POLICIES, CORRECTIONS, ADVANTAGES, ANCHORS])
def test_every_name_is_its_entry_s_own_and_has_a_source_and_an_equation(table):
    for name, entry in table.items():
        assert entry.name == name
        assert name == "none" or entry.source
        assert getattr(entry, "equation", "r")


@pytest.mark.parametrize("entry", WITH_OPTIONS, ids=lambda entry: entry.name)
def test_every_option_says_what_it_means_and_where_its_default_is_from(entry):
    for option in options_of(entry.options):
        assert option.meaning and option.source
        assert getattr(make_options(entry.options), option.name) == option.default


@pytest.mark.parametrize("entry", WITH_OPTIONS, ids=lambda entry: entry.name)
def test_unknown_options_and_impossible_values_are_named(entry):
    with pytest.raises(ValueError, match=r"tua is 1\.0"):
        make_options(entry.options, tua=1.0)
    for option in options_of(entry.options):
        with pytest.raises(ValueError, match=option.name):
            make_options(entry.options, **{option.name: float("nan")})
    assert make_options(entry.options, **{o.name: None for o in options_of(entry.options)}) == (
        entry.options()
    )
    with pytest.raises((dataclasses.FrozenInstanceError, AttributeError, TypeError)):
        entry.options().anything = 1.0


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
def test_the_recipe_of_every_method_is_toml_with_names_that_exist_and_fails_in_no_known_way(method):
    assert method.source
    settings = settings_of(method)
    for key, value in settings.items():
        for name in value if isinstance(value, list) else [value]:
            assert key in OTHER_KEYS or name in TABLES[key]
    findings = check_combination(
        settings.get("loss.policy", "ppo"),
        settings.get("loss.anchor", "behaviour"),
        settings.get("loss.correction", "none"),
        steps_per_batch=4,
        max_lag=0,
    )
    assert findings == []


def test_every_name_is_in_the_recipe_of_some_method():
    used = {
        (key, name)
        for method in METHODS
        for key, value in settings_of(method).items()
        if key in TABLES
        for name in (value if isinstance(value, list) else [value])
    }
    defaults = {("loss.correction", "none"), ("loss.anchor", "recomputed")}
    assert used | defaults == {(key, name) for key, table in TABLES.items() for name in table}


def test_names_are_plain_words():
    for table in (POLICIES, CORRECTIONS, ADVANTAGES, ANCHORS):
        assert all(re.fullmatch(r"[a-z][a-z0-9_]*", name) for name in table)
