"""The weight channel: whole versions or none, and the ones that are needed stay."""

from __future__ import annotations

import os
import tempfile
import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from sidestep.engines.channel import WeightChannel
from sidestep.errors import EngineError


@pytest.fixture
def channel(tmp_path):
    return WeightChannel(tmp_path / "a" / "weights")


def weights(version: int, size: int = 4) -> list[tuple[str, torch.Tensor]]:
    return [(name, torch.full((size,), float(version))) for name in ("first", "second")]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_what_is_read_is_bitwise_what_was_published(channel, dtype):
    table = torch.randn(6, 3).to(dtype)
    published = {
        "table": table,
        "columns": torch.randn(4, 8).to(dtype).T,
        "scalar": torch.tensor(0.1).to(dtype),
        "trained": torch.nn.Parameter(torch.randn(5).to(dtype)),
    }
    channel.publish(0, published.items())
    read = channel.read(0)
    assert read.keys() == published.keys()
    for name, tensor in published.items():
        assert read[name].dtype == dtype
        assert torch.equal(read[name], tensor.detach())


def test_tied_tensors_are_written_once_under_their_first_name(channel):
    table = torch.nn.Parameter(torch.randn(6, 3))
    channel.publish(0, [("embed", table), ("head", table), ("view", table[:])])
    assert set(channel.read(0)) == {"embed"}


def test_published_weights_do_not_change_when_the_model_trains_on(channel):
    parameter = torch.nn.Parameter(torch.zeros(3))
    channel.publish(0, [("p", parameter)])
    read = channel.read(0)
    with torch.no_grad():
        parameter.add_(1.0)
    assert channel.read(0)["p"].tolist() == read["p"].tolist() == [0.0, 0.0, 0.0]


def test_versions_ascend(channel):
    channel.publish(3, weights(3))
    for version in (3, 2):
        with pytest.raises(ValueError, match=rf"version {version} cannot be published.*clear"):
            channel.publish(version, weights(version))
    assert channel.versions() == (3,)
    channel.clear()
    channel.publish(0, weights(0))
    assert channel.newest() == 0


def test_errors_name_the_versions_there_are(channel):
    with pytest.raises(EngineError, match=r"no weights have been published in .*weights"):
        channel.read_newest()
    channel.publish(4, weights(4))
    channel.publish(6, weights(6))
    for use in (channel.read, channel.pin):
        with pytest.raises(EngineError, match=r"version 5 is not in .* \(there: 4, 6\)"):
            use(5)
    with pytest.raises(ValueError, match=r"version 4 of .* is not pinned"):
        channel.unpin(4)


def test_a_discarded_version_stays_readable_for_who_has_it_mapped(channel):
    channel.publish(0, weights(0, size=50_000))
    mapped = channel.read(0)
    channel.publish(1, weights(1, size=50_000))
    assert channel.retain({1}) == (0,)
    assert not channel.has(0)
    assert mapped["first"].sum() == 0.0


def test_newest_is_read_though_it_is_discarded_between_the_look_and_the_read(channel):
    channel.publish(0, weights(0))

    class Slow(WeightChannel):
        def newest(self) -> int | None:
            version = super().newest()
            if version == 0:
                channel.publish(1, weights(1))
                channel.retain({1})
            return version

    version, tensors = Slow(channel.folder).read_newest()
    assert version == 1
    assert tensors["first"].tolist() == [1.0] * 4


def test_readers_see_whole_versions_while_the_writer_publishes_and_discards(channel):
    channel.publish(0, weights(0, size=20_000))
    seen, errors, done = set(), [], threading.Event()

    def read() -> None:
        reader = WeightChannel(channel.folder)
        while not done.is_set():
            version, tensors = reader.read_newest()
            values = {value for tensor in tensors.values() for value in tensor.unique().tolist()}
            seen.add(version)
            if values != {float(version)} or len(tensors) != 2:
                errors.append((version, values))

    reader = threading.Thread(target=read)
    reader.start()
    for version in range(1, 150):
        channel.publish(version, weights(version, size=20_000))
        channel.retain({version})
    done.set()
    reader.join(timeout=10)
    assert not errors
    assert len(seen) > 3
    assert channel.versions() == (149,)


def test_a_version_is_not_there_until_its_file_is_whole(channel, monkeypatch):
    channel.publish(0, weights(0))

    def save_and_look(tensors, path) -> None:
        whole = save_file(tensors, path)
        assert (channel.versions(), channel.has(1)) == ((0,), False)
        return whole

    monkeypatch.setattr("safetensors.torch.save_file", save_and_look)
    channel.publish(1, weights(1))
    assert channel.versions() == (0, 1)
    assert len(os.listdir(channel.folder)) == 2


def test_close_removes_the_folder_and_only_what_is_its_own(channel):
    channel.publish(0, weights(0))
    half_written = channel.folder / ".publishing-00000001-123"
    half_written.write_bytes(b"killed here")
    channel.close()
    channel.close()
    assert not channel.folder.exists()

    other = WeightChannel(channel.folder)
    other.publish(0, weights(0))
    (other.folder / "notes.txt").write_text("not ours")
    other.close()
    assert os.listdir(other.folder) == ["notes.txt"]


STEPS = st.lists(
    st.tuples(st.sampled_from(["publish", "retain", "pin", "unpin"]), st.integers(0, 8)),
    max_size=25,
)


@given(steps=STEPS)
@settings(max_examples=60, deadline=None)
def test_versions_there_are_the_retained_the_pinned_and_the_newest(steps):
    with tempfile.TemporaryDirectory() as folder:
        channel = WeightChannel(folder)
        there: set[int] = set()
        pins: list[int] = []
        next_version = 0
        for action, number in steps:
            if action == "publish":
                next_version += number % 3
                channel.publish(next_version, weights(next_version))
                there.add(next_version)
                next_version += 1
            elif action == "retain":
                wanted = {next_version - number, next_version - 2 * number}
                gone = channel.retain(wanted)
                kept = {v for v in there if v in wanted or v in pins or v == max(there)}
                assert set(gone) == there - kept
                there = kept
            elif action == "pin" and number in there:
                channel.pin(number)
                pins.append(number)
            elif action == "unpin" and number in pins:
                channel.unpin(number)
                pins.remove(number)
            assert channel.versions() == tuple(sorted(there))
            assert channel.newest() == max(there, default=None)
            assert all(channel.has(v) == (v in there) for v in range(12))
