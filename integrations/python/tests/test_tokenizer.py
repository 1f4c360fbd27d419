"""`LLM.get_tokenizer`: the model's tokenizer with the methods of transformers' tokenizers."""

from __future__ import annotations

import pytest
from test_chat import HELLO, TEMPLATE

from metal_attention import LLM, OptionError, PromptError

IDS = [1, 403, 407, 261, 378]


def test_text_is_encoded_and_decoded(llm: LLM) -> None:
    tokenizer = llm.get_tokenizer()
    assert tokenizer.encode("Once upon a time") == IDS == llm.tokenize("Once upon a time")
    assert tokenizer.encode("Once upon a time", add_special_tokens=False) == IDS[1:]
    assert tokenizer("Once upon a time") == {"input_ids": IDS, "attention_mask": [1] * 5}
    assert tokenizer(["Once", "Once upon"])["input_ids"] == [[1, 403], [1, 403, 407]]
    assert tokenizer.decode(IDS, skip_special_tokens=True) == "Once upon a time"
    assert tokenizer.decode(IDS) == llm.detokenize(IDS, special=True)
    assert tokenizer.batch_decode([IDS, IDS[:2]], skip_special_tokens=True) == ["Once upon a time", "Once"]
    assert tokenizer.decode(403, skip_special_tokens=True) == "Once"
    # The spelling of a control token is encoded as that token, as in transformers.
    assert tokenizer.encode("</s>", add_special_tokens=False) == [2]


def test_tokens_have_spellings(llm: LLM) -> None:
    tokenizer = llm.get_tokenizer()
    assert tokenizer.convert_ids_to_tokens(IDS) == ["<s>", "▁Once", "▁upon", "▁a", "▁time"]
    assert tokenizer.convert_ids_to_tokens(403) == "▁Once"
    assert tokenizer.tokenize("Once upon") == ["▁Once", "▁upon"]
    assert tokenizer.convert_tokens_to_ids(["▁Once", "no such token"]) == [403, tokenizer.unk_token_id]
    assert tokenizer.convert_tokens_to_ids("▁time") == 378
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id) == (1, 2, 0)
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.unk_token) == ("<s>", "</s>", "<unk>")
    assert (tokenizer.vocab_size, len(tokenizer)) == (512, 512)
    assert {1, 2} <= set(tokenizer.all_special_ids) and "</s>" in tokenizer.all_special_tokens
    vocab = tokenizer.get_vocab()
    assert vocab["▁Once"] == 403 and max(vocab.values()) <= 511
    for id in (-1, 512):
        with pytest.raises(PromptError, match="outside the vocabulary of 512 tokens"):
            tokenizer.convert_ids_to_tokens([id])


def test_conversations_are_rendered(llm: LLM) -> None:
    tokenizer = llm.get_tokenizer()
    text = tokenizer.apply_chat_template(HELLO, chat_template=TEMPLATE, tokenize=False)
    assert text == "user: Hello!\n"
    options = {"chat_template": TEMPLATE, "add_generation_prompt": True}
    assert tokenizer.apply_chat_template(HELLO, tokenize=False, shout=True, **options) == "user: Hello!\nLOUDassistant:"  # type: ignore[arg-type]
    ids = tokenizer.apply_chat_template(HELLO, **options)  # type: ignore[arg-type]
    assert ids == llm.chat_prompt(HELLO, chat_template=TEMPLATE)[1] == llm.tokenize("user: Hello!\nassistant:")
    messages = [*HELLO, {"role": "assistant", "content": "I am"}]
    begun = tokenizer.apply_chat_template(messages, chat_template=TEMPLATE, continue_final_message=True, tokenize=False)
    assert begun == "user: Hello!\nassistant: I am"
    assert tokenizer.chat_template is None
    assert tokenizer.apply_chat_template(HELLO, return_dict=False, **options) == ids  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="return_tensors is not supported"):
        tokenizer.apply_chat_template(HELLO, return_tensors="pt", **options)  # type: ignore[arg-type]
