"""Each thing known to fail silently is found by its code, and its absence finds nothing."""

from dataclasses import replace
from pathlib import Path

import pytest

from sidestep.config.loading import load_config
from sidestep.config.recipes import find_recipe
from sidestep.config.rules import find_problems
from sidestep.doctor import CODES, Surroundings, checked, diagnose, surroundings_of
from sidestep.doctor.data_checks import STABLE_PRODUCTS, stable_product
from sidestep.doctor.machine_checks import missing_extras
from sidestep.errors import UsageError
from sidestep.losses import METHODS
from sidestep.models.loading import load_model

HERE = Surroundings({}, num_cores=2, is_installed=lambda module: True)
BIG = replace(HERE, num_parameters=1_500_000_000, context_tokens=4096)


def found(*overrides, around=HERE):
    config = load_config(None, overrides, any_combination=True)
    return {finding.code: finding for finding in diagnose(config, around)}


CASES = {
    "dead_clip": ["loss.anchor=recomputed"],
    "double_count": ["loss.policy=dis", "loss.anchor=proximal", "loss.correction=tis"],
    "correction_never_applied": ["loss.correction=geometric"],
    "uncorrected": ["loss.anchor=proximal", "train.steps_per_batch=4"],
    "anchor_unused": ["loss.policy=topr", "loss.anchor=proximal"],
    "kl_without_gradient": ["loss.kl_coef=0.1", "loss.kl_estimate=k1"],
    "loss_setting": ["loss.policy=m2po", "loss.m2po_tau=-1"],
    "stacked_lag": ["train.steps_per_batch=4"],
    "aggregation": ["loss.policy=gspo"],
    "spread_weights": [
        "loss.policy=gspo",
        "loss.anchor=proximal",
        "loss.correction=icepop",
        "train.steps_per_batch=2",
    ],
    "truncated_sampling": ["engine.top_p=0.9", "loss.anchor=recomputed"],
    "equal_rewards_likely": ["engine.temperature=0.2"],
    "dropped_signal": ["loss.advantage=reinforce_pp", "rollout.drop_equal_rewards=true"],
    "reward_scale": [
        "task.kind=function",
        "task.path=a.jsonl",
        "task.function=m:f",
        "loss.advantage=rloo",
    ],
    "bfloat16_logprobs": ["model.dtype=bfloat16"],
    "bfloat16_updates": ["model.dtype=bfloat16", "train.learning_rate=1e-6"],
    "control_snapshot": ["control.snapshot=applied"],
    "group_of_one": ["rollout.group_size=1"],
}


@pytest.mark.parametrize("code", CASES)
def test_a_silent_mistake_is_found_with_a_fix(code):
    finding = found(*CASES[code])[code]
    assert finding.message and finding.fix and finding.keys
    assert "\n" not in finding.line


def test_every_code_of_the_table_has_a_test_and_every_finding_is_in_the_table():
    surroundings = {
        "token_budget",
        "learning_rate_lag",
        "control_overridden",
        "threads_oversubscribed",
        "threads_spin",
        "missing_extra",
    }
    assert set(CASES) - {"group_of_one"} | surroundings == set(CODES)


def test_the_defaults_are_clean():
    assert found() == {}


@pytest.mark.parametrize(
    ("code", "overrides"),
    [
        ("dead_clip", ["loss.anchor=proximal", "loss.correction=tis", "train.steps_per_batch=2"]),
        ("uncorrected", ["loss.anchor=recomputed", "rollout.max_lag=0"]),
        ("uncorrected", ["loss.anchor=recomputed", "loss.correction=tis"]),
        ("stacked_lag", ["train.steps_per_batch=4", "rollout.max_lag=0"]),
        ("aggregation", ["loss.policy=gspo", "loss.aggregation=sequence"]),
        ("equal_rewards_likely", ["engine.temperature=0.6", "rollout.group_size=4"]),
        ("bfloat16_updates", ["model.dtype=bfloat16", "train.learning_rate=1e-4"]),
        ("control_snapshot", ["control.snapshot=applied", "control.mode=off"]),
        ("kl_without_gradient", ["loss.kl_coef=0.1"]),
        ("kl_without_gradient", ["loss.kl_coef=0.1", "loss.kl_place=reward"]),
    ],
)
def test_what_is_right_is_not_found(code, overrides):
    assert code not in found(*overrides)


def test_b54_stacking_mini_batches_on_lag_is_announced_in_versions():
    finding = found("train.steps_per_batch=2", "train.epochs_per_batch=2", "rollout.max_lag=3")
    message = finding["stacked_lag"].message
    assert "up to 12 versions old" in message and message.endswith("up to 15")


def test_every_broken_rule_is_listed_and_errors_come_first():
    config = load_config(
        None,
        ["rollout.group_size=1", "engine.top_p=0.9", "loss.tis_cap=2", "engine.temperature=0.1"],
        any_combination=True,
    )
    findings = diagnose(config, HERE)
    assert {problem.code for problem in find_problems(config)} <= {one.code for one in findings}
    assert [one.severity for one in findings] == ["error"] * 3 + ["warning"]


def test_tiny_groups_of_right_or_wrong_rewards_are_likely_equal():
    assert (
        "at least 50% of the groups"
        in found("rollout.group_size=2")["equal_rewards_likely"].message
    )
    assert "equal_rewards_likely" not in found(
        "rollout.group_size=2", "loss.advantage=reinforce_pp"
    )


def test_the_learning_rate_is_held_against_the_lag_and_the_size_of_the_model():
    overrides = ["train.learning_rate=1e-6", "rollout.max_lag=8"]
    finding = found(*overrides, around=BIG)["learning_rate_lag"]
    assert "8e-06" in finding.message
    assert "learning_rate_lag" not in found(*overrides, around=HERE)  # size not known
    assert "learning_rate_lag" not in found("train.learning_rate=1e-6", "rollout.max_lag=0")
    assert "learning_rate_lag" not in found(
        "train.learning_rate=1e-7", "rollout.max_lag=8", around=BIG
    )
    for size, product in STABLE_PRODUCTS:
        assert stable_product(size) == pytest.approx(product)


def test_mini_batches_count_as_lag_for_the_learning_rate():
    at_rest = ["train.learning_rate=5e-7", "rollout.max_lag=1"]
    assert "learning_rate_lag" not in found(*at_rest, around=BIG)
    assert "learning_rate_lag" in found(*at_rest, "train.steps_per_batch=8", around=BIG)


def test_the_token_budget_is_held_against_the_context():
    assert found("engine.max_new_tokens=4096", around=BIG)["token_budget"].severity == "error"
    assert found("engine.max_new_tokens=4000", around=BIG)["token_budget"].severity == "warning"
    assert "token_budget" not in found("engine.max_new_tokens=3000", around=BIG)


@pytest.mark.parametrize(
    ("code", "variables"),
    [
        ("threads_oversubscribed", {"OMP_NUM_THREADS": "2"}),
        ("threads_oversubscribed", {"MKL_NUM_THREADS": "64"}),
        ("threads_oversubscribed", {"OMP_NUM_THREADS": "4,2"}),
        ("threads_spin", {"OMP_WAIT_POLICY": "ACTIVE"}),
        ("control_overridden", {"SIDESTEP_MODE": "off"}),
    ],
)
def test_the_environment_is_examined(code, variables):
    (finding,) = found(around=replace(HERE, variables=variables)).values()
    assert finding.code == code
    assert finding.keys[0] in variables


@pytest.mark.parametrize(
    "variables",
    [
        {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"},
        {"OMP_NUM_THREADS": ""},
        {"SIDESTEP_MODE": "control"},
    ],
)
def test_a_good_environment_is_clean(variables):
    assert found(around=replace(HERE, variables=variables)) == {}


def test_a_missing_optional_package_is_named_with_its_extra():
    bare = replace(HERE, is_installed=lambda module: False)
    (finding,) = missing_extras({"engine.kind": "vllm"}, bare)
    assert (finding.code, finding.fix) == ("missing_extra", "pip install 'sidestep[vllm]'")
    assert list(missing_extras({"engine.kind": "vllm"}, HERE)) == []
    assert (
        "sidestep[math]"
        in found("task.kind=math", "task.path=a.jsonl", around=bare)["missing_extra"].fix
    )
    assert list(missing_extras({"engine.kind": "embedded"}, bare)) == []


def test_facts_about_a_model_are_read_from_its_folder(tiny_model_dir):
    around = surroundings_of(str(tiny_model_dir))
    assert around.context_tokens == 128
    model = load_model(str(tiny_model_dir), "float32", "cpu")
    assert around.num_parameters == sum(p.numel() for p in model.parameters())
    nowhere = surroundings_of("org/name-that-is-not-here")
    assert (nowhere.context_tokens, nowhere.num_parameters) == (None, None)


def test_an_error_refuses_a_run_and_warnings_do_not():
    with pytest.raises(UsageError, match=r"loss\.correction.*use correction 'none'"):
        checked(load_config(None, ["loss.correction=tis"]), HERE)
    (warning,) = checked(load_config(None, ["engine.temperature=0.1"]), HERE)
    assert warning.code == "equal_rewards_likely"


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
def test_no_method_of_the_losses_page_is_an_error(method, tmp_path):
    recipe = tmp_path / "recipe.toml"
    recipe.write_text("\n".join(method.recipe))
    checked(load_config(recipe), HERE)


def test_the_quickstart_is_clean_and_naive_asynchrony_is_not():
    def codes(name):
        return [one.code for one in diagnose(load_config(find_recipe(name)), HERE)]

    assert codes("quickstart") == []
    assert codes("naive-async") == ["dead_clip", "uncorrected"]
    assert codes("sync") == ["dead_clip"]


def test_the_page_lists_every_code():
    page = (Path(__file__).parents[2] / "docs" / "doctor.md").read_text(encoding="utf-8")
    for code, meaning in CODES.items():
        assert f"| `{code}` | {meaning} |" in page
