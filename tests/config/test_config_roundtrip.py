"""`to_toml` and `load_config` are inverses, for every config there can be."""

import tempfile
import tomllib
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from sidestep.config import RunConfig
from sidestep.config.keys import KEYS, SECTIONS
from sidestep.config.loading import load_config
from sidestep.config.loss import OPTIONS, option_key
from sidestep.config.task_rules import MAPPED_COLUMNS, READ_BY
from sidestep.config.writing import to_toml


def values_of(schema):
    """Values that a key's JSON schema allows. Bounds are drawn as the schema gives them."""
    if "anyOf" in schema:
        return st.one_of([values_of(part) for part in schema["anyOf"]])
    if "const" in schema:
        return st.just(schema["const"])
    if "enum" in schema:
        return st.sampled_from(schema["enum"])
    if "prefixItems" in schema:
        return st.tuples(*(values_of(item) for item in schema["prefixItems"]))
    if "items" in schema:
        items = values_of(schema["items"])
        several = st.lists(items, min_size=schema.get("minItems", 0), max_size=4, unique=True)
        # lists in the config that the schema takes as tuples
        return several.map(tuple) if "enum" in schema["items"] else several
    if schema["type"] == "object":
        values = schema["additionalProperties"]
        value = st.booleans() | st.text() if values is True else values_of(values)
        return st.dictionaries(st.text(), value, max_size=3)
    if schema["type"] == "integer":
        below = schema.get("exclusiveMaximum", 2**40)
        return st.integers(schema.get("minimum", -(2**40)), schema.get("maximum", below - 1))
    if schema["type"] == "number":
        return st.floats(
            min_value=schema.get("minimum", schema.get("exclusiveMinimum")),
            max_value=schema.get("maximum", schema.get("exclusiveMaximum")),
            exclude_min="exclusiveMinimum" in schema,
            exclude_max="exclusiveMaximum" in schema,
            allow_nan=False,
            allow_infinity=False,
        )
    if "pattern" in schema:  # an alphabet, for `$` also matches before a line's end
        alphabet = "".join(map(chr, range(33, 127)))
        return st.from_regex(schema["pattern"], fullmatch=True, alphabet=alphabet)
    return {"null": st.none(), "boolean": st.booleans(), "string": st.text()}[schema["type"]]


def bend_control(control):
    if isinstance(control["low"], float) and isinstance(control["high"], float):
        control["low"], control["high"] = sorted((control["low"], control["high"]))
    if control["residual"] is not None:
        control["strength"] = 1.0
        if isinstance(control["low"], float):
            below_low = control["low"] >= control["residual"]
            control["residual"] = control["residual"] if below_low else None


def bend_task(task, draw):
    """Only the keys that the kind reads; one reward for each metric."""
    for key, kinds in READ_BY.items():
        if task["kind"] not in kinds:
            task[key] = None
    if task["kind"] in READ_BY["path"]:
        task["path"] = draw(st.text())
    if task["eval_path"] is not None:
        task["eval_split"] = None
    if task["kind"] == "reasoning_gym":
        task["dataset"], task["mix"] = draw(
            st.sampled_from([("chain_sum", None), (None, {"a": 2.0})])
        )
    if task["columns"] is not None:
        names = st.sampled_from(MAPPED_COLUMNS)
        task["columns"] = draw(st.dictionaries(names, st.text(), max_size=3))
    task["function"] = "m:f" if task["kind"] == "function" else None
    task["rewards"] = task["reward_weights"] = None
    if draw(st.booleans()):
        task["function"] = None
        task["rewards"] = draw(st.sampled_from([["m:f"], ["exact", "m:f", "math"]]))
        task["reward_weights"] = draw(st.none() | st.just([0.5] * len(task["rewards"])))


def bend_options(loss):
    """Settings of losses that are not chosen are not allowed."""
    chosen = [loss["policy"]]
    chosen += [loss["correction"]] if isinstance(loss["correction"], str) else loss["correction"]
    used = {option_key(name, option) for name in chosen for option in OPTIONS.get(name, ())}
    for owner, options in OPTIONS.items():
        for key in (option_key(owner, option) for option in options):
            loss[key] = loss[key] if key in used else None


@st.composite
def configs(draw):
    """Any value for any key, then bent as far as the rules across keys ask."""
    values = {
        section: {
            key: draw(values_of(schema))
            for key, schema in model.model_json_schema()["properties"].items()
        }
        for section, model in SECTIONS.items()
    }
    task, engine, rollout = values["task"], values["engine"], values["rollout"]
    train, loss, control = values["train"], values["loss"], values["control"]
    bend_task(task, draw)
    values["eval"]["samples"] += max(values["eval"]["pass_at"])
    rollout["group_size"] += 1
    rollout["drop_equal_rewards"] &= rollout["lag_mode"] == "bounded"
    if rollout["lag_mode"] == "exact":
        engine["drop_finished"] = None
    engine["top_p"], engine["top_k"] = draw(st.sampled_from([(1.0, 0), (0.5, 3)]))
    if engine["top_p"] < 1.0:
        loss["policy"], loss["anchor"], loss["correction"] = "ppo", "recomputed", "none"
    bend_options(loss)
    if loss["kl_coef"] == 0.0:
        loss["kl_estimate"] = values["model"]["reference_path"] = None
    elif loss["kl_place"] == "reward":
        loss["kl_estimate"] = None
    engine["max_new_tokens"] += task["overlong_tokens"]
    rollout["groups_per_step"] += train["steps_per_batch"]
    if engine["batch_groups"] is not None:
        rollout["groups_per_step"] *= engine["batch_groups"]
    train["warmup_steps"] %= train["steps"]
    bend_control(control)
    return RunConfig.model_validate({"seed": draw(st.integers(0, 2**63 - 1)), **values})


@given(configs())
@settings(max_examples=200, deadline=None)
def test_a_written_config_reads_back_equal(config):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.toml"
        path.write_text(to_toml(config), encoding="utf-8", newline="")
        assert load_config(path) == config


def test_a_written_config_holds_every_key_or_says_that_it_is_not_set():
    text = to_toml(RunConfig())
    written = tomllib.loads(text)
    for key in KEYS:
        section, _, name = key.rpartition(".")
        present = name in (written[section] if section else written)
        assert present != (f"# {key}: not set" in text.splitlines())


def test_how_a_config_is_written_is_pinned():
    lines = to_toml(load_config(None, ['model.path="a\\"\\u007fé"'])).splitlines()
    assert lines[:4] == ["seed = 0", "", "[model]", 'path = "a\\"\\u007fé"']
    assert "learning_rate = 0.0005" in lines
    assert "adam_eps = 1e-08" in lines
    assert "betas = [0.9, 0.999]" in lines
    assert "drop_equal_rewards = false" in lines
    assert "# train.max_norm: not set" in lines
