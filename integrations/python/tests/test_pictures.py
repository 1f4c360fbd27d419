"""Pictures in prompts and chats, with a picture encoder of random weights for the built-in model."""

from __future__ import annotations

import base64
import io
import pathlib
import subprocess
from typing import Any

import pytest
from conftest import ROOT

from metal_attention import LLM, ModelError, OptionError, PromptError, RequestOutput, SamplingParams, TemplateError

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A folder with a model, its mmproj file, and two pictures."""
    path = tmp_path_factory.mktemp("pictures")
    example = ["cargo", "run", "-q", "-p", "metal-attention-testing", "--example", "write_models", "--"]
    subprocess.run([*example, str(path), "pictures"], cwd=ROOT, check=True)
    return path / "pictures"


@pytest.fixture(scope="module")
def seeing(folder: pathlib.Path) -> LLM:
    return LLM(folder / "tiny.gguf", mmproj=folder / "tiny-mmproj.gguf", device="cpu", n_parallel=2)


def logprobs(output: RequestOutput) -> list[tuple[int, float]]:
    """The ids and log probabilities of a text: random encoders change the latter more than the former."""
    told = output.outputs[0].logprobs
    assert told is not None
    return [(id, of[id].logprob) for id, of in zip(output.outputs[0].token_ids, told, strict=True)]


def written(llm: LLM, prompts: Any, **options: Any) -> list[list[tuple[int, float]]]:
    return [logprobs(output) for output in llm.generate(prompts, GREEDY, use_tqdm=False, **options)]


def address(file: pathlib.Path) -> str:
    return f"data:image/bmp;base64,{base64.b64encode(file.read_bytes()).decode()}"


def test_a_picture_changes_the_text(seeing: LLM, folder: pathlib.Path) -> None:
    one, two = folder / "1.bmp", folder / "2.bmp"
    first, second = written(seeing, ["Once upon", "Once upon"], images=[one, [two]])
    assert first != second and written(seeing, "Once upon") not in ([first], [second])
    assert written(seeing, "<image>Once upon", images=str(one)) == [first]
    # All ways to give a picture have the same result.
    for picture in (one.read_bytes(), bytearray(one.read_bytes()), address(one), [one], (one,)):
        assert written(seeing, "Once upon", images=picture) == [first]
    assert written(seeing, {"prompt": "Once upon", "multi_modal_data": {"image": one}}) == [first]
    assert "".join(part.text for part in seeing.stream("Once upon", GREEDY, images=one)) == seeing.generate(
        "Once upon", GREEDY, images=one, use_tqdm=False)[0].outputs[0].text
    # Its place is that in the text, and its rows are in the KV cache.
    output = seeing.generate("Once <image> upon <image>", GREEDY, images=[one, two], use_tqdm=False)[0]
    assert output.prompt_token_ids is not None and output.prompt_token_ids.count(0) == 8
    again = seeing.generate("Once <image> upon <image>", GREEDY, images=[one, two], use_tqdm=False)[0]
    assert again.num_cached_tokens is not None and again.num_cached_tokens >= 8
    assert again.outputs[0].text == output.outputs[0].text


def test_chats(seeing: LLM, folder: pathlib.Path) -> None:
    def parts(*pictures: dict[str, Any]) -> list[dict[str, Any]]:
        return [{"role": "user", "content": [*pictures, {"type": "text", "text": "What is this?"}]}]

    def text(messages: list[dict[str, Any]]) -> list[tuple[int, float]]:
        return logprobs(seeing.chat(messages, GREEDY, use_tqdm=False)[0])

    url = {"type": "image_url", "image_url": {"url": address(folder / "1.bmp")}}
    prompt, prompt_ids = seeing.chat_prompt(parts(url))
    assert "<image>What is this?" in prompt and prompt_ids.count(0) == 4
    first = text(parts(url))
    for same in (
        {"type": "input_image", "image_url": address(folder / "1.bmp")},
        {"type": "image", "image": folder / "1.bmp"},
        {"type": "image", "image": (folder / "1.bmp").read_bytes()},
    ):
        assert text(parts(same)) == first
    other = text(parts({"type": "image", "image": folder / "2.bmp"}))
    assert other != first and text(parts(url)) == first
    assert text([{"role": "user", "content": "What is this?"}]) != first
    assert len(list(seeing.chat_stream(parts(url, url), GREEDY))) > 0
    # Messages may come from others: they name no files.
    for named in (str(folder / "1.bmp"), "file:///1.bmp", "https://localhost/1.png"):
        with pytest.raises(PromptError, match="data: address"):
            seeing.chat(parts({"type": "image_url", "image_url": {"url": named}}), GREEDY)
    with pytest.raises(TemplateError, match="has no picture"):
        seeing.chat(parts({"type": "image_url"}), GREEDY)


def test_images_of_pillow(seeing: LLM, folder: pathlib.Path) -> None:
    class Image:
        """What Pillow's images have of it."""

        def convert(self, mode: str) -> Image:
            assert mode == "RGB"
            return self

        def save(self, file: io.BytesIO, format: str) -> None:
            assert format == "PNG"
            file.write((folder / "1.bmp").read_bytes())

    assert written(seeing, "Once upon", images=Image()) == written(seeing, "Once upon", images=folder / "1.bmp")
    message = {"role": "user", "content": [{"type": "image_pil", "image_pil": Image()}]}
    assert seeing.chat_prompt([message])[1].count(0) == 4


def test_errors(seeing: LLM, llm: LLM, folder: pathlib.Path) -> None:
    one = folder / "1.bmp"
    with pytest.raises(ModelError, match="mmproj"):
        llm.generate("Once", GREEDY, images=one)
    with pytest.raises(ModelError, match="mmproj"):
        llm.chat([{"role": "user", "content": [{"type": "image", "image": one}]}], GREEDY)
    for damaged in (one.read_bytes()[:40], b"", b"no picture"):
        with pytest.raises(PromptError, match="a picture: "):
            seeing.generate("Once", GREEDY, images=damaged)
    for wrong in ("data:image/png,abc", "data:;base64,?"):
        with pytest.raises(PromptError, match="Base64"):
            seeing.generate("Once", GREEDY, images=wrong)
    with pytest.raises(OptionError, match="not fetched"):
        seeing.generate("Once", GREEDY, images="https://localhost/1.png")
    with pytest.raises(FileNotFoundError):
        seeing.generate("Once", GREEDY, images="nothing.png")
    with pytest.raises(TypeError, match="a picture is"):
        seeing.generate("Once", GREEDY, images=5)
    with pytest.raises(PromptError, match="2 places"):
        seeing.generate("<image><image>", GREEDY, images=one)
    with pytest.raises(OptionError, match="2 prompts, but images for 1"):
        seeing.generate(["Once", "Twice"], GREEDY, images=[one])
    with pytest.raises(PromptError, match="not as token ids"):
        seeing.generate([1, 2], GREEDY, images=one)
    with pytest.raises(PromptError, match="audio"):
        seeing.generate({"prompt": "Once", "multi_modal_data": {"audio": b""}}, GREEDY)
    with pytest.raises(PromptError, match="texts and chats"):
        seeing.logits({"prompt": "Once", "multi_modal_data": {"image": one}})
    with pytest.raises(PromptError, match="log probabilities"):
        seeing.generate("Once", SamplingParams(prompt_logprobs=1), images=one)
    with pytest.raises(ModelError):
        LLM(folder / "tiny.gguf", mmproj=folder / "nothing.gguf", device="cpu")
    with pytest.raises(ModelError):
        LLM(folder / "tiny.gguf", mmproj=folder / "tiny.gguf", device="cpu")
