"""economize: plain decoding, and prompt lookup."""

from __future__ import annotations

from typing import Any

from worker_protocol import Generate, serve


def load(settings: dict[str, Any]) -> Generate:
    import economize
    import torch
    from economize.techniques.lookup import LookupConfig
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(settings["threads"])
    base = AutoModelForCausalLM.from_pretrained(settings["model"], dtype=getattr(torch, settings["dtype"])).eval()
    lookup = settings["configuration"] == "lookup"
    techniques = [LookupConfig()] if lookup else []
    model = economize.apply(base, *techniques, decoding=economize.DecodeConfig(cycle_length=8 if lookup else 1))

    def generate(prompt: list[int], max_new_tokens: int) -> list[int]:
        found = model.decode(torch.tensor(prompt), max_new_tokens, stop=settings["end_ids"])
        tokens: list[int] = found.tokens.tolist()
        return tokens

    return generate


if __name__ == "__main__":
    serve(load, "economize", "torch", "transformers")
