"""Reinforcement learning with a trainer and engines in separate processes. No weights are written to a disk.

The loop is the same as in verl and NeMo-RL: generate, score, train, update the weights. Only the class Rollout differs
from a trainer that owns its engines. The trainer compares the engines' log-probability of each token with the
log-probability that it computes itself.

megatron convert builtin:smollm2-135m smollm2 --to safetensors --dtype float32
megatron coordinator --listen 127.0.0.1 --health-port off &
for N in 0 1; do
  megatron engine --coordinator 127.0.0.1:5556 --name engine-$N --model smollm2 --dtype float32 --health-port off &
done
python docs/examples/rl_trainer.py --model smollm2      (needs transformers)
"""

import argparse
import asyncio
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from megatron_runtime.megatron_core.inference_client import InferenceClient
from megatron_runtime.megatron_core.inference_request import DynamicInferenceRequest as Answer
from megatron_runtime.megatron_core.sampling_params import SamplingParams
from megatron_runtime.protocol.headers import Role
from megatron_runtime.trainer import WeightServer
from megatron_runtime.transport.security import PeerKeys

PROMPTS = ["I like", "Today we", "She said that", "The best way to"]


class Rollout:
    """A client of the engines, with the interface of a trainer's worker group.

    The coordinator distributes the prompts over all engines.
    """

    def __init__(self, policy: torch.nn.Module, clients: str, admin: str, keys: Path | None) -> None:
        self._client = InferenceClient(clients, True, keys=PeerKeys.load(keys, Role.CLIENT) if keys else None)
        self._client.start()
        self._server = WeightServer(policy, coordinator=admin, keys=keys)

    async def generate_sequences(self, prompts: list[list[int]], params: SamplingParams) -> list[Answer]:
        return await asyncio.gather(*(self._client.add_request(prompt, params) for prompt in prompts))

    async def update_weights(self, step: int) -> None:
        await asyncio.to_thread(self._server.publish, step)

    def close(self) -> None:
        self._server.close()
        self._client.stop()


def reward(text: str) -> float:
    words = text.split()
    return -sum(map(len, words)) / max(1, len(words))


def log_probs_of(policy: torch.nn.Module, prompt: list[int], answer: Answer) -> torch.Tensor:
    """Return the policy's log-probability of each generated token in `answer`, shape [generated]."""
    tokens = torch.tensor([prompt + answer.generated_tokens])
    log_probs = policy(tokens[:, :-1]).logits.log_softmax(-1)[0, len(prompt) - 1 :]
    return log_probs.gather(1, tokens[0, len(prompt) :, None])[:, 0]


def update_policy(
    policy: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    prompts: list[list[int]],
    batch: list[Answer],
    rewards: torch.Tensor,
) -> float:
    """Run one step of REINFORCE.

    Return the largest difference between the log-probabilities of a token in the trainer and in the engines.
    """
    difference = 0.0
    optimizer.zero_grad()
    for prompt, answer, advantage in zip(prompts, batch, rewards - rewards.mean(), strict=True):
        log_probs = log_probs_of(policy, prompt, answer)
        rollout = torch.tensor(answer.generated_log_probs)
        difference = max(difference, float((log_probs.detach() - rollout).abs().max()))
        (-advantage * log_probs.sum() / len(batch)).backward()
    optimizer.step()
    return difference


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, help="directory of the model that the engines have")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--clients", default="127.0.0.1:5555", help="client port of the coordinator")
    parser.add_argument("--admin", default="127.0.0.1:5557", help="admin port of the coordinator")
    parser.add_argument("--keys", type=Path, help="directory of the key files; default: no encryption")
    arguments = parser.parse_args()

    policy = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    prompts = [tokenizer.encode(prompt) for prompt in PROMPTS]
    optimizer = torch.optim.SGD(policy.parameters(), lr=1e-4)
    params = SamplingParams(temperature=1.0, num_tokens_to_generate=16, seed=1, return_log_probs=True)
    rollout = Rollout(policy, arguments.clients, arguments.admin, arguments.keys)
    for step in range(1, arguments.steps + 1):
        batch = await rollout.generate_sequences(prompts, params)
        rewards = torch.tensor([reward(tokenizer.decode(answer.generated_tokens)) for answer in batch])
        difference = update_policy(policy, optimizer, prompts, batch, rewards)
        await rollout.update_weights(step)
        epochs = sorted({epoch for answer in batch for _, epoch in answer.policy_epoch})
        mean = float(rewards.mean())
        print(f"step {step}: epochs {epochs}, mean reward {mean:.3f}, log-probs within {difference:.1e}", flush=True)
    rollout.close()


if __name__ == "__main__":
    asyncio.run(main())
