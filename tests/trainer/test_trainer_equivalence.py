"""What a run must be equal to, bit for bit."""

import copy
import json
import shutil

import pytest
import torch
from local_run import VowelTask, equal_weights, run_locally, small_config, weights_of
from safetensors.torch import load_file, save_file

from sidestep import losses
from sidestep.buffer.prompts import PromptOrder
from sidestep.engines.generate import generate
from sidestep.engines.protocol import GenerationRequest, Sampling
from sidestep.errors import CheckpointError, Interrupted
from sidestep.models.loading import load_model, load_tokenizer, stop_token_ids
from sidestep.tasks.prompts import encode_examples


def plain_synchronous_loop(config, task):
    """GRPO as one would write it in a notebook: sample, score, one AdamW step, again. No buffer, no
    control.
    """
    tokenizer = load_tokenizer(config.model.path)
    model = load_model(config.model.path, "float32", "cpu")
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=config.train.learning_rate, betas=(0.9, 0.999), weight_decay=0.0
    )
    prompts = encode_examples(task.train, tokenizer, config.engine.max_new_tokens, 128)
    order = PromptOrder(len(prompts), config.seed)
    group_size, num_groups = config.rollout.group_size, config.rollout.groups_per_step
    for step in range(config.train.steps):
        indices = range(step * num_groups, (step + 1) * num_groups)
        asked = [prompts[order.prompt_of(index)] for index in indices]
        # torch takes another matrix product for weights that want gradients: sample from a copy
        # without, as engines do
        sampled = generate(
            copy.deepcopy(model).requires_grad_(False),
            [
                GenerationRequest(index, prompt.token_ids, group_size)
                for index, prompt in zip(indices, asked, strict=True)
            ],
            Sampling(config.engine.temperature, config.engine.max_new_tokens),
            seed=config.seed,
            stop_ids=stop_token_ids(tokenizer, model.generation_config),
        )
        lengths = sampled.lengths_B
        ids = [row[:n] for row, n in zip(sampled.token_ids_BT.tolist(), lengths, strict=True)]
        texts = tokenizer.batch_decode(ids, skip_special_tokens=True)
        rewards = torch.tensor(task.score([], texts)).view(-1, group_size)
        advantages = losses.grpo_advantages(rewards).view(-1, 1)

        width = max(len(prompt.token_ids) for prompt in asked)
        num_tokens = max(lengths)
        rows = [prompt for prompt in asked for _ in range(group_size)]
        tokens = torch.tensor(
            [
                [0] * (width - len(p.token_ids)) + list(p.token_ids) + row + [0] * (num_tokens - n)
                for p, row, n in zip(rows, ids, lengths, strict=True)
            ]
        )
        attention = torch.tensor(
            [
                [0] * (width - len(p.token_ids))
                + [1] * (len(p.token_ids) + n)
                + [0] * (num_tokens - n)
                for p, n in zip(rows, lengths, strict=True)
            ]
        )
        mask = (torch.arange(num_tokens) < torch.tensor(lengths)[:, None]).float()
        logits = model(
            input_ids=tokens,
            attention_mask=attention,
            position_ids=(attention.cumsum(1) - 1).clamp(min=0),
            logits_to_keep=num_tokens + 1,
            use_cache=False,
        ).logits[:, :-1]
        # the losses have tests of their own against float64; here rounding must be the same
        logprobs = losses.token_logprobs(logits, tokens[:, width:], config.engine.temperature)
        behaviour = sampled.logprobs_BT[:, :num_tokens]
        ratio = losses.importance_ratio(losses.bounded_log_ratio(logprobs, behaviour, mask))
        loss = losses.ppo_objective(ratio, advantages, 0.2, 0.2)
        optimizer.zero_grad()
        (torch.where(mask > 0, loss, 0.0).sum() / mask.sum()).backward()
        optimizer.step()
    return {name: p.detach().clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("lag_mode", ["bounded", "exact"])
def test_lag_0_is_bitwise_a_plain_synchronous_loop(tiny_model_dir, tmp_path, lag_mode):
    config = small_config(
        tiny_model_dir,
        rollout={"lag_mode": lag_mode},
        train={"layout": "padded"},  # as the loop has it: another shape rounds in another way
        control={"mode": "off"},
    )
    plain = plain_synchronous_loop(config, VowelTask())
    ours = weights_of(run_locally(config, tmp_path / "run"))
    assert equal_weights(plain, ours)
    start = dict(load_model(config.model.path, "float32", "cpu").named_parameters())
    assert not equal_weights(start, ours)


def test_two_exact_runs_of_one_seed_are_bitwise_equal_and_another_seed_is_not(
    tiny_model_dir, tmp_path
):
    def final(name, seed):
        rollout = {"lag_mode": "exact", "max_lag": 2}
        config = small_config(tiny_model_dir, seed=seed, rollout=rollout, train={"steps": 5})
        return weights_of(run_locally(config, tmp_path / name))

    first = final("a", 1)
    assert equal_weights(first, final("b", 1))
    assert not equal_weights(first, final("c", 2))


@pytest.mark.parametrize("max_norm", [None, 0.05])
def test_observe_is_bitwise_off_at_any_max_norm(tiny_model_dir, tmp_path, max_norm):
    def final(mode):
        config = small_config(
            tiny_model_dir,
            rollout={"lag_mode": "exact", "max_lag": 1},
            train={"max_norm": max_norm, "steps": 8},
            control={"mode": mode, "low": -1.0, "high": -1.0, "above": "project"},
        )
        return weights_of(run_locally(config, tmp_path / mode))

    off = final("off")
    assert equal_weights(off, final("observe"))
    assert not equal_weights(off, final("control"))  # so the control would have acted


def test_an_interrupted_and_resumed_exact_run_is_bitwise_the_unbroken_one(tiny_model_dir, tmp_path):
    config = small_config(
        tiny_model_dir,
        rollout={"lag_mode": "exact", "max_lag": 2},
        train={"steps": 7, "eval_every": 2, "schedule": "cosine"},
        control={"low": 0.0, "high": 0.4},
    )
    unbroken = weights_of(run_locally(config, tmp_path / "unbroken"))

    def stop_after_three(run):
        after = run._after_step

        async def interrupting(step, *rest):
            await after(step, *rest)
            if step == 2:
                run.interrupt()

        run._after_step = interrupting

    with pytest.raises(Interrupted, match=r"after 3 of 7 steps.*--resume"):
        run_locally(config, tmp_path / "broken", watch=stop_after_three)
    resumed = weights_of(run_locally(config, tmp_path / "broken", resume=True))
    assert equal_weights(unbroken, resumed)

    def rows(name):
        with open(tmp_path / name / "metrics.jsonl") as file:
            rows = [json.loads(line) for line in file]
        return [
            {
                k: v
                for k, v in row.items()
                if not k.startswith(("time/", "memory/")) and not k.endswith("/s")
            }
            for row in rows
        ]

    unbroken_rows, resumed_rows = rows("unbroken"), rows("broken")
    assert [row["step"] for row in resumed_rows] == list(range(7))
    for one, other in zip(unbroken_rows, resumed_rows, strict=True):
        assert one == other


def test_b40_a_resume_from_an_older_checkpoint_is_the_unbroken_run(tiny_model_dir, tmp_path):
    config = small_config(
        tiny_model_dir,
        rollout={"lag_mode": "exact", "max_lag": 0},
        train={"steps": 6, "checkpoint_every": 3, "keep_checkpoints": 9},
        control={"low": -1.0, "high": 1.0},
    )
    unbroken = weights_of(run_locally(config, tmp_path / "run"))
    for later in (tmp_path / "run" / "checkpoints").glob("step-00000006/*.json"):
        later.unlink()
    resumed = weights_of(run_locally(config, tmp_path / "run", resume=True))
    assert equal_weights(unbroken, resumed)


def test_b40_a_resume_with_another_snapshot_is_another_run(tiny_model_dir, tmp_path):
    config = small_config(
        tiny_model_dir,
        rollout={"lag_mode": "exact", "max_lag": 0},
        train={"steps": 5, "checkpoint_every": 3, "keep_checkpoints": 9},
        control={"low": -1.0, "high": 1.0},
    )
    unbroken = weights_of(run_locally(config, tmp_path / "run"))
    root = tmp_path / "run" / "checkpoints"
    shutil.rmtree(root / "step-00000005")
    file = root / "step-00000003" / "state.safetensors"
    tensors = load_file(file)
    turned = {k: -v if k.startswith("control.") else v for k, v in tensors.items()}
    assert any(not torch.equal(turned[k], tensors[k]) for k in tensors)
    save_file(turned, file)
    assert not equal_weights(
        unbroken, weights_of(run_locally(config, tmp_path / "run", resume=True))
    )


def test_a_checkpoint_that_lacks_a_weight_is_refused(tiny_model_dir, tmp_path):
    config = small_config(tiny_model_dir, train={"steps": 2, "checkpoint_every": 1})
    run_locally(config, tmp_path / "run")
    folder = tmp_path / "run" / "checkpoints" / "step-00000002"
    tensors = load_file(folder / "weights.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, folder / "weights.safetensors")
    with pytest.raises(CheckpointError, match=r"missing \['model.norm.weight'\]"):
        run_locally(config, tmp_path / "run", resume=True)
    (folder / "weights.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"weights\.safetensors"):
        run_locally(config, tmp_path / "run", resume=True)
