"""Generation and the server around it, in this process: what the contract cannot reach."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from engine_helpers import ask, plain_logprobs, prompts_of_lengths
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from sidestep.engines.channel import WeightChannel
from sidestep.engines.generate import generate
from sidestep.engines.messages import EngineSettings, pack_call, unpack_answer
from sidestep.engines.protocol import Sampling
from sidestep.engines.sampling import draw_uniforms
from sidestep.engines.server import NO_VERSION, EngineServer
from sidestep.errors import EngineError
from sidestep.models.loading import load_model


@pytest.fixture(scope="module")
def tiny_model(tiny_model_dir):
    return load_model(str(tiny_model_dir), "float32", "cpu")


def serve(model_dir, channel: WeightChannel, dtype: str = "float32") -> EngineServer:
    return EngineServer(EngineSettings(str(model_dir), str(channel.folder), 5, "cpu", dtype))


@torch.no_grad()
def plain_generate(model, requests, sampling, *, seed, stop_ids):
    """One row at a time, the whole sequence again for every token, no cache: the definition."""
    rows = []
    uniforms = iter(draw_uniforms(requests, sampling.max_new_tokens, seed=seed))
    for request in requests:
        for _ in range(request.num_completions):
            ids = []
            for uniform in next(uniforms):
                context = torch.tensor([[*request.prompt_ids, *ids]])
                logits = model(input_ids=context).logits[0, -1].double() / sampling.temperature
                cdf = logits.softmax(-1).cumsum(-1).numpy()
                ids.append(int(np.searchsorted(cdf, uniform, side="right")))
                if ids[-1] in stop_ids:
                    break
            rows.append(ids)
    return rows


@pytest.mark.parametrize("lengths", [(6, 6), (3, 12, 7)], ids=["equal lengths", "padded"])
def test_generation_is_token_for_token_the_plain_loop(tiny_model, lengths):
    requests = [
        *ask(prompts_of_lengths(*lengths), 3),
        *ask(prompts_of_lengths(5), 2, first_index=9),
    ]
    sampling, stop_ids = Sampling(0.8, 14), (1, 20)
    got = generate(tiny_model, requests, sampling, seed=5, stop_ids=stop_ids)
    rows = [row[:n] for row, n in zip(got.token_ids_BT.tolist(), got.lengths_B, strict=True)]
    assert rows == plain_generate(tiny_model, requests, sampling, seed=5, stop_ids=stop_ids)
    assert got.stopped_B == [row[-1] in stop_ids for row in rows]
    assert any(got.stopped_B)


def test_rows_that_have_ended_change_nothing_in_the_others(tiny_model):
    requests, sampling = ask(prompts_of_lengths(6, 4), 8), Sampling(1.0, 20)
    stopping = generate(tiny_model, requests, sampling, seed=5, stop_ids=(1, 20, 30, 40))
    running = generate(tiny_model, requests, sampling, seed=5, stop_ids=())
    assert running.lengths_B == [20] * 16
    assert len(set(stopping.lengths_B)) > 3
    for b, length in enumerate(stopping.lengths_B):
        assert torch.equal(stopping.token_ids_BT[b, :length], running.token_ids_BT[b, :length])
        assert torch.equal(stopping.logprobs_BT[b, :length], running.logprobs_BT[b, :length])


def test_generation_ends_when_every_row_has_ended(tiny_model):
    calls = []
    handle = tiny_model.register_forward_hook(lambda *_: calls.append(1))
    try:
        every_id = tuple(range(tiny_model.config.vocab_size))
        got = generate(tiny_model, ask([[4]]), Sampling(1.0, 50), seed=0, stop_ids=every_id)
    finally:
        handle.remove()
    assert got.lengths_B == [1] * 4
    assert len(calls) == 1


def test_a_sliding_window_model_has_the_logprobs_of_its_plain_forward():
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=50,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        initializer_range=0.3,
        use_sliding_window=True,
        sliding_window=5,
        max_window_layers=1,
    )
    model = Qwen3ForCausalLM(config).eval()
    assert set(config.layer_types) == {"full_attention", "sliding_attention"}
    for lengths in [(8, 8), (3, 9)]:
        requests = ask(prompts_of_lengths(*lengths), 2)
        got = generate(model, requests, Sampling(1.0, 12), seed=1, stop_ids=())
        for b, (ids, logprobs) in enumerate(
            zip(got.token_ids_BT.tolist(), got.logprobs_BT, strict=True)
        ):
            expected = plain_logprobs(model, requests[b // 2].prompt_ids, ids, 1.0)
            assert (logprobs - expected).abs().max() < 1e-5


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """All 256 bytes, and "he", "llo", "hello": most text can be written in several ways."""
    tokens = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("h", "e"), ("l", "l"), ("ll", "o"), ("he", "llo")]
    tokens += [left + right for left, right in merges]
    vocabulary = {token: id_ for id_, token in enumerate([*tokens, "<eos>"])}
    backend = Tokenizer(models.BPE(vocabulary, merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>", pad_token="<eos>")


def test_b59_ids_are_the_sampled_ones_and_not_those_of_their_text(tmp_path):
    tokenizer = byte_tokenizer()
    split = tokenizer.convert_tokens_to_ids(["he", "llo"])
    assert tokenizer.decode(split) == "hello"
    assert tokenizer("hello").input_ids != split
    emoji = tokenizer("🙂").input_ids
    assert len(emoji) == 4

    # A model whose next token is a fixed one: it says "he" "llo" and half an emoji.
    said = [*split, *emoji[:2]]
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=16,
        tie_word_embeddings=False,
        eos_token_id=tokenizer.eos_token_id,
    )
    model = Qwen3ForCausalLM(config)
    prompt = tokenizer("a").input_ids
    with torch.no_grad():
        for parameter in model.model.layers.parameters():
            parameter.zero_()
        model.lm_head.weight.zero_()
        model.model.embed_tokens.weight.zero_()
        for place, (token, following) in enumerate(zip([*prompt, *said[:-1]], said, strict=True)):
            model.model.embed_tokens.weight[token, place] = 1.0
            model.lm_head.weight[following, place] = 10.0
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    channel = WeightChannel(tmp_path / "weights")
    channel.publish(0, model.named_parameters())
    requests = ask([prompt], 2)
    answer = serve(tmp_path, channel).handle(pack_call(requests, Sampling(1.0, len(said)), 0))
    for completion in unpack_answer(answer, requests).completions[0]:
        assert completion.token_ids == tuple(said)
        assert len(completion.logprobs) == len(completion.versions) == len(said)
        assert completion.text == "hello\ufffd"
        assert tokenizer(completion.text).input_ids != said


def test_server_makes_a_version_live_only_once(tiny_model_dir, tiny_model, tmp_path):
    channel = WeightChannel(tmp_path)
    server = serve(tiny_model_dir, channel)
    assert server.version == NO_VERSION
    with pytest.raises(EngineError, match="publish version 0 first"):
        server.load(None)
    channel.publish(0, tiny_model.named_parameters())
    assert server.load(None) > 0
    assert server.load(None) == server.load(0) == 0
    assert serve(tiny_model_dir, channel).version == 0


def test_tied_weights_follow_the_channel_on_both_ends(tiny_model_dir, tiny_model, tmp_path):
    """A tied head that keeps its old weights is a known fault of weight updates elsewhere."""
    channel = WeightChannel(tmp_path)
    trained = load_model(str(tiny_model_dir), "float32", "cpu")
    with torch.no_grad():
        trained.get_input_embeddings().weight.mul_(-0.5)
    channel.publish(0, trained.named_parameters())
    assert "lm_head.weight" not in channel.read(0)
    requests = ask(prompts_of_lengths(5))
    answer = serve(tiny_model_dir, channel).handle(pack_call(requests, Sampling(1.0, 6), 0))
    for completion in unpack_answer(answer, requests).completions[0]:
        expected = plain_logprobs(trained, requests[0].prompt_ids, completion.token_ids, 1.0)
        assert (torch.tensor(completion.logprobs) - expected).abs().max() < 1e-5


def test_bfloat16_engine_follows_float32_weights_and_gives_float32_logprobs(
    tiny_model_dir, tiny_model, tmp_path
):
    channel = WeightChannel(tmp_path)
    channel.publish(0, tiny_model.named_parameters())
    requests = ask(prompts_of_lengths(5, 8))
    server = serve(tiny_model_dir, channel, "bfloat16")
    answer = server.handle(pack_call(requests, Sampling(1.0, 6), None))
    rounded = load_model(str(tiny_model_dir), "bfloat16", "cpu")
    for request, group in zip(requests, unpack_answer(answer, requests).completions, strict=True):
        for completion in group:
            expected = plain_logprobs(rounded, request.prompt_ids, completion.token_ids, 1.0)
            got = torch.tensor(completion.logprobs, dtype=torch.float64)
            assert torch.equal(got.float().double(), got)
            assert (got - expected).abs().max() < 0.25  # bfloat16 through two layers
            assert not torch.equal(got, got.bfloat16().double())
