"""AsyncGRPOTrainer with the callback against a real vLLM server on the CPU, rollouts running ahead.

In an environment of its own: tests/integrations/requirements-vllm.txt.
"""

import pytest

pytestmark = [pytest.mark.hosts, pytest.mark.timeout(600)]
pytest.importorskip("vllm", reason="needs vLLM: tests/integrations/requirements-vllm.txt")

import torch  # noqa: E402
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM  # noqa: E402
from trl_hosts import Probe, Records, assert_projected_as_promised, async_trainer  # noqa: E402
from trl_vllm import GROUP, PROMPTS, ServerRollouts, next_token_logprob, vllm_server  # noqa: E402

from sidestep import GradientControl  # noqa: E402
from sidestep.integrations.trl import SidestepCallback  # noqa: E402

STEPS = 40


@pytest.fixture(scope="module")
def server_model_dir(tiny_model_dir, tmp_path_factory):
    """As the tiny model, with heads of a size that vLLM's CPU attention takes; output untied."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_dir)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=128,
        initializer_range=0.2,
        tie_word_embeddings=False,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    folder = tmp_path_factory.mktemp("server-model")
    torch.manual_seed(0)
    Qwen3ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def test_lag_of_a_real_server_is_measured_and_control_acts(server_model_dir, tmp_path):
    folder = tmp_path / "weights"
    folder.mkdir()
    tokenizer = AutoTokenizer.from_pretrained(server_model_dir)
    callback = SidestepCallback(GradientControl(low=0.0, high=0.95))
    records, probe = Records(callback), Probe()
    with vllm_server(server_model_dir, tmp_path / "vllm.log") as url:
        rollouts = ServerRollouts(url, server_model_dir, tokenizer, folder, ahead=1)
        trainer = async_trainer(
            server_model_dir,
            tmp_path / "run",
            [callback, records, probe],
            rollouts,
            max_steps=STEPS,
            max_staleness=8,
            per_device_train_batch_size=PROMPTS * GROUP,
        )
        trainer.train()
        prompt = tokenizer("12+34=").input_ids
        choice = rollouts.ask([prompt], max_tokens=1, temperature=0.0)[0]
    lines = [line for line in trainer.state.log_history if "loss" in line]
    lags = [line["lag/mean"] for line in lines]
    print("lag/mean by step:", lags)
    assert len(records.found) == len(lines) == STEPS
    assert lags[0] == 0.0
    settled = sum(lags[10:]) / len(lags[10:])
    assert 2.5 <= settled <= 4.5
    # Samples are those of the weights that were sent: the server answers as the trained model does.
    assert lines[0]["ratio"] == pytest.approx(1.0, abs=1e-3)
    assert rollouts.num_sent == STEPS + 1
    said = choice["logprobs"]["token_logprobs"][0]
    model = Qwen3ForCausalLM.from_pretrained(server_model_dir)
    model.load_state_dict(trainer.model.state_dict())
    trained = next_token_logprob(model, prompt, choice["token_ids"][0])
    assert said == pytest.approx(trained, abs=1e-3)
    assert {"pass", "project"} <= set(records.regimes)
    assert_projected_as_promised(records.found, probe)
