"""llama.cpp (package xllamacpp): a GGUF file as it is."""

from __future__ import annotations

import json
from typing import Any
from urllib.request import Request, urlopen

from worker_protocol import Generate, serve


def load(settings: dict[str, Any]) -> Generate:
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = settings["gguf"]
    params.n_ctx = settings["context"]
    params.n_parallel = 1
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = settings["threads"]
    server = xllamacpp.Server(params)
    options = {"temperature": 0.0, "top_k": 1, "cache_prompt": False, "return_tokens": True}

    def generate(prompt: list[int], max_new_tokens: int) -> list[int]:
        # Only the endpoint of llama.cpp's own format returns token ids.
        asked = json.dumps({"prompt": prompt, "n_predict": max_new_tokens, **options}).encode()
        with urlopen(Request(f"{server.listening_address}/completion", asked)) as answer:
            return list(json.load(answer)["tokens"])

    return generate


if __name__ == "__main__":
    serve(load, "xllamacpp")
