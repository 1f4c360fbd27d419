"""`LLM.generate`: equality with the references and with the command line, options of sampling, errors, threads."""

from __future__ import annotations

import json
import lzma
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from conftest import Logits, reference

from metal_attention import LLM, EngineError, OptionError, PromptError, SamplingParams
from metal_attention.llm import Prompt

STORY = ", there was a little girl named Lily. She loved to play outside in"
GREEDY = SamplingParams(temperature=0, max_tokens=22)


def test_parallel_greedy_texts_equal_the_references(exact: LLM) -> None:
    cases = reference("stories260K.json")["cases"]
    params = [SamplingParams(temperature=0, max_tokens=len(case["greedy"]), ignore_eos=True) for case in cases]
    outputs = exact.generate([case["prompt"] for case in cases], params, use_tqdm=False)
    for output, case in zip(outputs, cases, strict=True):
        assert output.prompt_token_ids == case["tokens"]
        assert output.outputs[0].token_ids == case["greedy"]


def test_without_values_in_the_model_file_the_defaults_apply(llm: LLM) -> None:
    assert llm.get_default_sampling_params() == SamplingParams()


@pytest.mark.parametrize("options", [["--temp", "0"], ["--temp", "0.9", "--seed", "7"], ["--temp", "1.5", "--seed", "8"]])
def test_texts_equal_those_of_the_command_line(llm: LLM, program: Callable[..., str], options: list[str]) -> None:
    prompts = ["Once upon a time", "Lily and Ben", "The cat sat on the mat and"]
    named = dict(zip(options[::2], options[1::2], strict=True))
    params = SamplingParams(
        temperature=float(named["--temp"]),
        seed=int(named.get("--seed", 1)),
        max_tokens=60,
        # The command line has llama.cpp's defaults.
        top_k=40,
        top_p=0.95,
        min_p=0.05,
    )
    for prompt, output in zip(prompts, llm.generate(prompts, params, use_tqdm=False), strict=True):
        lines = program("run", "-p", prompt, "-n", "60", "--json", "--device", "cpu", *options).splitlines()
        events = [json.loads(line) for line in lines]
        assert output.outputs[0].token_ids == [event["id"] for event in events if event["type"] == "token"]
        assert output.outputs[0].text == events[-1]["text"]
        assert output.prompt_token_ids == events[0]["prompt_ids"]


def test_outputs_have_the_results_of_each_prompt(llm: LLM) -> None:
    prompts: list[Prompt] = ["Once upon a time", [1, 403, 407, 261, 378], {"prompt": "Once upon a time"}, {"prompt_token_ids": [1, 403]}]
    outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
    assert [output.prompt for output in outputs] == ["Once upon a time", None, "Once upon a time", None]
    assert len({output.request_id for output in outputs}) == 4
    for output in outputs[:3]:
        text = output.outputs[0]
        assert (text.text, text.finish_reason, text.stop_reason, text.logprobs) == (STORY, "length", "length", None)
        assert output.finished and len(output.metrics) == 1 and output.metrics[0].decode > 0
    # One of the equal prompts is evaluated; the others share its KV pages.
    assert sum(output.num_cached_tokens > 0 for output in outputs[:3]) >= 2
    assert llm.generate("Once upon a time", GREEDY, use_tqdm=False)[0].outputs[0].text == STORY
    assert llm.generate([1, 403, 407, 261, 378], GREEDY, use_tqdm=False)[0].outputs[0].text == STORY
    assert llm.generate([], GREEDY) == []


def test_outputs_have_the_order_of_the_prompts(llm: LLM) -> None:
    prompts = [f"Once upon a time there were {n} cats" for n in range(60)]
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=8)
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert [output.prompt for output in outputs] == prompts
    for n in (0, 31, 59):
        alone = llm.generate(prompts[n], params, use_tqdm=False)[0]
        assert alone.outputs[0].token_ids == outputs[n].outputs[0].token_ids


def test_negative_seeds_are_random(llm: LLM) -> None:
    params = SamplingParams(temperature=1.9, seed=-1, max_tokens=24)
    texts = {llm.generate("Once upon a time", params, use_tqdm=False)[0].outputs[0].text for _ in range(5)}
    assert len(texts) > 1


def test_each_of_n_texts_has_its_own_seed(llm: LLM) -> None:
    params = SamplingParams(n=3, temperature=1.2, seed=5, max_tokens=12)
    texts = llm.generate(["Once upon a time", "Lily"], params, use_tqdm=False)[0].outputs
    assert [text.index for text in texts] == [0, 1, 2]
    for text in texts:
        single = SamplingParams(temperature=1.2, seed=5 + text.index, max_tokens=12)
        assert llm.generate("Once upon a time", single, use_tqdm=False)[0].outputs[0].token_ids == text.token_ids
    assert len({text.text for text in texts}) == 3


def test_stop_strings_end_a_text(llm: LLM) -> None:
    for stop in ("girl", ["boy", "girl"]):
        text = llm.generate("Once upon a time", SamplingParams(temperature=0, stop=stop), use_tqdm=False)[0].outputs[0]
        assert (text.text, text.finish_reason, text.stop_reason) == (", there was a little ", "stop", "stop_string")


def test_stop_ids_end_a_text_after_min_tokens(llm: LLM) -> None:
    story = llm.generate("Once upon a time", GREEDY, use_tqdm=False)[0].outputs[0].token_ids
    assert story[:4] == [432, 383, 286, 261]
    for min_tokens in (0, 2):
        params = SamplingParams(temperature=0, stop_token_ids=[286], min_tokens=min_tokens)
        text = llm.generate("Once upon a time", params, use_tqdm=False)[0].outputs[0]
        assert (text.token_ids, text.finish_reason, text.stop_reason) == ([432, 383], "stop", "end_of_text")
    longer = SamplingParams(temperature=0, stop_token_ids=[286], min_tokens=3)
    ids = llm.generate("Once upon a time", longer, use_tqdm=False)[0].outputs[0].token_ids
    assert ids[:2] == [432, 383] and ids[2] != 286
    assert llm.eos_token_id is not None
    ends = SamplingParams(temperature=0, logit_bias={llm.eos_token_id: 1e6}, min_tokens=3)
    assert llm.generate("Once upon a time", ends, use_tqdm=False)[0].outputs[0].token_ids == [432, 383, 286]
    assert [id for piece in llm.stream("Once upon a time", ends) for id in piece.token_ids] == [432, 383, 286]


def test_min_keep_is_a_minimum_of_tokens_after_each_sampler(llm: LLM) -> None:
    def ids(**options: float) -> list[int]:
        params = SamplingParams(temperature=1.5, seed=3, max_tokens=24, **options)  # type: ignore[arg-type]
        return llm.generate("Once upon a time", params, use_tqdm=False)[0].outputs[0].token_ids

    assert ids(top_p=0.1, min_keep=1) == ids(top_p=0.1) != ids(top_p=0.1, min_keep=512)


def test_dry_sequence_breakers_end_a_repetition(llm: LLM) -> None:
    def ids(breakers: list[str] | None) -> list[int]:
        params = SamplingParams(
            temperature=0, max_tokens=80, dry_multiplier=4, dry_penalty_last_n=-1, dry_sequence_breakers=breakers
        )
        return llm.generate("Once upon a time", params, use_tqdm=False)[0].outputs[0].token_ids

    assert ids(None) == ids(["\n", ":", '"', "*"]) != ids([" ", ".", "a", "e", "i", "o", "u"])


def test_prompts_have_log_probabilities(llm: LLM) -> None:
    prompt = "Once upon a time, there was"
    params = SamplingParams(temperature=0, max_tokens=2, n=2, prompt_logprobs=2)
    output = llm.generate(prompt, params, use_tqdm=False)[0]
    ids, prompt_logprobs = output.prompt_token_ids, output.prompt_logprobs
    assert prompt_logprobs is not None and len(prompt_logprobs) == len(ids) and prompt_logprobs[0] is None
    rows = llm.logits(ids).astype(np.float64)
    logprobs = rows - np.log(np.exp(rows - rows.max(1, keepdims=True)).sum(1, keepdims=True)) - rows.max(1, keepdims=True)
    for id, position, row in zip(ids[1:], prompt_logprobs[1:], logprobs, strict=False):
        assert position is not None
        token = position[id]
        assert token.logprob == pytest.approx(row[id], abs=1e-3)
        assert token.rank == 1 + (row > row[id]).sum()
        assert [other for other in position if position[other].rank <= 2] == list(np.argsort(-row)[:2])
        assert token.decoded_token == llm.get_tokenizer().decode(id) or token.decoded_token.strip() == llm.get_tokenizer().decode(id)
    first = next(iter(llm.stream(prompt, params)))
    assert (first.text, first.token_ids, first.prompt_logprobs) == ("", [], prompt_logprobs)
    all_of_them = llm.generate(prompt, SamplingParams(max_tokens=1, prompt_logprobs=-1, logprobs=-1), use_tqdm=False)[0]
    assert all_of_them.prompt_logprobs is not None and len(all_of_them.prompt_logprobs[1] or {}) == llm.n_vocab
    assert len((all_of_them.outputs[0].logprobs or [{}])[0]) == llm.n_vocab
    assert llm.generate(prompt, GREEDY, use_tqdm=False)[0].prompt_logprobs is None
    assert llm.generate("", SamplingParams(max_tokens=1, prompt_logprobs=0), use_tqdm=False)[0].prompt_logprobs == [None]


def test_biases_forbid_and_favour_tokens(llm: LLM) -> None:
    comma, dot = llm.tokenize(",", add_special=False)[-1], llm.tokenize(".", add_special=False)[-1]
    forbid = SamplingParams(temperature=0, max_tokens=40, logit_bias={comma: float("-inf")})
    assert "," not in llm.generate("Once upon a time", forbid, use_tqdm=False)[0].outputs[0].text
    favour = SamplingParams(temperature=0, max_tokens=3, logit_bias={dot: 100})
    assert llm.generate("Once upon a time", favour, use_tqdm=False)[0].outputs[0].token_ids == [dot] * 3


def test_logprobs_are_the_log_softmax_of_the_logits(llm: LLM) -> None:
    params = SamplingParams(temperature=1.5, seed=2, max_tokens=10, logprobs=4)
    output = llm.generate("Once upon a time", params, use_tqdm=False)[0]
    text = output.outputs[0]
    assert text.logprobs is not None and len(text.logprobs) == 10
    rows = llm.logits(output.prompt_token_ids + text.token_ids[:-1], start=-10).astype(np.float64)
    logprobs = rows - np.log(np.exp(rows - rows.max(1, keepdims=True)).sum(1, keepdims=True)) - rows.max(1, keepdims=True)
    for id, position, row in zip(text.token_ids, text.logprobs, logprobs, strict=True):
        assert position[id].logprob == pytest.approx(row[id], abs=1e-3)
        assert position[id].rank == 1 + (row > row[id]).sum()
        top = [other for other in position if position[other].rank <= 4]
        assert top == list(np.argsort(-row)[:4])
        assert [position[other].rank for other in top] == [1, 2, 3, 4]
    assert text.cumulative_logprob == pytest.approx(sum(row[id] for id, row in zip(text.token_ids, logprobs, strict=True)), abs=1e-2)
    decoded = "".join(position[id].decoded_token for id, position in zip(text.token_ids, text.logprobs, strict=True))
    assert decoded == text.text


def test_logits_processors_change_the_sampled_tokens(llm: LLM) -> None:
    girl = llm.tokenize(" girl")[-1]
    seen: list[list[int]] = []

    def no_girl(ids: list[int], logits: Logits) -> None:
        seen.append(ids)
        assert logits.shape == (llm.n_vocab,) and logits.dtype == np.float32
        logits[girl] = -np.inf

    def last(ids: list[int], logits: Logits) -> Logits:
        """Allows only the token whose id precedes that of the most likely one."""
        out = np.full_like(logits, -np.inf)
        out[(int(logits.argmax()) - 1) % llm.n_vocab] = 0
        return out

    params = SamplingParams(temperature=0, max_tokens=22, logits_processors=[no_girl])
    text, plain = (
        output.outputs[0]
        for output in llm.generate(["Once upon a time"] * 2, [params, GREEDY], use_tqdm=False)
    )
    assert plain.text == STORY and girl not in text.token_ids
    assert [len(ids) for ids in seen] == list(range(5, 27)) and seen[-1][5:] == text.token_ids[:-1]

    two = SamplingParams(temperature=0, max_tokens=1, logits_processors=[no_girl, last])
    first = plain.token_ids[0]
    assert llm.generate("Once upon a time", two, use_tqdm=False)[0].outputs[0].token_ids == [first - 1]


def test_exceptions_of_logits_processors_are_raised(llm: LLM) -> None:
    def broken(ids: list[int], logits: Logits) -> None:
        if len(ids) == 7:
            raise LookupError("no rule for this")

    params = SamplingParams(temperature=0, logits_processors=[broken])
    with pytest.raises(LookupError, match="no rule for this"):
        llm.generate(["Once upon a time"] * 3, [GREEDY, params, GREEDY], use_tqdm=False)
    with pytest.raises(LookupError, match="no rule for this"):
        list(llm.stream("Once upon a time", params))
    nothing = SamplingParams(logits_processors=[lambda ids, logits: np.full_like(logits, -np.inf)])
    with pytest.raises(EngineError, match="it leaves no token to choose"):
        llm.generate("Once upon a time", nothing, use_tqdm=False)
    wrong = SamplingParams(logits_processors=[lambda ids, logits: logits[1:]])
    with pytest.raises(ValueError, match="broadcast"):
        llm.generate("Once upon a time", wrong, use_tqdm=False)
    assert llm.generate("Once upon a time", GREEDY, use_tqdm=False)[0].outputs[0].text == STORY


def test_a_text_ends_at_its_timeout(llm: LLM) -> None:
    def slow(ids: list[int], logits: Logits) -> None:
        time.sleep(0.02)

    params = SamplingParams(temperature=0, max_tokens=400, timeout=0.2, logits_processors=[slow])
    text = llm.generate("Once upon a time", params, use_tqdm=False)[0].outputs[0]
    assert (text.finish_reason, text.stop_reason) == ("abort", "deadline")
    assert len(text.token_ids) < 20


def test_invalid_input_is_rejected_with_the_message_of_the_library(llm: LLM) -> None:
    cases: list[tuple[type[Exception], str, Prompt, SamplingParams]] = [
        (PromptError, "the prompt has 600 tokens, but the context has room for 512", [5] * 600, GREEDY),
        (PromptError, "token id 512 is outside the vocabulary of 512 tokens", [1, 512], GREEDY),
        (PromptError, "the prompt is empty", {"prompt_token_ids": []}, GREEDY),
        (OptionError, "temperature is -1, but it must be 0", "a", SamplingParams(temperature=-1)),
        (OptionError, "top_p is 2", "a", SamplingParams(top_p=2)),
        (OptionError, "there is no sampler named", "a", SamplingParams(samplers=["top_z"])),
        (OptionError, "max_tokens", "a", SamplingParams(max_tokens=-1)),
        (OptionError, "top_k is 2.5", "a", SamplingParams(top_k=2.5)),  # type: ignore[arg-type]
        (OptionError, "repetition_penalty is 0, but it must be more than 0", "a", SamplingParams(repetition_penalty=0)),
        (OptionError, "min_keep is -1", "a", SamplingParams(min_keep=-1)),
        (OptionError, "logprobs is -2", "a", SamplingParams(logprobs=-2)),
        (OptionError, "stop_token_ids", "a", SamplingParams(stop_token_ids=[-1])),
        (PromptError, "token id 512 is outside", "a", SamplingParams(stop_token_ids=[512])),
        (OptionError, "timeout is NaN", "a", SamplingParams(timeout=float("nan"))),
        (OptionError, "logit bias of token 3", "a", SamplingParams(logit_bias={3: float("inf")})),
        (PromptError, "token id 9999", "a", SamplingParams(logit_bias={9999: 1})),
    ]
    for kind, why, prompt, params in cases:
        with pytest.raises(kind, match=why):
            llm.generate([prompt], params, use_tqdm=False)
    for n in (0, 10**9):
        with pytest.raises(OptionError, match=f"n is {n}"):
            SamplingParams(n=n)
    with pytest.raises(OptionError, match="2 prompts, but 1"):
        llm.generate(["a", "b"], [SamplingParams()], use_tqdm=False)
    for ids in ([-1], [1 << 32]):
        with pytest.raises(PromptError, match="token id"):
            llm.generate([ids], use_tqdm=False)
    with pytest.raises(PromptError, match="promt"):
        llm.generate({"promt": "a"}, use_tqdm=False)
    with pytest.raises(TypeError, match="not bytes"):
        llm.generate(b"abc", use_tqdm=False)
    with pytest.raises(PromptError, match="outside the vocabulary"):
        llm.detokenize([512])
    with pytest.raises(PromptError, match="token id"):
        llm.detokenize([-1])


def test_other_threads_run_during_generation(llm: LLM) -> None:
    ticks = 0
    done = threading.Event()

    def tick() -> None:
        nonlocal ticks
        while not done.is_set():
            ticks += 1
            time.sleep(0.001)

    thread = threading.Thread(target=tick)
    thread.start()
    start = time.monotonic()
    llm.generate(["Once upon a time"] * 32, SamplingParams(max_tokens=200, ignore_eos=True), use_tqdm=False)
    seconds = time.monotonic() - start
    done.set()
    thread.join()
    # If generation held the global interpreter lock, there would be ticks at its beginning and end only.
    assert ticks > 20 * seconds


def test_threads_share_one_model(llm: LLM) -> None:
    texts: dict[int, str] = {}

    def ask(i: int) -> None:
        texts[i] = llm.generate("Once upon a time", GREEDY, use_tqdm=False)[0].outputs[0].text

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert texts == dict.fromkeys(range(8), STORY)


def test_progress_is_shown_unless_disabled(llm: LLM, capfd: pytest.CaptureFixture[str]) -> None:
    llm.generate(["Once upon a time"] * 3, GREEDY)
    assert "generating: 100%" in capfd.readouterr().err
    llm.generate(["Once upon a time"] * 3, GREEDY, use_tqdm=False)
    assert capfd.readouterr() == ("", "")


def test_a_closed_model_raises_an_error() -> None:
    with LLM(device="cpu", n_parallel=1) as llm:
        text = llm.generate("Once upon a time", GREEDY, use_tqdm=False)[0].outputs[0].text
        assert text == STORY
    with pytest.raises(EngineError, match="was closed"):
        llm.generate("Once upon a time", GREEDY, use_tqdm=False)
    with pytest.raises(EngineError, match="was closed"):
        llm.stream("Once upon a time")
    assert llm.detokenize(llm.tokenize("Once upon a time")) == "Once upon a time"
    llm.close()


def test_texts_do_not_depend_on_the_drafter() -> None:
    # "Once upon a time, there was a Once upon a time": the text repeats what followed the first time.
    prompt = [1, 403, 407, 261, 378, 432, 383, 286, 261, 403, 407, 261, 378]
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    off = LLM(device="cpu", n_parallel=2, drafter="off")
    plain = off.generate(prompt, params, use_tqdm=False)[0].outputs[0]
    assert (plain.num_drafted_tokens, plain.num_accepted_tokens) == (0, 0)
    # How many drafts pay is measured, and none were evaluated yet.
    for drafted in [LLM(device="cpu", n_parallel=2), LLM(device="cpu", n_parallel=2, drafter="ngram")]:
        text = drafted.generate(prompt, params, use_tqdm=False)[0].outputs[0]
        assert text.token_ids == plain.token_ids
        assert 1 <= text.num_accepted_tokens <= text.num_drafted_tokens
    params.max_drafts = 0
    text = drafted.generate(prompt, params, use_tqdm=False)[0].outputs[0]
    assert (text.token_ids, text.num_drafted_tokens) == (plain.token_ids, 0)
    params.max_drafts, params.prediction = None, plain.text
    text = drafted.generate(prompt, params, use_tqdm=False)[0].outputs[0]
    assert text.token_ids == plain.token_ids
    with pytest.raises(OptionError, match='drafter: there is no drafter "mtb"; choose one of off, '):
        LLM(device="cpu", drafter="mtb")  # type: ignore[arg-type]


def test_draft_files(tmp_path: Path) -> None:
    data = Path(__file__).parents[3] / "tests" / "data" / "drafters"
    for name in ["eagle3.gguf", "eagle3-drafter.gguf"]:
        (tmp_path / name).write_bytes(lzma.decompress((data / f"{name}.xz").read_bytes()))
    model, draft = tmp_path / "eagle3.gguf", tmp_path / "eagle3-drafter.gguf"
    prompt = [1, 200, 253, 88, 307, 281, 94]
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    plain = LLM(model, device="cpu", drafter="off").generate(prompt, params, use_tqdm=False)[0].outputs[0]
    drafted = LLM(model, device="cpu", draft_model=draft).generate(prompt, params, use_tqdm=False)[0].outputs[0]
    assert drafted.token_ids == plain.token_ids
    with pytest.raises(OptionError, match="eagle3"):
        LLM(model, device="cpu", draft_model=draft, drafter="ngram")
