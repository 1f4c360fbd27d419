"""Writes tests/data/gguf/blocks.gguf, the expected values of the block formats.

For every type TYPE the file has two tensors: TYPE, blocks of random bytes with finite scales, and
TYPE.values, what they stand for as F32. For the types that gguf-py can quantise to it also has
TYPE.source, random F32 values, and TYPE.quantized, their blocks. Needs `pip install gguf`.
"""

import pathlib

import gguf
import numpy as np
from gguf.quants import dequantize, quantize

# Of each type the offsets of its half-precision scales.
SCALES = {
    "F32": [], "F16": [], "BF16": [],
    "Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q8_0": [0],
    "Q2_K": [80, 82], "Q3_K": [108], "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208],
    "IQ4_NL": [0], "IQ4_XS": [0],
}
QUANTIZABLE = ["F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"]

rng = np.random.default_rng(20261120)
root = pathlib.Path(__file__).parents[3]
writer = gguf.GGUFWriter(root / "tests/data/gguf/blocks.gguf", "none")


def add(name, data, kind):
    data = np.ascontiguousarray(data)
    writer.add_tensor(name, data if kind == gguf.GGMLQuantizationType.F32 else data.view(np.uint8), raw_dtype=kind)


for name, scales in SCALES.items():
    kind = gguf.GGMLQuantizationType[name]
    length, size = gguf.GGML_QUANT_SIZES[kind]
    rows = 64 // length if length < 64 else 3
    blocks = rng.integers(0, 256, (rows, size), dtype=np.uint8)
    for offset in scales:
        # Signs, subnormals and the whole range of exponents, but neither infinity nor NaN.
        halves = rng.integers(0, 0x7C00, rows, dtype=np.uint16) | (rng.integers(0, 2, rows, dtype=np.uint16) << 15)
        blocks[:, offset:offset + 2] = halves.view(np.uint8).reshape(rows, 2)
    if length == 1:
        blocks = rng.standard_normal(rows).astype(np.float32)
        if name == "F16":
            blocks = blocks.astype(np.float16)
        if name == "BF16":
            blocks = quantize(blocks, kind)
        blocks = blocks.view(np.uint8)
    blocks = blocks.reshape(1, -1)
    values = blocks.view(np.float32) if name == "F32" else dequantize(blocks, kind)
    add(name, blocks.view(np.float32) if name == "F32" else blocks, kind)
    add(f"{name}.values", values.astype(np.float32), gguf.GGMLQuantizationType.F32)
    if name in QUANTIZABLE:
        source = rng.standard_normal((1, 96)).astype(np.float32)
        source[0, :32] = 0
        add(f"{name}.source", source, gguf.GGMLQuantizationType.F32)
        add(f"{name}.quantized", quantize(source, kind), kind)

writer.write_header_to_file()
writer.write_kv_data_to_file()
writer.write_tensors_to_file()
writer.close()
