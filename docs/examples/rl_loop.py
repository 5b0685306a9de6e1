"""A small reinforcement learning loop: generate, score, train, and update the weights of the engine in place.

The policy is a transformers model that the program trains (a GPTModel of Megatron-Core works the same way). The engine
generates from a copy of the policy's weights. After each training step, the engine copies the new weights and
increments the epoch, while a request is in flight. The staleness of the tokens that the request has generated with the
old weights increases. The reward, which prefers short words, stands for a real reward.

python docs/examples/rl_loop.py --model DIRECTORY --steps 3      (needs transformers)
"""

import argparse

import torch
from transformers import AutoModelForCausalLM

from megatron_runtime.megatron_core.apis import MegatronLLM
from megatron_runtime.megatron_core.inference_request import DynamicInferenceRequest
from megatron_runtime.megatron_core.sampling_params import SamplingParams

PROMPTS = ["I like", "Today we", "She said that", "The best way to"] * 2


def reward(request: DynamicInferenceRequest) -> float:
    words = (request.generated_text or "").split()
    return -sum(map(len, words)) / max(1, len(words))


def train(policy: torch.nn.Module, optimizer: torch.optim.Optimizer, rollouts: list[DynamicInferenceRequest]) -> float:
    """Run one step of REINFORCE, with the mean reward of the rollouts as the baseline. Return the mean reward."""
    rewards = torch.tensor([reward(request) for request in rollouts])
    advantages = rewards - rewards.mean()
    optimizer.zero_grad()
    for request, advantage in zip(rollouts, advantages, strict=True):
        prompt = list(request.prompt_tokens)
        tokens = torch.tensor([prompt + request.generated_tokens])
        log_probs = policy(tokens[:, :-1]).logits.log_softmax(-1)[0, len(prompt) - 1 :]
        chosen = log_probs.gather(1, tokens[0, len(prompt) :, None]).sum()
        (-advantage * chosen / len(rollouts)).backward()
    optimizer.step()
    return float(rewards.mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, help="directory of a Llama model in transformers' format")
    parser.add_argument("--tokenizer", help="model reference of the tokenizer (default: the model's directory)")
    parser.add_argument("--steps", type=int, default=3)
    arguments = parser.parse_args()

    torch.manual_seed(0)
    policy = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32).eval()
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-4)
    params = SamplingParams(temperature=1.0, num_tokens_to_generate=16, seed=1)
    long = SamplingParams(temperature=1.0, num_tokens_to_generate=64, seed=2)
    tokenizer = arguments.tokenizer or arguments.model

    with MegatronLLM(model=policy, tokenizer=tokenizer, use_coordinator=True, dtype="float32") as llm:
        for epoch in range(1, arguments.steps + 1):
            rollouts = llm.generate(PROMPTS, params)
            assert all(request.policy_epoch[-1][1] == epoch - 1 for request in rollouts)
            mean = train(policy, optimizer, rollouts)

            in_flight = llm.generate_stream("A long story:", long)
            next(in_flight)
            llm.pause()  # optional: no token is sampled while the weights change
            llm.update_weights(source=policy, epoch=epoch)
            llm.unpause()
            *_, last = in_flight
            staleness = last.request.policy_staleness.tolist()
            print(
                f"epoch {epoch}: mean reward {mean:.3f} with the weights before; a request in flight has "
                f"{staleness.count(1)} tokens of these and {staleness.count(0)} of the new ones",
                flush=True,
            )


if __name__ == "__main__":
    main()
