"""A GGUF file with its weights in bfloat16, so that llama.cpp can be compared at a target's own precision."""

from __future__ import annotations

from pathlib import Path

from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter
from gguf.quants import dequantize, quantize

KEPT = (GGMLQuantizationType.F32, GGMLQuantizationType.F16, GGMLQuantizationType.BF16)
BF16_FILE = 32  # llama.cpp's LLAMA_FTYPE_MOSTLY_BF16


def write_bf16(source: Path, path: Path) -> Path:
    """Write `source` to `path` with every quantised tensor in bfloat16; all else stays as it is."""
    reader = GGUFReader(source)
    writer = GGUFWriter(path, reader.fields["general.architecture"].contents())
    for name, entry in reader.fields.items():
        if not name.startswith("GGUF.") and name not in ("general.architecture", "general.file_type"):
            inner = entry.types[-1] if entry.types[0] == GGUFValueType.ARRAY else None
            writer.add_key_value(name, entry.contents(), entry.types[0], sub_type=inner)
    writer.add_file_type(BF16_FILE)
    for tensor in reader.tensors:
        if tensor.tensor_type in KEPT:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
        else:
            weights = quantize(dequantize(tensor.data, tensor.tensor_type), GGMLQuantizationType.BF16)
            writer.add_tensor(tensor.name, weights, raw_dtype=GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
