"""Several engine processes behind one, and rows that leave a batch early."""

import asyncio
from collections import Counter
from dataclasses import replace

import pytest
import torch
from engine_helpers import ask, is_running, plain_logprobs, prompts_of_lengths

from sidestep.engines.channel import WeightChannel
from sidestep.engines.embedded import EmbeddedEngine
from sidestep.engines.generate import generate
from sidestep.engines.pool import EnginePool
from sidestep.engines.protocol import Sampling
from sidestep.errors import EngineError
from sidestep.models.loading import load_model


class SlowEngine:
    """Answers with its own number after a while; fails to start if told so."""

    def __init__(self, number, seconds=0.0, fails=False):
        self.number, self.seconds, self.fails = number, seconds, fails
        self.version, self.closed = number, False

    async def start(self):
        if self.fails:
            raise EngineError("no")

    async def generate(self, requests, sampling, *, version):
        await asyncio.sleep(self.seconds)
        return self.number

    async def load_weights(self, version):
        self.version = version

    async def close(self):
        self.closed = True


def test_a_call_goes_to_the_engine_with_the_fewest_waiting():
    async def check():
        pool = EnginePool([SlowEngine(0, 0.2), SlowEngine(1, 0.02)])
        calls = [asyncio.create_task(pool.generate([], None, version=0)) for _ in range(2)]
        await asyncio.wait([calls[1]])
        quick = [await pool.generate([], None, version=0) for _ in range(3)]
        assert [await calls[0], await calls[1], *quick] == [0, 1, 1, 1, 1]

    asyncio.run(check())


def test_a_pool_starts_loads_and_ends_all_and_a_failed_start_leaves_none():
    async def check():
        engines = [SlowEngine(0), SlowEngine(1)]
        pool = EnginePool(engines)
        await pool.start()
        await pool.load_weights(5)
        assert [engine.version for engine in engines] == [5, 5]
        assert pool.version == 5
        broken = [SlowEngine(0), SlowEngine(1, fails=True)]
        with pytest.raises(EngineError, match="no"):
            await EnginePool(broken).start()
        assert all(engine.closed for engine in broken)
        with pytest.raises(ValueError, match="at least one"):
            EnginePool([])

    asyncio.run(check())


def test_what_a_group_samples_does_not_depend_on_the_process(tiny_model_dir, tmp_path):
    channel = WeightChannel(tmp_path / "weights")
    channel.publish(0, load_model(str(tiny_model_dir), "float32", "cpu").named_parameters())
    prompts, sampling = prompts_of_lengths(5, 5, 5, 5), Sampling(1.0, 8)

    async def sampled(replicas):
        engines = [
            EmbeddedEngine(model_path=tiny_model_dir, channel=channel.folder, seed=3)
            for _ in range(replicas)
        ]
        pool = EnginePool(engines)
        await pool.start()
        try:
            calls = [
                pool.generate(ask([prompt], first_index=i), sampling, version=0)
                for i, prompt in enumerate(prompts)
            ]
            answers = await asyncio.gather(*calls)
        finally:
            await pool.close()
        assert not any(is_running(engine.pid) for engine in engines)
        return [answer.completions for answer in answers]

    assert asyncio.run(sampled(2)) == asyncio.run(sampled(1))


def test_rows_that_end_early_leave_the_batch_and_draw_the_same(tiny_model_dir):
    model = load_model(str(tiny_model_dir), "float32", "cpu").requires_grad_(False)
    requests = ask(prompts_of_lengths(3, 7, 5), 32)
    sizes = Counter()
    model.register_forward_pre_hook(
        lambda module, args, kwargs: sizes.update([len(kwargs["input_ids"])]), with_kwargs=True
    )
    results = {}
    for drop in (False, True):
        sizes.clear()
        sampling = replace(Sampling(1.0, 40), drop_finished=drop)
        results[drop] = generate(model, requests, sampling, seed=0, stop_ids=(1, 9, 14, 20))
        computed = sum(size * times for size, times in sizes.items())
        if not drop:
            all_rows = computed
    assert computed < 0.6 * all_rows
    kept, dropped = results[False], results[True]
    assert kept.lengths_B == dropped.lengths_B
    assert kept.stopped_B == dropped.stopped_B
    assert len(set(kept.lengths_B)) > 5
    rows = [request for request in requests for _ in range(request.num_completions)]
    for row, (request, n) in enumerate(zip(rows, kept.lengths_B, strict=True)):
        ids = kept.token_ids_BT[row, :n].tolist()
        assert dropped.token_ids_BT[row, :n].tolist() == ids
        if row % 8 == 0:
            expected = plain_logprobs(model, request.prompt_ids, ids, 1.0)
            assert (dropped.logprobs_BT[row, :n] - expected).abs().max() < 1e-5
    assert torch.isfinite(dropped.logprobs_BT).all()
