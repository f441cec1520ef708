"""The packaged recipes, and how a RECIPE argument finds its file."""

from pathlib import Path

import pytest

from sidestep.config import RunConfig
from sidestep.config.loading import load_config
from sidestep.config.recipes import find_recipe, recipes_dir
from sidestep.errors import UsageError

NAMES = [
    "math",
    "naive-async",
    "naive-async-controlled",
    "quickstart",
    "reasoning-mix",
    "smollm2-chain-sum",
    "sync",
]


def differing_keys(a: RunConfig, b: RunConfig) -> set[str]:
    a_values, b_values = a.model_dump(exclude={"seed"}), b.model_dump(exclude={"seed"})
    return {
        f"{section}.{key}"
        for section, values in a_values.items()
        for key, value in values.items()
        if value != b_values[section][key]
    }


def test_the_packaged_recipes_are_exactly_these():
    assert sorted(path.stem for path in recipes_dir().iterdir()) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_every_recipe_loads_by_its_bare_name_and_starts_with_what_it_is_for(name):
    path = find_recipe(name)
    assert path.read_text(encoding="utf-8").startswith("# ")
    assert load_config(path).train.steps > 1


def test_the_quickstart_is_bounded_lag_four_with_control():
    config = load_config(find_recipe("quickstart"))
    assert (config.rollout.lag_mode, config.rollout.max_lag) == ("bounded", 4)
    assert (config.control.mode, config.loss.anchor) == ("control", "behaviour")


def test_the_controlled_recipe_differs_from_the_naive_one_in_control_alone():
    naive = load_config(find_recipe("naive-async"))
    controlled = load_config(find_recipe("naive-async-controlled"))
    assert {key.split(".")[0] for key in differing_keys(naive, controlled)} == {"control"}
    assert naive.control.mode == "observe" and controlled.control.mode == "control"


def test_the_synchronous_recipe_differs_from_the_naive_one_in_lag_alone():
    sync, naive = load_config(find_recipe("sync")), load_config(find_recipe("naive-async"))
    assert differing_keys(sync, naive) == {"rollout.max_lag"}
    assert (sync.rollout.max_lag, naive.rollout.max_lag) == (0, 8)


def test_a_file_in_the_way_wins_over_a_packaged_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert find_recipe("sync").parent == recipes_dir()
    Path("sync").mkdir()
    assert find_recipe("sync").parent == recipes_dir()
    Path("sync").rmdir()
    Path("sync").write_text("seed = 1\n")
    assert find_recipe("sync") == Path("sync")


def test_a_missing_recipe_is_refused_with_the_nearest_names(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("mine").mkdir()
    Path("mine/long-run.toml").write_text("")
    packaged = (
        "packaged recipes: math, naive-async-controlled, naive-async, quickstart, reasoning-mix, "
        "smollm2-chain-sum, sync"
    )
    cases = {
        "snyc": f"snyc: no such recipe file (did you mean 'sync'? {packaged})",
        "mine/longrun.toml": "mine/longrun.toml: no such recipe file "
        f"(did you mean 'mine/long-run.toml'? {packaged})",
        "zzz/1": f"zzz/1: no such recipe file ({packaged})",
        "mine": "mine: is a folder: name a recipe file, such as mine/my.toml",
    }
    for name, message in cases.items():
        with pytest.raises(UsageError) as caught:
            find_recipe(name)
        assert str(caught.value) == message
