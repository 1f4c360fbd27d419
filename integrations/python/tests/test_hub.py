"""`LLM.from_hub`: models by name, from a local server in place of the Hugging Face hub."""

from __future__ import annotations

import hashlib
import http.server
import json
import pathlib
import threading
from collections.abc import Iterator

import pytest
from conftest import ROOT
from test_generate import GREEDY, STORY

from metal_attention import LLM, HubError

REPO = "tester/tiny-GGUF"
COMMIT = "0123456789abcdef0123456789abcdef01234567"
MODEL = (ROOT / "models/stories260K.gguf").read_bytes()


class Handler(http.server.BaseHTTPRequestHandler):
    """The hub's API for a repository with one file. `requests` has the paths that were requested."""

    requests: list[str] = []

    def do_GET(self) -> None:
        self.requests.append(self.path)
        if self.path.startswith(f"/api/models/{REPO}/"):
            sha = hashlib.sha256(MODEL).hexdigest()
            lfs = {"sha256": sha, "size": len(MODEL)}
            body = json.dumps({"sha": COMMIT, "siblings": [{"rfilename": "tiny-Q8_0.gguf", "size": len(MODEL), "lfs": lfs}]})
            self.answer(200, body.encode())
        elif self.path == f"/{REPO}/resolve/{COMMIT}/tiny-Q8_0.gguf":
            self.answer(200, MODEL)
        else:
            self.answer(404, b"{}")

    def answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> Iterator[list[str]]:
    """Starts a hub, sets the environment to use it, and yields the list of its requests."""
    Handler.requests = []
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_TOKEN", "HF_HUB_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    yield Handler.requests
    server.shutdown()


def test_a_model_is_downloaded_once(hub: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    llm = LLM.from_hub(f"{REPO}:Q8_0", device="cpu", n_parallel=1)
    assert llm.generate("Once upon a time", GREEDY, use_tqdm=False)[0].outputs[0].text == STORY
    assert "tiny-Q8_0.gguf: 100%" in capfd.readouterr().err
    assert len(hub) == 2
    for name in (REPO, f"{REPO}:tiny-Q8_0.gguf"):
        LLM.from_hub(name, device="cpu", n_parallel=1, use_tqdm=False)
    LLM(f"hf:{REPO}", device="cpu", n_parallel=1)
    assert len(hub) == 2 and "100%" not in capfd.readouterr().err


def test_missing_models_raise_errors(hub: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, why in ((f"{REPO}:Q2_K", "Q2_K"), ("tester/none", "tester/none"), ("no name", "no name")):
        with pytest.raises(HubError, match=why):
            LLM.from_hub(name)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(HubError, match="(?i)offline"):
        LLM.from_hub(REPO)
