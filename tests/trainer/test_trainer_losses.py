"""Every loss in the trainer: what must not change its gradient, and the policies it compares."""

from dataclasses import replace

import pytest
import torch
from local_run import equal_weights, run_locally, small_config, weights_of
from step_support import batch_of, sampled_groups, trainer_for

from sidestep.losses import ADVANTAGES, ANCHORS, CORRECTIONS, POLICIES, count_denominators
from sidestep.trainer.forward import completion_logprobs
from sidestep.trainer.loss import objective_of
from sidestep.trainer.parts import Sample


def stale_batch(model_dir, shift=0.3):
    """A batch whose behaviour log-probabilities differ from the model's by up to `shift`."""
    batch = batch_of(sampled_groups(model_dir))
    noise = torch.rand(batch.mask_BT.shape, generator=torch.Generator().manual_seed(1)) * 2 - 1
    return replace(
        batch,
        behaviour_logprobs_BT=batch.behaviour_logprobs_BT + shift * noise * batch.mask_BT,
        versions_BT=torch.arange(batch.num_sequences)[:, None] % 3 + 0 * batch.versions_BT,
    )


def gradient(model_dir, batch, size=None, **loss):
    trainer = trainer_for(model_dir, train={"micro_batch_size": size}, loss=loss)
    trainer.version = 3
    sums = trainer._backward(Sample(batch), count_denominators(batch.mask_BT))
    return torch.cat([p.grad.flatten() for p in trainer.model.parameters()]), sums


@pytest.mark.parametrize("policy", POLICIES)
def test_no_policy_loss_depends_on_the_split_in_micro_batches(tiny_model_dir, policy):
    batch = stale_batch(tiny_model_dir)
    whole, sums = gradient(tiny_model_dir, batch, policy=policy)
    assert whole.norm() > 0
    for size in (8, 5):
        part, of_parts = gradient(tiny_model_dir, batch, size, policy=policy)
        assert (part - whole).norm() / whole.norm() < 1e-5
        assert of_parts.loss == pytest.approx(sums.loss, rel=1e-4, abs=1e-6)
        assert of_parts.off_policy.total.ratios.num_clipped == (
            sums.off_policy.total.ratios.num_clipped
        )


@pytest.mark.parametrize("correction", CORRECTIONS)
def test_every_correction_reaches_the_gradient_and_the_record(tiny_model_dir, correction):
    batch = stale_batch(tiny_model_dir, shift=2.0)
    plain, _ = gradient(tiny_model_dir, batch, anchor="recomputed")
    weighed, sums = gradient(tiny_model_dir, batch, anchor="recomputed", correction=correction)
    assert torch.equal(plain, weighed) == (correction == "none")
    masked = sums.off_policy.total.masked_fraction
    assert (masked > 0) == (correction not in ("none", "tis"))
    assert set(sums.off_policy.by_lag) == {"1", "2", "3-4"}


def test_b69_an_empty_micro_batch_adds_exactly_nothing(tiny_model_dir):
    batch = stale_batch(tiny_model_dir)
    mask_BT = batch.mask_BT.clone()
    mask_BT[8:] = 0.0
    half = replace(batch, mask_BT=mask_BT)
    with_empty, _ = gradient(tiny_model_dir, half, 8)
    names = ("token_ids_BL", "attention_mask_BL", "mask_BT", "behaviour_logprobs_BT")
    names += ("versions_BT", "advantages_BT", "group_indices")
    alone = replace(half, **{name: getattr(half, name)[:8] for name in names})
    without, _ = gradient(tiny_model_dir, alone, 8)
    assert torch.equal(with_empty, without)


def test_the_proximal_anchor_is_the_policy_before_the_first_step_on_the_batch(tiny_model_dir):
    batch = stale_batch(tiny_model_dir)
    loss = {"anchor": "proximal", "correction": "importance"}
    # padded, as `before` is computed: equal shapes have equal bits
    train = {"epochs_per_batch": 2, "layout": "padded"}
    trainer = trainer_for(tiny_model_dir, train=train, loss=loss)
    before = completion_logprobs(trainer.model, batch, 1.0).detach()
    trainer.version = 2
    seen = []
    original = trainer._optimizer_step

    def watching(sample, step):
        seen.append((sample.proximal_logprobs_BT.clone(), weights_of(trainer)))
        return original(sample, step)

    trainer._optimizer_step = watching
    trainer.step(batch, 0)
    (first, weights), (second, moved) = seen
    trained = batch.mask_BT != 0
    assert torch.equal(first[trained], before[trained])
    assert torch.equal(first, second)
    assert not equal_weights(weights, moved)


def test_with_one_step_on_a_batch_the_proximal_policy_is_the_current_one(tiny_model_dir):
    batch = stale_batch(tiny_model_dir)
    proximal, _ = gradient(tiny_model_dir, batch, anchor="proximal", correction="tis")
    recomputed, _ = gradient(tiny_model_dir, batch, anchor="recomputed", correction="tis")
    assert torch.equal(proximal, recomputed)


def test_the_loglinear_anchor_takes_each_tokens_own_lag(tiny_model_dir):
    config = small_config(tiny_model_dir, loss={"anchor": "loglinear"})
    batch = stale_batch(tiny_model_dir)
    logprobs = batch.behaviour_logprobs_BT + 1.0
    inputs = objective_of(config).inputs(logprobs, Sample(batch), version=4)
    lag = (4 - batch.versions_BT).float()
    trained = batch.mask_BT != 0
    assert torch.allclose(inputs.log_ratio()[trained], (1 / lag)[trained], atol=1e-5)


def test_a_kl_penalty_pulls_back_to_the_model_as_it_started(tiny_model_dir):
    batch = batch_of(sampled_groups(tiny_model_dir))
    still = replace(batch, advantages_BT=torch.zeros_like(batch.advantages_BT))

    def distance(kl_coef):
        train = {"learning_rate": 1e-3, "max_norm": 1.0}
        trainer = trainer_for(
            tiny_model_dir, train=train, loss={"kl_coef": kl_coef}, control={"mode": "off"}
        )
        reports = [trainer.step(batch, 0)]
        reports += [trainer.step(still, step) for step in range(1, 8)]
        return [report.kl_reference for report in reports]

    assert distance(0.0) == [None] * 8
    kl = distance(1.0)
    assert kl[0] == pytest.approx(0.0, abs=1e-6)
    assert kl[1] > 1e-5 and min(kl[2:]) < kl[1]


def test_the_reference_stays_at_the_start_when_a_checkpoint_is_loaded(tiny_model_dir):
    trainer = trainer_for(tiny_model_dir, loss={"kl_coef": 0.1})
    start = weights_of(trainer)
    trainer.step(batch_of(sampled_groups(tiny_model_dir)), 0)
    resumed = trainer_for(tiny_model_dir, loss={"kl_coef": 0.1})
    resumed.load_state_dict(trainer.copy_of_model(), trainer.state_dict())
    frozen = dict(resumed.reference.named_parameters())
    assert equal_weights(start, frozen)
    assert not equal_weights(start, weights_of(resumed))
    assert not any(parameter.requires_grad for parameter in frozen.values())


def test_a_named_reference_model_is_read_from_its_folder(tiny_model_dir):
    model = {"path": str(tiny_model_dir), "reference_path": str(tiny_model_dir)}
    trainer = trainer_for(tiny_model_dir, model=model, loss={"kl_coef": 0.1})
    assert equal_weights(weights_of(trainer), dict(trainer.reference.named_parameters()))


def test_the_ess_factor_lowers_the_learning_rate_of_off_policy_steps(tiny_model_dir):
    batch = stale_batch(tiny_model_dir, shift=1.0)

    def rate(scaled):
        trainer = trainer_for(tiny_model_dir, train={"ess_learning_rate": scaled})
        trainer.version = 2
        report = trainer.step(batch, 0)
        return report.learning_rate, report.off_policy.total.sequences.ess

    plain, ess = rate(False)
    scaled, _ = rate(True)
    assert 0 < ess < 0.9
    assert scaled == pytest.approx(plain * ess**0.5)


RUNS = {
    **{f"policy {name}": {"loss": {"policy": name}} for name in POLICIES},
    **{f"advantage {name}": {"loss": {"advantage": name}} for name in ADVANTAGES},
    **{
        f"anchor {name}": {"loss": {"anchor": name, "correction": "none"}, "epochs": 2}
        for name in ANCHORS
    },
    **{
        f"correction {name}": {"loss": {"anchor": "recomputed", "correction": name}}
        for name in CORRECTIONS
    },
    "several corrections": {"loss": {"anchor": "recomputed", "correction": ("tis", "geometric")}},
    "kl in the loss": {"loss": {"kl_coef": 0.1, "kl_estimate": "k2"}},
    "kl in the reward": {
        "loss": {"kl_coef": 0.1, "kl_place": "reward", "advantage": "reinforce_pp"}
    },
    "masked and overlong": {
        "engine": {"max_new_tokens": 24},
        "rollout": {"mask_truncated": True},
        "task": {"overlong_tokens": 8},
    },
}


@pytest.mark.parametrize("name", RUNS)
def test_a_run_of_two_steps(tiny_model_dir, tmp_path, name):
    sections = dict(RUNS[name])
    train = {"steps": 2, "epochs_per_batch": sections.pop("epochs", 1)}
    rollout = {"lag_mode": "exact", "max_lag": 1} if train["epochs_per_batch"] == 1 else {}
    sections["rollout"] = rollout | sections.get("rollout", {})
    config = small_config(tiny_model_dir, train=train, control={"mode": "observe"}, **sections)
    trainer = run_locally(config, tmp_path / "run")
    assert trainer.version == 2 * train["epochs_per_batch"]
    assert all(bool(p.isfinite().all()) for p in trainer.model.parameters())
