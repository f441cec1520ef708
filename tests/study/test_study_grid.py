"""From a declaration to cells and configs, and what is refused before anything runs."""

import pytest
from study_support import make_study

from sidestep.errors import UsageError
from sidestep.study.declaration import load_study
from sidestep.study.grid import Cell, check_configs, configure, make_cells, needs

RIVALS = {
    "none": {},
    "ours": {},
    "slow": {"divide_by_lag": True},
    "blind": {"match": "skip_share", "of": "ours"},
    "short": {"match": "update_length", "of": "ours"},
    "fresh": {"match": "lag", "of": "ours"},
}


def cell(method, lag=8, rate=0.1, seed=1):
    return Cell("arithmetic", method, lag, rate, seed)


def test_the_grid_is_every_combination_once():
    cells = make_cells(make_study(pilot_seeds=[0]))
    assert len(cells) == len(set(cells)) == 3 * 2 * 2 * 2  # seeds, lags, rates, methods
    assert len({one.id for one in cells}) == len(cells)


def test_a_method_can_be_held_to_a_part_of_the_grid():
    study = make_study(
        methods={"none": {}, "ours": {"lags": [8], "learning_rates": [0.2], "seeds": [2]}}
    )
    assert [c for c in make_cells(study) if c.method == "ours"] == [cell("ours", 8, 0.2, 2)]


def test_pilots_come_first_and_the_synchronous_runs_before_the_others():
    cells = make_cells(make_study(pilot_seeds=[7]))
    assert [one.seed for one in cells[:8]] == [7] * 8
    assert {(one.method, one.lag) for one in cells[:2]} == {("none", 0)}


def test_layers_of_config_lie_over_each_other_key_by_key():
    study = make_study(
        config={"train": {"steps": 9, "max_norm": 1.0}, "rollout": {"group_size": 3}},
        tasks={"small": {"config": {"rollout": {"groups_per_step": 2}}}},
        methods={"none": {"config": {"train": {"max_norm": 0.5}}}},
    )
    config = configure(Cell("small", "none", 8, 0.1, 4), study, {})
    assert (config.train.steps, config.train.max_norm, config.seed) == (9, 0.5, 4)
    assert (config.rollout.group_size, config.rollout.groups_per_step) == (3, 2)
    assert (config.rollout.lag_mode, config.rollout.max_lag) == ("exact", 8)
    assert (config.train.learning_rate, config.log.sink_names) == (0.1, ())


def test_the_rivals_take_over_what_the_method_did():
    study = make_study(methods=RIVALS)
    rows = {
        cell("ours"): {"update_length": 2.0, "skip_share": 0.25, "lag_mean": 5.6},
        cell("none"): {"update_length": 8.0, "skip_share": 0.0, "lag_mean": 8.0},
    }
    configs = {name: configure(cell(name), study, rows) for name in RIVALS}
    assert configs["slow"].train.learning_rate == 0.1 / 9
    assert configs["blind"].train.skip_share == 0.25
    assert configs["short"].train.learning_rate == pytest.approx(0.1 * 2 / 8)
    assert configs["fresh"].rollout.max_lag == 6
    assert configs["none"].train.skip_share == 0.0
    assert set(needs(cell("short"), study)) == {cell("ours"), cell("none")}


def test_a_rival_of_a_method_that_never_moved_is_refused_by_name():
    study = make_study(methods=RIVALS)
    rows = {one: {"update_length": 0.0} for one in (cell("ours"), cell("none"))}
    with pytest.raises(UsageError, match=r"short/lag8-lr0\.1-seed1: 'ours' or 'none' made no step"):
        configure(cell("short"), study, rows)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "Field required"),
        ("name = ", "not valid TOML"),
        ("sedes = [1]", "unknown key (docs/study.md has those there are): sedes"),
        ("[methods.none]\nmatch = 'lag'", "match and of belong together"),
        ("[methods.x]\nmatch = 'lag'\nof = 'y'", "methods.x.of = 'y' is none of the methods"),
        ("[methods.x]\nmatch = 'skips'\nof = 'none'", "methods.x.match: Input should be"),
        ("[methods.x]\nlags = [3]", "methods.x.lags: 3 is not in the study's lags"),
        ("[methods.none]\nlags = [8]", "lags of baseline 'none' lack 0"),
        ("baseline = 'off'", "baseline = 'off' is none of the methods"),
        ("config.train = 3", "config.train: Input should be a valid dictionary"),
        ("config.train.learning_rate = 0.1", "config.train.learning_rate is set by the study"),
        ("[methods.x.config.log]\nsinks = []", "methods.x.config.log.sinks is set by the study"),
        ("pilot_seeds = [1]", "seeds and pilot_seeds have a value twice"),
        ("[methods.'..']", "'..' is no name for a method or task"),
        ("[methods.'']", "'' is no name for a method or task"),
        ("[methods.'a b']\n[methods.'a:b']", "names of methods and tasks (as folders)"),
    ],
)
def test_a_bad_declaration_is_refused_in_one_line_with_the_file(tmp_path, text, said):
    file = tmp_path / "s.toml"
    good = 'name = "s"\nseeds = [1]\nlags = [0, 8]\nlearning_rates = [0.1]\n'
    rest = "" if "[methods.none]" in text else "\n[methods.none]\n"
    file.write_text(text if text in ("", "name = ") else good + text + rest)
    with pytest.raises(UsageError) as caught:
        load_study(file)
    assert str(caught.value).startswith(f"{file}: ")
    assert said in str(caught.value) and "\n" not in str(caught.value)


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(UsageError, match=r"none\.toml: cannot be read"):
        load_study(tmp_path / "none.toml")


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"control": {"lo": 0.1}}, "unknown config key 'control.lo' (did you mean 'control.low'?)"),
        ({"train": {"steps": 0}}, "train.steps = 0: must be an integer of at least 1"),
        ({"control": {"low": 0.9, "high": 0.1}}, "control.low = 0.9 is above control.high"),
        ({"trian": {"steps": 3}}, "unknown config key 'trian' (sections: model, task"),
    ],
)
def test_a_config_that_cannot_be_is_refused_with_its_cell_before_anything_runs(config, said):
    study = make_study(methods={"none": {}, "ours": {"config": config}})
    with pytest.raises(UsageError) as caught:
        check_configs(make_cells(study), study)
    assert "cell arithmetic/ours/lag0-lr0.1-seed1: " in str(caught.value)
    assert said in str(caught.value)


def test_a_rival_needs_its_method_at_the_same_places():
    methods = {"none": {}, "ours": {"lags": [8]}, "blind": {"match": "skip_share", "of": "ours"}}
    with pytest.raises(UsageError, match=r"method 'blind' needs cell arithmetic/ours/lag0-lr0\.1"):
        make_cells(make_study(methods=methods))


def test_rates_that_are_close_have_folders_of_their_own():
    study = make_study(seeds=[1], learning_rates=[0.001, 0.0010000001], methods={"none": {}})
    ids = [cell.id for cell in make_cells(study)]
    assert len(set(ids)) == len(ids)
