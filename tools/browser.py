"""A headless Chromium for the tools that test the page."""

import base64
import contextlib
import json
import os
import re
import shutil
import subprocess
import tempfile
import time
import urllib.request

from websockets.sync.client import connect

FLAGS = """--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking
--disable-component-update --disable-sync --remote-debugging-port=0 --remote-allow-origins=*""".split()


class Page:
    """A tab, by the DevTools protocol."""

    def __init__(self, port, address):
        request = urllib.request.Request(f"http://127.0.0.1:{port}/json/new?{address}", method="PUT")
        with urllib.request.urlopen(request) as answer:
            self.socket = connect(json.load(answer)["webSocketDebuggerUrl"], max_size=None).__enter__()
        self.n = 0
        self.problems = []
        self.requests = []
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method, **parameters):
        self.n += 1
        self.socket.send(json.dumps({"id": self.n, "method": method, "params": parameters}))
        while True:
            message = json.loads(self.socket.recv(timeout=30))
            if message.get("id") == self.n:
                assert "error" not in message, message
                return message["result"]
            self.notice(message)

    def notice(self, message):
        method, parameters = message["method"], message["params"]
        if method == "Runtime.exceptionThrown":
            self.problems.append(parameters["exceptionDetails"])
        elif method == "Log.entryAdded" and parameters["entry"]["level"] == "error":
            self.problems.append(parameters["entry"])
        elif method == "Network.requestWillBeSent":
            self.requests.append(parameters["request"]["url"])

    def run(self, script):
        """The value of a script."""
        result = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def until(self, script, what, seconds=30):
        end = time.time() + seconds
        while time.time() < end:
            if self.run(f"!!({script})"):
                return
            time.sleep(0.02)
        shown = self.run("document.getElementById('log').innerHTML + document.getElementById('status').textContent")
        raise AssertionError(f"{what}: not within {seconds} s: {shown} {self.problems}")

    def unlabelled(self):
        """The controls without a name for screen readers."""
        return self.run("""[...document.querySelectorAll("button, input, textarea, select, a")].filter((e) =>
            !(e.getAttribute("aria-label") || e.labels?.length || e.textContent.trim())).map((e) => e.outerHTML)""")

    def type(self, text):
        self.call("Input.insertText", text=text)

    def key(self, key, modifiers=0):
        codes = {"Enter": 13, "Tab": 9, "Escape": 27, " ": 32}
        text = {"Enter": "\r", " ": " "}.get(key)
        event = {"key": key, "code": "Space" if key == " " else key, "windowsVirtualKeyCode": codes[key], "modifiers": modifiers}
        self.call("Input.dispatchKeyEvent", type="keyDown", **event, **({"text": text} if text else {}))
        self.call("Input.dispatchKeyEvent", type="keyUp", **event)

    def size(self, width, height, mobile=False):
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=2 if mobile else 1, mobile=mobile)

    def throughput(self, limit):
        """Limits the download speed in bytes a second; -1: no limit."""
        self.call("Network.emulateNetworkConditions", offline=False, latency=0, downloadThroughput=limit, uploadThroughput=-1)

    def scheme(self, name):
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": name}])

    def shot(self, folder, name):
        if folder:
            os.makedirs(folder, exist_ok=True)
            data = self.call("Page.captureScreenshot", format="png")["data"]
            with open(os.path.join(folder, f"{name}.png"), "wb") as file:
                file.write(base64.b64decode(data))


@contextlib.contextmanager
def browsing():
    """A browser with an empty profile. Yields a function that opens an address in a new tab."""
    chromium = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
    if not chromium:
        raise SystemExit("there is no chromium to test the page with")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        browser = subprocess.Popen([chromium, *FLAGS, f"--user-data-dir={profile}"], stderr=subprocess.PIPE, text=True)
        try:
            line = next(line for line in browser.stderr if "DevTools listening on" in line)
            port = re.search(r"ws://[^:]+:(\d+)/", line)[1]
            yield lambda address: Page(port, address)
        finally:
            browser.terminate()
            browser.wait()
