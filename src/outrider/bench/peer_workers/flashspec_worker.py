"""flashspec: prompt lookup of a fixed length, and its UCB bandit over lengths."""

from __future__ import annotations

from typing import Any

from worker_protocol import Generate, serve

LENGTHS = {"ngram": (6,), "bandit": (2, 4, 6, 10)}


def load(settings: dict[str, Any]) -> Generate:
    import torch
    from flashspec import BanditConfig, FlashSpecConfig, SamplingConfig, SpeculativeEngine
    from flashspec.bandit import UCB1Selector
    from flashspec.engine import NgramDrafter, TargetModel
    from flashspec.engine.arms import ArmSpec
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(settings["threads"])
    device, dtype = torch.device("cpu"), getattr(torch, settings["dtype"])
    model = AutoModelForCausalLM.from_pretrained(settings["model"], dtype=dtype).eval()
    arms = [ArmSpec(drafter=0, gamma=length) for length in LENGTHS[settings["configuration"]]]
    config = FlashSpecConfig(
        device="cpu",
        drafter_strategy="bandit",
        bandit=BanditConfig(n_arms=len(arms)),
        sampling=SamplingConfig(temperature=0.0, gamma=max(arm.gamma for arm in arms)),
        eos_token_ids=tuple(settings["end_ids"]),
    )
    target = TargetModel(settings["model"], device, dtype, model=model)
    selector = UCB1Selector(n_arms=len(arms)) if len(arms) > 1 else None
    engine = SpeculativeEngine(config, [NgramDrafter()], target, selector, arms=arms)

    def generate(prompt: list[int], max_new_tokens: int) -> list[int]:
        found = engine.generate(torch.tensor([prompt]), max_new_tokens=max_new_tokens)
        tokens: list[int] = found.output_ids[0, : found.n_tokens_generated].tolist()
        return tokens

    return generate


if __name__ == "__main__":
    serve(load, "flashspec", "torch", "transformers")
