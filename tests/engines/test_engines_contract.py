"""What every engine promises. The fake is held to the part that needs no model."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from engine_helpers import ask, bits, is_running, plain_logprobs, prompts_of_lengths, tokens

from fakes import FakeEngine
from sidestep.engines.channel import WeightChannel
from sidestep.engines.embedded import EmbeddedEngine
from sidestep.engines.protocol import Engine, Sampling
from sidestep.errors import EngineError
from sidestep.models.loading import load_model, load_tokenizer

SEED = 7
EOS = 1


@dataclass
class Kit:
    """A started engine, the channel it follows, and the loop it lives in."""

    engine: Engine
    channel: WeightChannel
    runner: asyncio.Runner
    models: dict[int, torch.nn.Module]

    def generate(self, requests, sampling, version=None):
        return self.runner.run(self.engine.generate(requests, sampling, version=version))


@pytest.fixture(scope="module")
def published(tiny_model_dir, tmp_path_factory):
    """A channel with versions 0, 1 and 2 of the tiny model, each with other weights."""
    channel = WeightChannel(tmp_path_factory.mktemp("channel") / "weights")
    models = {}
    for version in range(3):
        model = load_model(str(tiny_model_dir), "float32", "cpu")
        torch.manual_seed(version)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.1 * version * torch.randn_like(parameter))
        channel.publish(version, model.named_parameters())
        models[version] = model
    yield SimpleNamespace(channel=channel, models=models)
    channel.close()


def start(engine, published):
    with asyncio.Runner() as runner:
        runner.run(engine.start())
        yield Kit(engine, published.channel, runner, published.models)
        runner.run(engine.close())


@pytest.fixture(scope="module")
def embedded(tiny_model_dir, published):
    engine = EmbeddedEngine(model_path=tiny_model_dir, channel=published.channel.folder, seed=SEED)
    yield from start(engine, published)
    assert not is_running(engine.pid)


@pytest.fixture(scope="module")
def fake(published):
    channel = published.channel
    yield from start(FakeEngine(channel.newest, channel.versions), published)


@pytest.fixture(params=["embedded", "fake"])
def any_kit(request):
    return request.getfixturevalue(request.param)


# ---- any engine ------------------------------------------------------------------------------


def test_answers_come_in_the_order_of_requests_with_the_members_asked_for(any_kit):
    requests = [*ask(prompts_of_lengths(3, 5), 2), *ask(prompts_of_lengths(4), 3, first_index=9)]
    generation = any_kit.generate(requests, Sampling(1.0, 8))
    assert [len(group) for group in generation.completions] == [2, 2, 3]
    alone = any_kit.generate(requests[2:], Sampling(1.0, 8))
    assert tokens(alone)[0] == tokens(generation)[2]


def test_every_token_names_the_version_asked_for_and_none_means_the_newest(any_kit):
    requests, sampling = ask(prompts_of_lengths(3)), Sampling(1.0, 4)
    for asked, expected in [(0, 0), (2, 2), (1, 1), (None, 2), (0, 0)]:
        generation = any_kit.generate(requests, sampling, asked)
        stamped = {v for group in generation.completions for c in group for v in c.versions}
        assert stamped == {expected}
        assert any_kit.engine.version == expected


def test_loaded_version_is_live(any_kit):
    any_kit.runner.run(any_kit.engine.load_weights(1))
    assert any_kit.engine.version == 1
    any_kit.runner.run(any_kit.engine.load_weights(0))
    assert any_kit.engine.version == 0


def test_calls_in_flight_are_answered_in_the_order_they_were_made(any_kit):
    order = []

    async def call(number: int, max_new_tokens: int) -> None:
        requests = ask(prompts_of_lengths(4), 8, first_index=number)
        generation = await any_kit.engine.generate(
            requests, Sampling(1.0, max_new_tokens), version=number % 3
        )
        order.append(number)
        assert generation.completions[0][0].versions[0] == number % 3

    async def calls() -> None:
        async with asyncio.TaskGroup() as group:
            for number, max_new_tokens in enumerate([60, 1, 30, 2, 1]):
                group.create_task(call(number, max_new_tokens))

    any_kit.runner.run(calls())
    assert order == [0, 1, 2, 3, 4]


def test_unknown_version_fails_every_waiting_call_and_the_engine_goes_on(any_kit):
    requests, sampling = ask(prompts_of_lengths(3)), Sampling(1.0, 4)

    async def calls() -> list[BaseException]:
        return await asyncio.gather(
            any_kit.engine.generate(requests, sampling, version=99),
            any_kit.engine.generate(requests, sampling, version=0),
            any_kit.engine.generate(requests, sampling, version=98),
            return_exceptions=True,
        )

    errors = any_kit.runner.run(calls())
    assert [type(error) for error in errors] == [EngineError] * 3
    assert "version 99 is not" in str(errors[0])
    assert "0, 1, 2" in str(errors[0])
    assert str(errors[2]) == str(errors[1]) == str(errors[0])
    # The error of the third call comes when its caller has been told already: it is nobody's now.
    assert any_kit.generate(requests, sampling, 0).completions[0][0].versions[0] == 0


def test_cancelled_call_does_not_shift_the_answers_of_others(any_kit):
    sampling = Sampling(1.0, 6)
    first, second = ask(prompts_of_lengths(4)), ask(prompts_of_lengths(5), first_index=1)
    expected = any_kit.generate(second, sampling, 0)

    async def calls():
        given_up = asyncio.create_task(any_kit.engine.generate(first, sampling, version=0))
        kept = asyncio.create_task(any_kit.engine.generate(second, sampling, version=0))
        await asyncio.sleep(0)
        given_up.cancel()
        return await kept

    assert bits(any_kit.runner.run(calls())) == bits(expected)


# ---- engines with a model ----------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.7])
def test_b57_b61_logprobs_are_those_of_a_plain_forward_alone_and_padded(embedded, temperature):
    prompts = prompts_of_lengths(3, 11, 6)
    generation = embedded.generate(ask(prompts), Sampling(temperature, 12), 0)
    for prompt, group in zip(prompts, generation.completions, strict=True):
        for completion in group:
            for pads in ({}, {"pad_left": 5}, {"pad_right": 5}):
                expected = plain_logprobs(
                    embedded.models[0], prompt, completion.token_ids, temperature, **pads
                )
                got = torch.tensor(completion.logprobs)
                assert (got - expected).abs().max() < 1e-5


def test_b63_after_new_weights_the_same_prompt_has_the_logprobs_of_the_new_weights(embedded):
    prompts = prompts_of_lengths(8, 8)
    logprobs = {}
    for version in (0, 1, 2, 0):
        generation = embedded.generate(ask(prompts), Sampling(1.0, 10), version)
        for prompt, group in zip(prompts, generation.completions, strict=True):
            for completion in group:
                expected = plain_logprobs(
                    embedded.models[version], prompt, completion.token_ids, 1.0
                )
                assert (torch.tensor(completion.logprobs) - expected).abs().max() < 1e-5
        logprobs[version] = generation.completions[0][0].logprobs[0]
    assert len(set(logprobs.values())) == 3


def test_equal_calls_are_bitwise_equal_whatever_ran_between(embedded):
    requests, sampling = ask(prompts_of_lengths(3, 9, 5), 8), Sampling(0.9, 16)
    first = embedded.generate(requests, sampling, 1)
    embedded.generate(ask(prompts_of_lengths(12), 3), Sampling(1.0, 5), 0)
    assert bits(embedded.generate(requests, sampling, 1)) == bits(first)


def test_a_group_draws_the_same_alone_among_others_and_in_any_order(embedded):
    requests, sampling = ask(prompts_of_lengths(7, 7, 7, 7), 4), Sampling(1.0, 16)
    together = tokens(embedded.generate(requests, sampling, 0))
    assert len({ids for group in together for ids in group}) == 16
    assert tokens(embedded.generate(requests[::-1], sampling, 0))[::-1] == together
    for request, expected in zip(requests, together, strict=True):
        assert tokens(embedded.generate([request], sampling, 0)) == [expected]


def test_evaluation_draws_other_numbers_than_rollouts_of_the_same_index(embedded):
    prompts, sampling = prompts_of_lengths(6), Sampling(1.0, 12)
    rollout = embedded.generate(ask(prompts, 8), sampling, 0)
    evaluation = embedded.generate(ask(prompts, 8, stream="evaluation"), sampling, 0)
    assert not set(tokens(rollout)[0]) & set(tokens(evaluation)[0])


def test_frequencies_of_tokens_match_the_softmax(embedded):
    prompt, num = prompts_of_lengths(6)[0], 20_000
    generation = embedded.generate(ask([prompt], num), Sampling(1.3, 1), 0)
    counts = Counter(completion.token_ids[0] for completion in generation.completions[0])
    with torch.no_grad():
        logits = embedded.models[0](input_ids=torch.tensor([prompt])).logits[0, -1]
    expected = num * (logits / 1.3).softmax(-1)
    got = torch.tensor([float(counts[id_]) for id_ in range(len(expected))])
    rare = expected < 5  # pooled, as the test needs
    expected = torch.cat([expected[~rare], expected[rare].sum()[None]])
    got = torch.cat([got[~rare], got[rare].sum()[None]])
    chi_square = ((got - expected) ** 2 / expected).sum().item()
    freedom = len(expected) - 1
    assert freedom > 20
    assert chi_square < freedom + 3 * (2 * freedom) ** 0.5


def test_top_p_and_top_k_draw_from_their_support_and_keep_full_logprobs(embedded):
    prompt = prompts_of_lengths(6)[0]
    with torch.no_grad():
        logits = embedded.models[0](input_ids=torch.tensor([prompt])).logits[0, -1]
    probs, order = logits.softmax(-1).sort(descending=True)
    nucleus = int((probs.cumsum(0) < 0.5).sum()) + 1
    for sampling, size in [
        (Sampling(1.0, 1, top_p=0.5), nucleus),
        (Sampling(1.0, 1, top_k=3), 3),
        (Sampling(1.0, 1, top_k=2, top_p=0.999999), 2),
    ]:
        generation = embedded.generate(ask([prompt], 2000), sampling, 0)
        group = generation.completions[0]
        assert {completion.token_ids[0] for completion in group} == set(order[:size].tolist())
        for completion in group[:20]:
            expected = logits.log_softmax(-1)[completion.token_ids[0]]
            assert completion.logprobs[0] == pytest.approx(expected.item(), abs=1e-5)


def test_greedy_takes_the_likeliest_token_with_its_logprob_at_the_temperature(embedded):
    prompts = prompts_of_lengths(4, 9)
    generation = embedded.generate(ask(prompts, 1), Sampling(0.5, 10, greedy=True), 0)
    for prompt, (completion,) in zip(prompts, generation.completions, strict=True):
        ids = list(prompt)
        for token in completion.token_ids:
            with torch.no_grad():
                logits = embedded.models[0](input_ids=torch.tensor([ids])).logits[0, -1]
            assert token == logits.argmax().item()
            ids.append(token)
        expected = plain_logprobs(embedded.models[0], prompt, completion.token_ids, 0.5)
        assert (torch.tensor(completion.logprobs) - expected).abs().max() < 1e-5


def test_a_completion_ends_with_its_first_eos_or_at_the_length(embedded, tiny_model_dir):
    generation = embedded.generate(ask(prompts_of_lengths(5, 7), 256), Sampling(1.0, 24), 0)
    completions = [completion for group in generation.completions for completion in group]
    assert {completion.finish_reason for completion in completions} == {"stop", "length"}
    tokenizer = load_tokenizer(str(tiny_model_dir))
    for completion in completions:
        assert EOS not in completion.token_ids[:-1]
        assert (completion.finish_reason == "stop") == (completion.token_ids[-1] == EOS)
        assert completion.finish_reason == "stop" or len(completion.token_ids) == 24
        assert completion.text == tokenizer.decode(completion.token_ids, skip_special_tokens=True)
        assert "<eos>" not in completion.text


@pytest.mark.parametrize(
    ("prompts", "num", "max_new_tokens", "message"),
    [
        ([[]], 1, 4, "request 0: a prompt of 0 tokens"),
        ([[4]], 0, 4, "0 completions"),
        ([[4]] * 1 + [[5] * 100], 1, 40, "request 1: 100 prompt tokens.*context of 128"),
        ([], 1, 4, "no requests"),
    ],
)
def test_requests_that_cannot_be_served_are_named(embedded, prompts, num, max_new_tokens, message):
    with pytest.raises(EngineError, match=message):
        embedded.generate(ask(prompts, num), Sampling(1.0, max_new_tokens))
