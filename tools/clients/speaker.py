"""Writes a tiny model with scripted answers: its template ends the prompt with a token that stands for a whole answer."""

import gguf
import numpy

WIDTH = 64
END = "<|im_end|>"
# The template mentions `tools`, so that the server parses calls in this format; the rendered prompt is the last token alone.
TEMPLATE = """{%- if tools and false -%}
<tools></tools>
<tool_call>
{"name": <function-name>, "arguments": <args-json-object>}
</tool_call>
{%- endif -%}
{%- set last = messages[-1] -%}
<|im_start|>{{ '<|' ~ last.role ~ '|>' }}"""


def write(path, answers):
    """Writes a model whose answer depends on the role of the last message: `answers` has the texts by role."""
    alphabet = [letter for _, letter in sorted(gguf_bytes().items())]
    tokens = [*alphabet, END, "<|im_start|>", *(f"<|{role}|>" for role in answers)]
    control = len(tokens) - len(alphabet)
    tokens += ["".join(gguf_bytes()[byte] for byte in text.encode()) for text in answers.values()]
    ids = {token: i for i, token in enumerate(tokens)}
    # The token that follows a role's token is the answer; EOS follows all others.
    following = [ids[END]] * len(tokens)
    for i, role in enumerate(answers):
        following[ids[f"<|{role}|>"]] = len(tokens) - len(answers) + i
    random = numpy.random.default_rng(1)
    rows = random.standard_normal((len(tokens), WIDTH)).astype(numpy.float32)
    rows /= numpy.linalg.norm(rows, axis=1, keepdims=True)

    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("speaker")
    writer.add_context_length(4096)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(WIDTH)
    writer.add_block_count(1)
    writer.add_head_count(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(WIDTH)
    writer.add_vocab_size(len(tokens))
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    kinds = [gguf.TokenType.NORMAL] * len(alphabet) + [gguf.TokenType.CONTROL] * control
    writer.add_token_types(kinds + [gguf.TokenType.NORMAL] * len(answers))
    writer.add_token_merges(["\u0120 \u0120"])
    writer.add_eos_token_id(ids[END])
    writer.add_add_bos_token(False)
    writer.add_chat_template(TEMPLATE)
    # Attention and feed-forward add nothing: a token's embedding is the output row of the token that follows.
    zeros = numpy.zeros((WIDTH, WIDTH), numpy.float32)
    ones = numpy.ones(WIDTH, numpy.float32)
    writer.add_tensor("token_embd.weight", rows[following])
    for name in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"):
        writer.add_tensor(f"blk.0.{name}.weight", zeros)
    for name in ("blk.0.attn_norm", "blk.0.ffn_norm", "output_norm"):
        writer.add_tensor(f"{name}.weight", ones)
    writer.add_tensor("output.weight", rows * 20)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def gguf_bytes():
    """GPT-2's character for each byte."""
    shown = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return {byte: chr(byte) for byte in shown} | {byte: chr(256 + i) for i, byte in enumerate(hidden)}
