"""The engine without a process samples what the one with a process samples, bit by bit."""

import asyncio

import pytest
import torch
from engine_helpers import ask, bits, prompts_of_lengths

from sidestep.engines.channel import WeightChannel
from sidestep.engines.embedded import EmbeddedEngine
from sidestep.engines.in_process import InProcessEngine
from sidestep.engines.protocol import Sampling
from sidestep.errors import EngineError
from sidestep.models.loading import load_model

SAMPLING = Sampling(temperature=0.8, max_new_tokens=5)


@pytest.fixture(scope="module")
def channel(tiny_model_dir, tmp_path_factory):
    channel = WeightChannel(tmp_path_factory.mktemp("channel") / "weights")
    model = load_model(str(tiny_model_dir), "float32", "cpu")
    for version in range(2):
        channel.publish(version, model.named_parameters())
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.25)
    yield channel
    channel.close()


def test_both_engines_sample_the_same_bits_of_every_version(tiny_model_dir, channel):
    requests = ask(prompts_of_lengths(3, 5, 2))

    async def sample(kind):
        engine = kind(model_path=tiny_model_dir, channel=channel.folder, seed=3)
        await engine.start()
        found = []
        for version in (1, 0, None):
            generation = await engine.generate(requests, SAMPLING, version=version)
            found.append((engine.version, bits(generation)))
        await engine.close()
        return found

    ours = asyncio.run(sample(InProcessEngine))
    assert ours == asyncio.run(sample(EmbeddedEngine))
    assert [version for version, _ in ours] == [1, 0, 1]
    assert ours[0][1] != ours[1][1]


def test_an_unknown_version_and_a_closed_engine_are_refused(tiny_model_dir, channel):
    async def use():
        engine = InProcessEngine(model_path=tiny_model_dir, channel=channel.folder, seed=3)
        await engine.start()
        assert engine.version == -1
        with pytest.raises(EngineError, match="version 9 is not in the weight channel"):
            await engine.load_weights(9)
        await engine.close()
        await engine.close()
        with pytest.raises(EngineError, match="closed"):
            await engine.load_weights(0)

    asyncio.run(use())
