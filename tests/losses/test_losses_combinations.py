import pytest

from sidestep.losses import ANCHORS, CORRECTIONS, POLICIES, check_combination

WEIGHING = [name for name, entry in CORRECTIONS.items() if entry.weighs]
ON_ANCHOR = [name for name, entry in POLICIES.items() if entry.ratio == "anchor"]
ON_BEHAVIOUR = [name for name, entry in POLICIES.items() if entry.ratio == "behaviour"]


def found(*args, **kwargs):
    return [(finding.code, finding.severity) for finding in check_combination(*args, **kwargs)]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("correction", ["none", "opsm"])
def test_the_behaviour_anchor_without_a_weight_is_clean_for_every_policy(policy, correction):
    assert found(policy, "behaviour", correction, max_lag=8) == []


@pytest.mark.parametrize("policy", ON_ANCHOR)
@pytest.mark.parametrize("correction", WEIGHING)
def test_decoupled_losses_with_several_steps_and_a_weight_are_clean(policy, correction):
    assert found(policy, "proximal", correction, steps_per_batch=4, max_lag=0) == []
    assert found(policy, "loglinear", correction, max_lag=8) == []


@pytest.mark.parametrize("policy", ON_ANCHOR)
def test_a_dead_clip_is_found_where_the_ratio_is_always_one(policy):
    dead = ("dead_clip", "warning")
    assert dead in found(policy, "recomputed", "tis")
    assert dead in found(policy, "recomputed", "tis", steps_per_batch=4)
    assert dead in found(policy, "proximal", "tis", steps_per_batch=1)
    assert dead not in found(policy, "proximal", "tis", steps_per_batch=2)
    assert dead not in found(policy, "loglinear", "tis")


@pytest.mark.parametrize("policy", ON_BEHAVIOUR)
@pytest.mark.parametrize("anchor", ANCHORS)
@pytest.mark.parametrize("correction", WEIGHING)
def test_a_weight_on_top_of_rho_counts_twice_whatever_the_anchor(policy, anchor, correction):
    assert ("double_count", "error") in found(policy, anchor, correction)


@pytest.mark.parametrize("policy", ON_ANCHOR)
@pytest.mark.parametrize("correction", WEIGHING)
def test_a_weight_with_the_behaviour_anchor_is_refused(policy, correction):
    assert found(policy, "behaviour", correction) == [("double_count", "error")]
    # At lag 1 the log-linear anchor is the behaviour policy.
    assert ("double_count", "error") in found(policy, "loglinear", correction, max_lag=1)


def test_two_weights_count_twice_and_a_weight_with_a_filter_does_not():
    assert found("ppo", "proximal", ("tis", "icepop"), steps_per_batch=2) == [
        ("double_count", "error")
    ]
    assert found("ppo", "proximal", ("tis", "geometric", "opsm"), steps_per_batch=2) == []


@pytest.mark.parametrize("anchor", ["proximal", "loglinear", "recomputed"])
@pytest.mark.parametrize("correction", ["none", "geometric", "opsm"])
def test_stale_samples_that_nothing_weighs_are_found(anchor, correction):
    uncorrected = ("uncorrected", "warning")
    assert uncorrected in found("ppo", anchor, correction, steps_per_batch=2)
    assert uncorrected in found("ppo", anchor, correction, max_lag=4)
    assert uncorrected not in found("ppo", anchor, correction, max_lag=0)
    assert uncorrected not in found("ppo", anchor, "tis", max_lag=4)


def test_a_filter_on_w_never_drops_where_w_is_one():
    assert found("ppo", "behaviour", "geometric") == [("correction_never_applied", "error")]
    assert found("dis", "proximal", "geometric") == []  # there it filters


@pytest.mark.parametrize("policy", ON_BEHAVIOUR)
def test_an_anchor_that_nothing_reads_is_found(policy):
    assert found(policy, "proximal") == [("anchor_unused", "warning")]


def test_every_finding_says_what_to_change():
    for policy in POLICIES:
        for anchor in ANCHORS:
            for correction in CORRECTIONS:
                for finding in check_combination(policy, anchor, correction, max_lag=4):
                    assert finding.fix.startswith("use ")
                    assert repr(policy) in finding.message or repr(anchor) in finding.message


def test_unknown_names_are_named():
    with pytest.raises(ValueError, match="policy is 'pppo': it must be one of ppo, dual_clip"):
        check_combination("pppo", "behaviour")
    with pytest.raises(ValueError, match="anchor is 'old': it must be one of behaviour"):
        check_combination("ppo", "old")
    with pytest.raises(ValueError, match="correction is 'is': it must be one of none"):
        check_combination("ppo", "behaviour", ("is",))
