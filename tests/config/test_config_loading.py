"""Recipes and overrides to a config: what wins, and what every refusal says."""

from pathlib import Path

import pytest

from sidestep.config import RunConfig
from sidestep.config.loading import line_of, load_config
from sidestep.errors import UsageError

RECIPE = """\
# a comment
seed = 3

[rollout]
max_lag = 8            # another
lag_mode = "exact"

[train]
steps = 30
betas = [
    0.8,
    0.99,
]
"""


@pytest.fixture
def recipe(tmp_path, monkeypatch):
    """Writes `recipe.toml` into the current folder, so that messages name it so."""
    monkeypatch.chdir(tmp_path)

    def write(text: str) -> Path:
        Path("recipe.toml").write_text(text, encoding="utf-8")
        return Path("recipe.toml")

    return write


def refusal(recipe: Path | None, *overrides: str) -> str:
    with pytest.raises(UsageError) as caught:
        load_config(recipe, overrides)
    return str(caught.value)


def test_without_a_recipe_a_config_is_the_defaults():
    assert load_config() == RunConfig()


def test_a_recipe_changes_exactly_the_keys_it_names(recipe):
    expected = RunConfig().model_dump()
    expected["seed"] = 3
    expected["rollout"] |= {"max_lag": 8, "lag_mode": "exact"}
    expected["train"] |= {"steps": 30, "betas": (0.8, 0.99)}
    assert load_config(recipe(RECIPE)).model_dump() == expected


def test_overrides_win_over_the_recipe_and_later_ones_over_earlier_ones(recipe):
    config = load_config(recipe(RECIPE), ["train.steps=5", "seed=9", "train.steps=6"])
    assert (config.seed, config.train.steps, config.rollout.max_lag) == (9, 6, 8)


@pytest.mark.parametrize(
    ("override", "section", "key", "value"),
    [
        ("loss.anchor=recomputed", "loss", "anchor", "recomputed"),
        ('loss.anchor="recomputed"', "loss", "anchor", "recomputed"),
        (" train.learning_rate = 1e-3 ", "train", "learning_rate", 1e-3),
        ("train.betas=[0.5, 0.6]", "train", "betas", (0.5, 0.6)),
        ("control.low=0", "control", "low", 0.0),
        ("control.strength=secant", "control", "strength", "secant"),
        ("rollout.drop_equal_rewards=true", "rollout", "drop_equal_rewards", True),
        ("model.path=org/a=b #c", "model", "path", "org/a=b #c"),
        ("model.path=2024", "model", "path", "2024"),
        ("model.path=1\nx = 2", "model", "path", "1\nx = 2"),
    ],
)
def test_an_override_is_toml_or_else_text(override, section, key, value):
    config = load_config(None, [override]).model_dump()
    assert config[section][key] == value
    assert type(config[section][key]) is type(value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "seed = 1\n\n[buffer]\nmax_lags = 4\n",
            "recipe.toml:4: unknown config key 'buffer.max_lags' (did you mean 'rollout.max_lag'?)",
        ),
        (
            "[train]\nmax_lag = 4\n",
            "recipe.toml:2: unknown config key 'train.max_lag' (did you mean 'rollout.max_lag'?)",
        ),
        (
            "\nmax_lag = 4\n",
            "recipe.toml:2: unknown config key 'max_lag' (did you mean 'rollout.max_lag'?)",
        ),
        (
            "[trian]\n",
            "recipe.toml:1: unknown config section [trian] (did you mean [train]?)",
        ),
        (
            "[rollout]\nq = 1\n",
            "recipe.toml:2: unknown config key 'rollout.q' (keys of [rollout]: lag_mode, max_lag, "
            "group_size, groups_per_step, drop_equal_rewards, mask_truncated, timeout_s)",
        ),
        (
            "[zz]\n",
            "recipe.toml:1: unknown config section [zz] (sections: model, task, engine, rollout, "
            "train, eval, loss, control, alarm, log)",
        ),
        (
            "# one\nrollout = 3\n",
            "recipe.toml:2: 'rollout' is a section, not a key: set one of its keys, such as "
            "rollout.lag_mode",
        ),
        (
            "[rollout]\nmax_lag = -1\n",
            "recipe.toml:2: rollout.max_lag = -1: must be an integer of at least 0",
        ),
        (
            "rollout = { group_size = 4, max_lag = true }\n",
            "recipe.toml:1: rollout.max_lag = true: must be an integer of at least 0",
        ),
        (
            "rollout.max_lag = 2.0\n",
            "recipe.toml:1: rollout.max_lag = 2.0: must be an integer of at least 0",
        ),
        (
            '[train]\nsteps = "20"\n',
            'recipe.toml:2: train.steps = "20": must be an integer of at least 1',
        ),
        (
            "[train]\nlearning_rate = inf\n",
            "recipe.toml:2: train.learning_rate = inf: must be a number above 0",
        ),
        (
            "[train]\nmax_norm = 0\n",
            "recipe.toml:2: train.max_norm = 0: must be a number above 0",
        ),
        (
            "[train]\nbetas = [0.9, 1.0]\n",
            "recipe.toml:2: train.betas = [0.9, 1.0]: must be a list of 2, each a number of at "
            "least 0 and below 1",
        ),
        (
            '[rollout]\nlag_mode = "eaxct"\n',
            'recipe.toml:2: rollout.lag_mode = "eaxct": must be "bounded" or "exact"',
        ),
        (
            '[control]\nmode = "on"\n',
            'recipe.toml:2: control.mode = "on": must be "control", "observe" or "off"',
        ),
        (
            '[control]\nstrength = "full"\n',
            'recipe.toml:2: control.strength = "full": must be a number above 0 and at most 1 or '
            '"secant", "drift" or "spring"',
        ),
        (
            "[control]\nlow = -2\n",
            "recipe.toml:2: control.low = -2: must be a number of at least -1 and at most 1 or "
            '"calibrate"',
        ),
        (
            '[loss]\ncorrection = "tsi"\n',
            'recipe.toml:2: loss.correction = "tsi": must be "none", "importance", "tis", '
            '"icepop", "sequence_mis", "geometric" or "opsm" or a list of them',
        ),
        (
            "[loss]\ntis_cpa = 2\n",
            "recipe.toml:2: unknown config key 'loss.tis_cpa' (did you mean 'loss.tis_cap'?)",
        ),
        (
            "[rollout]\ndrop_equal_rewards = 1\n",
            "recipe.toml:2: rollout.drop_equal_rewards = 1: must be true or false",
        ),
        (
            "[model]\npath = 7\n",
            "recipe.toml:2: model.path = 7: must be text in quotes",
        ),
        (
            "[engine]\ntop_p = 1.5\n",
            "recipe.toml:2: engine.top_p = 1.5: must be a number above 0 and at most 1",
        ),
        (
            "seed = 1\n[train]\nsteps 30\n",
            "recipe.toml:3: not valid TOML: Expected '=' after a key in a key/value pair "
            "at column 7",
        ),
        (
            "[loss]\nanchor = recomputed\n",
            "recipe.toml:2: not valid TOML: Invalid value at column 10 (text needs quotes)",
        ),
        (
            '[loss]\nanchor = """recomputed\n',
            "recipe.toml:2: not valid TOML: Unterminated string (at end of document)",
        ),
    ],
)
def test_a_bad_recipe_is_refused_with_its_line_and_the_fix(recipe, text, message):
    assert refusal(recipe(text)) == message


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "buffer.max_lags=3",
            "--set: unknown config key 'buffer.max_lags' (did you mean 'rollout.max_lag'?)",
        ),
        ("rollout.max_lag=-1", "--set: rollout.max_lag = -1: must be an integer of at least 0"),
        ("train.steps", "--set train.steps: expected key=value, such as train.steps=20"),
        (
            "train=5",
            "--set: 'train' is a section, not a key: set one of its keys, such as train.steps",
        ),
        (
            "seed.x=5",
            "--set: unknown config key 'seed.x' (sections: model, task, engine, rollout, train, "
            "eval, loss, control, alarm, log)",
        ),
    ],
)
def test_a_bad_override_is_refused_by_name(override, message):
    assert refusal(None, override) == message


def test_a_bad_override_is_not_blamed_on_the_recipe_that_sets_the_same_key(recipe):
    assert refusal(recipe(RECIPE), "train.steps=0").startswith("--set: train.steps = 0")


def test_of_two_keys_that_clash_the_one_on_the_command_line_is_blamed(recipe):
    path = recipe("[train]\nwarmup_steps = 10\n")
    assert refusal(path, "train.steps=2").startswith("--set: train.warmup_steps = 10 leaves")
    assert refusal(recipe("[train]\nsteps = 5\nwarmup_steps = 10\n")).startswith("recipe.toml:3: ")


def test_a_file_that_cannot_be_read_as_text_is_named(recipe, tmp_path):
    path = recipe("")
    path.write_bytes(b"seed = 1 # \xff")
    assert refusal(path) == "recipe.toml: not UTF-8 text (byte 11): save it so"
    assert refusal(Path("gone.toml")) == "gone.toml: cannot be read: No such file or directory"


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("rollout.max_lag = 1\n", 1),
        ("\n\n[rollout]\n# max_lag = 0\n'max_lag' = 1\n", 5),
        ("[model]\npath = '''\n[rollout]\nmax_lag = 1\n'''\n[rollout]\nmax_lag = 2\n", 7),
        ("[train]\nbetas = [\n  0.1,\n  0.2,\n]\n[rollout]\nmax_lag = 2\n", 7),
        ("rollout = { lag_mode = 'exact', max_lag = 1 }\n", 1),
        ("# x\r\n[rollout]\r\nmax_lag = 1\r\n", 3),
    ],
)
def test_the_line_of_a_key_is_found_however_the_key_is_written(text, line):
    assert line_of(text, "rollout", "max_lag") == line


def test_the_line_of_a_value_over_several_lines_is_its_first():
    assert line_of(RECIPE, "train", "betas") == 10


def test_an_empty_override_gives_a_key_its_default_back(recipe):
    path = recipe("seed = 4\n[train]\nmax_norm = 1.0\nsteps = 30\n")
    config = load_config(path, ["train.max_norm=", "seed=", "rollout.max_lag="])
    expected = RunConfig().model_copy(
        update={"train": RunConfig().train.model_copy(update={"steps": 30})}
    )
    assert config == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('"train.steps" = 5', '"train.steps" in quotes is one word: write train.steps without'),
        ('seed = 1\n[train]\n"rollout.max_lag" = 5', "unknown config key 'train.rollout.max_lag'"),
        ('[train]\n"steps " = 5', "unknown config key 'train.steps '"),
        ("seed = " + "9" * 5000, "not TOML that can be read"),
        ("seed = " + "[" * 5000 + "]" * 5000, "not TOML that can be read"),
    ],
)
def test_very_odd_toml_is_refused_in_one_line(recipe, text, message):
    refused = refusal(recipe(text))
    assert message in refused and len(refused.splitlines()) == 1
    assert refused.startswith("recipe.toml")
