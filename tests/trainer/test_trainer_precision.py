"""Precision, checkpointing and the measurement of rounding."""

import torch
from step_support import batch_of, sampled_groups, trainer_for

from sidestep.losses import count_denominators
from sidestep.trainer.parts import Sample


def gradient(model_dir, batch, **sections):
    trainer = trainer_for(model_dir, **sections)
    trainer._backward(Sample(batch), count_denominators(batch.mask_BT))
    return torch.cat([p.grad.flatten() for p in trainer.model.parameters()])


def test_checkpointing_computes_layers_twice_and_changes_no_bit(tiny_model_dir):
    batch = batch_of(sampled_groups(tiny_model_dir))
    calls = {}
    gradients = {}
    for on in (False, True):
        trainer = trainer_for(tiny_model_dir, train={"activation_checkpointing": on})
        calls[on] = 0

        def count(*_, on=on):
            calls[on] += 1

        trainer.model.model.layers[0].mlp.register_forward_pre_hook(count)
        trainer._backward(Sample(batch), count_denominators(batch.mask_BT))
        gradients[on] = [p.grad for p in trainer.model.parameters()]
    assert (calls[False], calls[True]) == (1, 2)
    for one, other in zip(gradients[False], gradients[True], strict=True):
        assert torch.equal(one, other)


def test_bfloat16_autocast_keeps_float32_weights_and_a_gradient_near_to_float32(tiny_model_dir):
    batch = batch_of(sampled_groups(tiny_model_dir))
    plain = gradient(tiny_model_dir, batch)
    cast = gradient(tiny_model_dir, batch, train={"precision": "bfloat16"})
    assert cast.dtype == torch.float32
    error = (cast - plain).norm() / plain.norm()
    assert 1e-4 < error < 0.1


def test_b62_batch_shape_and_precision_are_measured_apart_from_lag(tiny_model_dir):
    """No update yet: every lag is 0, and what rounding does stands under its own names."""
    batch = batch_of(sampled_groups(tiny_model_dir))
    plain = trainer_for(tiny_model_dir).step(batch, 0)
    cast = trainer_for(tiny_model_dir, train={"precision": "bfloat16"}).step(batch, 0)
    assert plain.lag_counts.keys() == cast.lag_counts.keys() == {0}
    assert 0 < plain.numerics["numerics/batch_shape_max"] < 1e-5
    assert plain.numerics["numerics/precision_max"] == 0.0
    assert 1e-3 < cast.numerics["numerics/precision_max"] < 0.5
    assert cast.numerics["numerics/precision_mean"] <= cast.numerics["numerics/precision_max"]


def test_a_bfloat16_model_is_compared_with_its_own_weights_in_float32(tiny_model_dir):
    from local_run import small_config

    from sidestep.models.loading import load_model
    from sidestep.trainer.step import Trainer

    config = small_config(tiny_model_dir, model={"dtype": "bfloat16"})
    trainer = Trainer(load_model(config.model.path, "bfloat16", "cpu"), config, torch.device("cpu"))
    report = trainer.step(batch_of(sampled_groups(tiny_model_dir)), 0)
    assert 1e-3 < report.numerics["numerics/precision_max"] < 1.0
    assert trainer.model.dtype == torch.bfloat16


def test_rounding_is_measured_where_it_is_due_and_changes_no_bit(tiny_model_dir):
    batch = batch_of(sampled_groups(tiny_model_dir))
    weights = {}
    for every in (0, 2):
        trainer = trainer_for(tiny_model_dir, train={"numerics_every": every})
        measured = [bool(trainer.step(batch, step).numerics) for step in range(3)]
        assert measured == ([True, False, True] if every else [False] * 3)
        weights[every] = [p.detach().clone() for p in trainer.model.parameters()]
    for one, other in zip(weights[0], weights[2], strict=True):
        assert torch.equal(one, other)


def test_memory_and_computed_positions_are_reported(tiny_model_dir):
    work = trainer_for(tiny_model_dir).step(batch_of(sampled_groups(tiny_model_dir)), 0).work
    assert work["memory/trainer_peak_bytes"] > 50e6
    assert work["memory/device_peak_bytes"] is None
    assert 0 <= work["tokens/padding_fraction"] < 1
