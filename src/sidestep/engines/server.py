"""The model side of an engine process: answers calls in order, with the weights they name."""

from __future__ import annotations

import time
from typing import Any

import torch

from sidestep.engines.channel import WeightChannel
from sidestep.engines.generate import SampledTokens, generate
from sidestep.engines.messages import EngineSettings, Rows, pack_answer, unpack_call
from sidestep.errors import EngineError
from sidestep.models.loading import load_model, load_tokenizer, stop_token_ids

NO_VERSION = -1


class EngineServer:
    """A model that follows a weight channel. `version` is the live one, at first NO_VERSION.

    Nothing computed with one version outlives it: caches live inside one call.
    """

    def __init__(self, settings: EngineSettings) -> None:
        self._settings = settings
        self._channel = WeightChannel(settings.channel)
        self._tokenizer = load_tokenizer(settings.model_path)
        self._model = load_model(
            settings.model_path, settings.dtype, settings.device, settings.attention
        )
        self._model.requires_grad_(False)
        self._stop_ids = stop_token_ids(self._tokenizer, self._model.generation_config)
        self._parameters = dict(self._model.named_parameters(remove_duplicate=False))
        self.version = NO_VERSION
        if self._channel.newest() is not None:
            self.load(None)

    def handle(self, message: dict[str, Any]) -> dict[str, Any]:
        """Answer one call. What it raises belongs to the caller."""
        if message["kind"] == "generate":
            return self._generate(message)
        if message["kind"] == "load":
            load_s = self.load(message["version"])
            return {"version": self.version, "load_s": load_s}
        raise EngineError(f"unknown call {message['kind']!r}")

    def load(self, version: int | None) -> float:
        """Make `version` (None: the newest) live, in place. Returns the seconds it took, or 0."""
        started = time.perf_counter()
        wanted = self._channel.newest() if version is None else version
        if wanted is not None and wanted == self.version:
            return 0.0
        if version is None:
            version, tensors = self._channel.read_newest()
        else:
            tensors = self._channel.read(version)
        self._check(version, tensors)
        with torch.no_grad():
            for name, tensor in tensors.items():
                self._parameters[name].copy_(tensor)
        self.version = version
        return time.perf_counter() - started

    def _check(self, version: int, tensors: dict[str, torch.Tensor]) -> None:
        """EngineError unless the tensors are all of this model's parameters, and only those."""
        unknown = sorted(tensors.keys() - self._parameters.keys())
        given = {id(self._parameters[name]) for name in tensors if name in self._parameters}
        missing = sorted(n for n, p in self._parameters.items() if id(p) not in given)
        wrong = [
            f"{name} {tuple(tensor.shape)} instead of {tuple(self._parameters[name].shape)}"
            for name, tensor in tensors.items()
            if name in self._parameters and tensor.shape != self._parameters[name].shape
        ]
        if unknown or missing or wrong:
            raise EngineError(
                f"version {version} does not fit the model {self._settings.model_path}: "
                f"unknown {unknown[:3]}, missing {missing[:3]}, wrong shape {wrong[:3]}"
            )

    def _generate(self, message: dict[str, Any]) -> dict[str, Any]:
        requests, sampling, version = unpack_call(message)
        load_s = self.load(version)
        started = time.perf_counter()
        try:
            sampled = generate(
                self._model,
                requests,
                sampling,
                seed=self._settings.seed,
                stop_ids=self._stop_ids,
            )
        except ValueError as error:
            raise EngineError(f"{error} (weights of version {self.version})") from error
        rows = self._rows(sampled)
        generate_s = time.perf_counter() - started
        return pack_answer(rows, version=self.version, generate_s=generate_s, load_s=load_s)

    def _rows(self, sampled: SampledTokens) -> Rows:
        lengths = sampled.lengths_B
        token_ids = [row[:n] for row, n in zip(sampled.token_ids_BT.tolist(), lengths, strict=True)]
        logprobs = [row[:n] for row, n in zip(sampled.logprobs_BT.tolist(), lengths, strict=True)]
        texts = self._tokenizer.batch_decode(token_ids, skip_special_tokens=True)
        return Rows(token_ids, logprobs, sampled.stopped_B, texts)
