"""A GRPO-like loop of your own, with data that is 8 steps old, and one line of Sidestep.

    python examples/plain_loop.py

A tiny policy learns to answer each of 8 questions with the right one of 16 answers. Its samples
come from a copy of the weights that is renewed every 8 steps, as in asynchronous training.
Seconds on a CPU.
"""

import copy

import torch
from torch.nn import functional

import sidestep

NUM_QUESTIONS, NUM_ANSWERS, GROUP, LAG, STEPS = 8, 16, 16, 8, 60
MAX_NORM = 1.0


def sample(
    policy: torch.nn.Module, questions: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, float]:
    """Answers of the policy, their log-probabilities, and each answer's advantage in its group."""
    with torch.no_grad():
        logits = policy(questions)
        answers = torch.distributions.Categorical(logits=logits).sample()
        logprobs = functional.log_softmax(logits, -1).gather(-1, answers[:, None])[:, 0]
    rewards = (answers == 2 * questions).float().view(NUM_QUESTIONS, GROUP)
    advantages = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)
    return answers, logprobs, advantages.flatten(), rewards.mean().item()


def main() -> None:
    torch.manual_seed(0)
    policy = torch.nn.Sequential(
        torch.nn.Embedding(NUM_QUESTIONS, 32), torch.nn.Tanh(), torch.nn.Linear(32, NUM_ANSWERS)
    )
    optimizer = torch.optim.AdamW(policy.parameters(), lr=0.02)

    # The one line. max_norm: it clips as well, so the loop must not.
    control = sidestep.GradientControl(low=0.1, high=0.9)
    handle = sidestep.attach(optimizer, control, MAX_NORM, policy.named_parameters())

    questions = torch.arange(NUM_QUESTIONS).repeat_interleave(GROUP)
    sampler = copy.deepcopy(policy)
    for step in range(STEPS):
        if step % LAG == 0:
            sampler.load_state_dict(policy.state_dict())
        answers, old_logprobs, advantages, reward = sample(sampler, questions)

        logprobs = functional.log_softmax(policy(questions), -1)
        logprobs = logprobs.gather(-1, answers[:, None])[:, 0]
        ratio = (logprobs - old_logprobs).exp()
        clipped = ratio.clamp(0.8, 1.2)
        loss = -torch.minimum(ratio * advantages, clipped * advantages).mean()

        optimizer.zero_grad()
        loss.backward()
        handle.note(lag=float(step % LAG))  # optional: what the record says of this step
        optimizer.step()  # measured, and projected or skipped, in here

        record = handle.last
        cosine = "  --  " if record.cosine is None else f"{record.cosine:+.3f}"
        print(f"step {step:2d}  reward {reward:.3f}  cosine {cosine}  {record.regime}")

    # The control's state belongs into your checkpoint, beside those of model and optimizer.
    checkpoint = {
        "policy": policy.state_dict(),
        "optimizer": optimizer.state_dict(),
        "control": handle.state_dict(),
    }
    optimizer.load_state_dict(checkpoint["optimizer"])
    handle.load_state_dict(checkpoint["control"])


if __name__ == "__main__":
    main()
