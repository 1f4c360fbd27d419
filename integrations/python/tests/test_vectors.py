"""`LLM.logits`, `embed` and `score`, compared with the references and with the command line."""

from __future__ import annotations

import json
import lzma
import pathlib
from collections.abc import Callable

import gguf
import numpy as np
import pytest
from conftest import ROOT, nmse, reference

from metal_attention import LLM, ModelError, PromptError


def test_logits_equal_the_references(exact: LLM) -> None:
    for case in reference("stories260K.json")["cases"]:
        logits = exact.logits(case["prompt"])
        assert logits.shape == (len(case["tokens"]), 512) and logits.dtype == np.float32
        assert nmse(logits[-1], case["logits_last"]) <= 1e-6
        assert list(logits.argmax(1)) == case["argmax_all"]
        assert np.array_equal(exact.logits(case["tokens"], start=-1), logits[-1:])
        assert np.array_equal(exact.logits(case["tokens"], start=2), logits[2:])
    assert exact.logits("Once upon a time", start=99).shape == (0, 512)
    assert exact.logits("Once upon a time", start=-99).shape == (5, 512)
    logits[0] = 0  # The returned array is writable.
    with pytest.raises(PromptError, match="600 tokens"):
        exact.logits([5] * 600)


def test_logits_of_other_architectures_equal_the_references(generated_models: pathlib.Path) -> None:
    data = reference("architectures.json")
    for name, case in data["models"].items():
        llm = LLM(generated_models / "architectures" / name, device="cpu", n_parallel=1, exact=True, cache_type="f32")
        logits = llm.logits(data["tokens"])
        assert nmse(logits[-1], case["logits_last"]) <= 1e-6, name
        assert list(logits.argmax(1)) == case["argmax_all"], name


def test_embeddings_equal_the_references(generated_models: pathlib.Path) -> None:
    data = reference("more-architectures.json")
    for name in ("qwen3-embed.gguf", "bert.gguf"):
        llm = LLM(generated_models / "more-architectures" / name, device="cpu", n_parallel=2, exact=True, cache_type="f32")
        expected = np.asarray(data["models"][name]["embedding"])
        outputs = llm.embed([data["tokens"], data["tokens"][:20]], use_tqdm=False)
        got = np.asarray(outputs[0].outputs.embedding)
        assert outputs[0].prompt_token_ids == data["tokens"]
        assert np.linalg.norm(got) == pytest.approx(1, abs=1e-5)
        assert nmse(got, expected / np.linalg.norm(expected)) <= 1e-6, name
        assert outputs[1].outputs.embedding != outputs[0].outputs.embedding


def write_reranker(path: pathlib.Path) -> None:
    """Writes a small BERT with random weights and a classifier."""
    n_embd, n_ff, n_ctx = 32, 48, 64
    vocabulary = path.with_name("vocabulary.gguf")
    vocabulary.write_bytes(lzma.decompress((ROOT / "tests/data/tokenizers/bert-bge-cut.gguf.xz").read_bytes()))
    reader = gguf.GGUFReader(vocabulary)
    writer = gguf.GGUFWriter(path, "bert")
    for field in reader.fields.values():
        if field.name.startswith("tokenizer."):
            kind = field.types[0]
            sub = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(field.name, field.contents(), kind, sub)
    n_vocab = len(reader.fields["tokenizer.ggml.tokens"].data)
    for key, value in (
        ("block_count", 1),
        ("context_length", n_ctx),
        ("embedding_length", n_embd),
        ("feed_forward_length", n_ff),
        ("attention.head_count", 2),
        ("pooling_type", 4),
    ):
        writer.add_uint32(f"bert.{key}", value)
    writer.add_float32("bert.attention.layer_norm_epsilon", 1e-12)
    writer.add_bool("bert.attention.causal", False)
    random = np.random.default_rng(1)
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (n_vocab, n_embd),
        "token_types.weight": (2, n_embd),
        "position_embd.weight": (n_ctx, n_embd),
    }
    matrices = {f"blk.0.{name}": (n_embd, n_embd) for name in ("attn_q", "attn_k", "attn_v", "attn_output")}
    matrices |= {"blk.0.ffn_up": (n_ff, n_embd), "blk.0.ffn_down": (n_embd, n_ff)}
    matrices |= {"cls": (n_embd, n_embd), "cls.output": (1, n_embd)}
    for name, shape in matrices.items():
        shapes[f"{name}.weight"], shapes[f"{name}.bias"] = shape, shape[:1]
    for name in ("token_embd_norm", "blk.0.attn_output_norm", "blk.0.layer_output_norm"):
        shapes |= {f"{name}.weight": (n_embd,), f"{name}.bias": (n_embd,)}
    for name, size in shapes.items():
        weights = random.uniform(-0.25, 0.25, size) + float(name.endswith("norm.weight"))
        writer.add_tensor(name, weights.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_scores_equal_those_of_the_command_line(tmp_path: pathlib.Path, program: Callable[..., str]) -> None:
    path = tmp_path / "reranker.gguf"
    write_reranker(path)
    llm = LLM(path, device="cpu", exact=True, cache_type="f32", n_parallel=2)
    query, documents = "the moon", ["of the sun", "it is far", "the moon is far from the sun"]
    arguments = [argument for document in documents for argument in ("-d", document)]
    answer = json.loads(program("rerank", "-m", str(path), "-q", query, *arguments, "--device", "cpu", "--exact", "--json"))
    expected = {result["index"]: result["relevance_score"] for result in answer["results"]}
    outputs = llm.score(query, documents, use_tqdm=False)
    assert [output.outputs.score for output in outputs] == pytest.approx([expected[i] for i in range(3)], abs=1e-6)
    pairs = llm.score([query] * 3, documents, use_tqdm=False)
    assert [pair.outputs for pair in pairs] == [output.outputs for output in outputs]
    with pytest.raises(ValueError, match="zip"):
        llm.score([query] * 2, documents)
    with pytest.raises(ModelError, match="writes no text"):
        llm.generate("the moon", use_tqdm=False)
    with pytest.raises(ModelError, match="has no logits"):
        llm.logits("the moon")


def test_a_model_that_is_no_reranker_raises_an_error(llm: LLM) -> None:
    with pytest.raises(ModelError, match="no reranker"):
        llm.score("a", "b")
