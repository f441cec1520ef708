"""A real vLLM server on the CPU, and rollouts from it for TRL's AsyncGRPOTrainer."""

import os
import queue
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager

import numpy as np
import requests
import torch
from safetensors.torch import save_file
from trl.experimental.async_grpo.async_rollout_worker import RolloutSample
from trl_hosts import digit_share

START_DEADLINE_S = 180
PROMPTS, GROUP, LENGTH = 4, 4, 6


@contextmanager
def vllm_server(model_dir, log):
    """Its address; the process and its children are ended afterwards."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--model", str(model_dir), "--host", "127.0.0.1", "--port", str(port)]
    command += ["--dtype", "float32", "--max-model-len", "64", "--enforce-eager"]
    environment = os.environ | {
        "TORCHDYNAMO_DISABLE": "1",
        "VLLM_CPU_CI_ENV": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_SERVER_DEV_MODE": "1",
    }
    process = subprocess.Popen(
        command, env=environment, stdout=log.open("wb"), stderr=subprocess.STDOUT
    )
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + START_DEADLINE_S
        while not _is_ready(url):
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"vLLM did not start:\n{log.read_text()[-4000:]}")
            time.sleep(0.5)
        yield url
    finally:
        process.terminate()  # it ends its engine itself
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()


def _is_ready(url):
    try:
        return requests.get(f"{url}/health", timeout=5).status_code == 200
    except requests.ConnectionError:
        return False


def post(url, **body):
    answer = requests.post(url, json=body, timeout=60)
    answer.raise_for_status()
    return answer


class ServerRollouts:
    """Rollout worker and weight transfer of TRL: a thread that asks the server and runs ahead.

    ahead: optimizer steps of PROMPTS x GROUP samples that may wait in the queue. Weights go through
    a folder that the server reloads.
    """

    def __init__(self, url, model_dir, tokenizer, folder, ahead):
        self.rollout_buffer = queue.Queue(maxsize=ahead * PROMPTS * GROUP)
        self.metrics_queue = queue.Queue()
        self.url, self.model, self.tokenizer, self.folder = url, str(model_dir), tokenizer, folder
        self.version, self.num_groups, self.num_sent = 0, 0, 0
        self.stopped, self.error = threading.Event(), None
        self.thread = threading.Thread(target=self._run, daemon=True)

    def start(self):
        self.thread.start()

    def stop(self):
        self.stopped.set()
        self.thread.join(60)

    def check_health(self, stale_after_s):
        if self.error is not None:
            raise RuntimeError("the rollout thread failed") from self.error

    def update_model_version(self, version):
        self.version = version

    def pause(self):
        post(f"{self.url}/pause?mode=keep")

    def resume(self):
        post(f"{self.url}/resume")

    def send_weights(self, named_weights):
        weights = {name: w.detach().clone().contiguous() for name, w in named_weights}
        save_file(weights, self.folder / "model.safetensors", {"format": "pt"})
        post(
            f"{self.url}/collective_rpc",
            method="reload_weights",
            kwargs={"weights_path": str(self.folder)},
        )
        self.num_sent += 1

    def init_weight_transfer(self):
        pass

    def destroy(self):
        pass

    def _run(self):
        try:
            while not self.stopped.is_set():
                for sample in self._sample():
                    self._put(sample)
        except Exception as error:  # it is raised where the trainer waits
            self.error = error

    def _put(self, sample):
        while not self.stopped.is_set():
            try:
                self.rollout_buffer.put(sample, timeout=0.2)
                return
            except queue.Full:
                continue

    def _sample(self):
        """Two optimizer steps' worth in one request; each sample is of the version at its start."""
        version, numbers = self.version, range(self.num_groups, self.num_groups + 2 * PROMPTS)
        texts = [f"{10 + k % 80}+{10 + 7 * k % 80}=" for k in numbers]
        prompts = [self.tokenizer(text).input_ids for text in texts]
        choices = self.ask(prompts, n=GROUP, max_tokens=LENGTH, temperature=1.0)
        self.num_groups += len(prompts)
        for i, (number, prompt) in enumerate(zip(numbers, prompts, strict=True)):
            group = choices[i * GROUP : (i + 1) * GROUP]
            rewards = np.array(digit_share(None, [choice["text"] for choice in group]))
            advantages = (rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-4)
            for choice, reward, advantage in zip(group, rewards, advantages, strict=True):
                ids, logprobs = choice["token_ids"], choice["logprobs"]["token_logprobs"]
                yield RolloutSample(
                    prompt=[],
                    completion=[],
                    input_ids=np.array(prompt + ids),
                    completion_mask=np.repeat([0, 1], [len(prompt), len(ids)]),
                    old_log_probs=np.pad(np.float32(logprobs), (len(prompt), 0)),
                    advantage=float(advantage),
                    model_version=version,
                    group_id=number,
                    metrics={"reward": float(reward)},
                )

    def ask(self, prompts, **options):
        body = {"model": self.model, "prompt": prompts, "logprobs": 0, "return_token_ids": True}
        return post(f"{self.url}/v1/completions", **body, **options).json()["choices"]


def next_token_logprob(model, prompt, token):
    with torch.no_grad():
        logits = model(torch.tensor([prompt])).logits[0, -1]
    return float(torch.log_softmax(logits, -1)[token])
