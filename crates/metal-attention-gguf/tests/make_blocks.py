"""Writes tests/data/gguf/blocks.gguf.xz, the expected values of the block formats, and prints SUMS of blocks.rs.

For every type TYPE the file has two tensors: TYPE, blocks of random bytes with finite scales, and
TYPE.values, what they stand for as F32. For the types that gguf-py can quantise to it also has
TYPE.source, random F32 values, and TYPE.quantized, their blocks.

Each of SUMS stands for the values of 65536 blocks, with every code and every finite scale that there is. Needs
`pip install gguf`, which has all types but Q1_0 and Q2_0: these two are done here.
"""

import lzma
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
    "IQ3_S": [0], "IQ3_XXS": [0], "IQ2_S": [0], "IQ2_XS": [0], "IQ2_XXS": [0], "IQ1_M": [], "IQ1_S": [0],
    "MXFP4": [], "NVFP4": [], "TQ2_0": [64], "TQ1_0": [52], "Q2_0": [0], "Q1_0": [0],
}
# Types that gguf-py has not: elements and bytes of a block. They are in SUMS alone.
NEW = {"Q1_0": (128, 18), "Q2_0": (64, 18)}
# Types of which one block is enough in the file.
SINGLE = ["IQ3_S", "IQ3_XXS", "IQ2_S", "IQ2_XS", "IQ2_XXS", "IQ1_M", "IQ1_S", "NVFP4", "TQ2_0", "TQ1_0"]
QUANTIZABLE = ["F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"]

rng = np.random.default_rng(20261120)
root = pathlib.Path(__file__).parents[3]
path = root / "tests/data/gguf/blocks.gguf"
writer = gguf.GGUFWriter(path, "none")


def add(name, data, kind):
    data = np.ascontiguousarray(data)
    writer.add_tensor(name, data if kind == gguf.GGMLQuantizationType.F32 else data.view(np.uint8), raw_dtype=kind)


def block_size(name):
    return NEW[name] if name in NEW else gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]]


def set_halves(name, blocks, halves):
    """Puts `halves()`, a half for each block, where the blocks of a type have scales."""
    for offset in SCALES[name]:
        blocks[:, offset:offset + 2] = halves().view(np.uint8).reshape(-1, 2)
    if name == "IQ1_M":
        d = halves()
        for i in range(4):
            top = (d >> np.uint16(4 * i) & np.uint16(15)).astype(np.uint8)
            blocks[:, 49 + 2 * i] = blocks[:, 49 + 2 * i] & 15 | top << 4


def values_of(name, blocks):
    if name == "F32":
        return blocks.view(np.float32)
    if name not in NEW:
        return dequantize(blocks, gguf.GGMLQuantizationType[name])
    blocks = blocks.reshape(-1, 18)
    d = blocks[:, :2].copy().view(np.float16).astype(np.float32)
    bits = 1 if name == "Q1_0" else 2
    codes = (blocks[:, 2:, None] >> np.arange(0, 8, bits, dtype=np.uint8) & (2 ** bits - 1)).reshape(len(d), -1)
    codes = codes.astype(np.int32)
    return np.where(codes == 1, d, -d) if name == "Q1_0" else (codes - 1).astype(np.float32) * d


def finite(halves):
    return np.where(halves & 0x7C00 == 0x7C00, halves & 0x83FF, halves).astype(np.uint16)


def checksum(name):
    """Of the values of 65536 blocks: SplitMix64's bytes, with each half as the first scale once."""
    length, size = block_size(name)
    n = 65536
    with np.errstate(over="ignore"):
        z = np.uint64(20261122) + np.arange(1, n * size // 8 + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ z >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ z >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
        blocks = (z ^ z >> np.uint64(31)).view(np.uint8).reshape(n, size).copy()
        order = [0]

        def halves():
            order[0] += 1
            return finite((np.arange(n) * (2 * order[0] - 1) % n).astype(np.uint16))

        set_halves(name, blocks, halves)
        bits = values_of(name, blocks).astype(np.float32).reshape(-1).view(np.uint32).astype(np.uint64)
        return int((bits * (2 * np.arange(len(bits), dtype=np.uint64) + 1)).sum())


for name in SCALES:
    if name in NEW:
        continue
    kind = gguf.GGMLQuantizationType[name]
    length, size = block_size(name)
    rows = 64 // length if length < 64 else 1 if name in SINGLE else 3
    blocks = rng.integers(0, 256, (rows, size), dtype=np.uint8)
    # Signs, subnormals and the whole range of exponents, but neither infinity nor NaN.
    set_halves(name, blocks, lambda: rng.integers(0, 0x7C00, rows, dtype=np.uint16)
               | (rng.integers(0, 2, rows, dtype=np.uint16) << 15))
    if length == 1:
        blocks = rng.standard_normal(rows).astype(np.float32)
        if name == "F16":
            blocks = blocks.astype(np.float16)
        if name == "BF16":
            blocks = quantize(blocks, kind)
        blocks = blocks.view(np.uint8)
    blocks = blocks.reshape(1, -1)
    values = values_of(name, blocks)
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
path.with_name("blocks.gguf.xz").write_bytes(lzma.compress(path.read_bytes(), preset=9 | lzma.PRESET_EXTREME))
path.unlink()

for name in SCALES:
    if block_size(name)[0] > 1:
        print(f"    (TensorType::{name}, 0x{checksum(name):016x}),")
