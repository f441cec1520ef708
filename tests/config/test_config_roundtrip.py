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
        return st.lists(items, min_size=schema["minItems"], unique=True).map(tuple)
    if schema["type"] == "integer":
        return st.integers(schema.get("minimum", -(2**40)), schema.get("exclusiveMaximum", 2**40))
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
    if task["kind"] == "arithmetic":
        task["path"] = task["eval_path"] = None
    else:
        task["path"] = draw(st.text())
    task["function"] = draw(st.text()) if task["kind"] == "function" else None
    if task["kind"] != "jsonl":
        task["answer_regex"] = None
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
