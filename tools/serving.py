"""Starts `metal-attention serve`, and other programs, for the tools that test it."""

import contextlib
import os
import pathlib
import re
import subprocess
import threading
import time
import urllib.error
import urllib.request

ROOT = pathlib.Path(__file__).resolve().parent.parent


def binary():
    """The path of the program: $METAL_ATTENTION, or the latest build."""
    if named := os.environ.get("METAL_ATTENTION"):
        return named
    target = pathlib.Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target"))
    built = [path for path in (target / kind / "metal-attention" for kind in ("release", "debug")) if path.exists()]
    if not built:
        raise SystemExit("there is no program to test: run cargo build, or name one in METAL_ATTENTION")
    return str(max(built, key=lambda path: path.stat().st_mtime))


def run(command, **options):
    """The stdout of a command, which must succeed."""
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, **options)
    assert done.returncode == 0, f"{command[0]} ended with {done.returncode}: {done.stdout}{done.stderr}"
    return done.stdout


class Server:
    """A running server. `address_space`: its limit of address space in bytes."""

    def __init__(self, *arguments, port="0", address_space=None):
        command = [binary(), "serve", "--port", port, *arguments]
        if address_space:
            command = ["sh", "-c", f'ulimit -v {address_space // 1024}; exec "$0" "$@"', *command]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        self.log = []
        self.url = None
        while self.url is None:
            line = self.process.stderr.readline()
            if not line:
                raise SystemExit(f"the server did not start: {''.join(self.log)}")
            self.log.append(line)
            if match := re.search(r"listening on (http://\S+)", line):
                self.url = match[1]
        threading.Thread(target=lambda: self.log.extend(self.process.stderr), daemon=True).start()
        self.wait_until_ready()

    def wait_until_ready(self):
        for _ in range(600):
            try:
                urllib.request.urlopen(f"{self.url}/ready", timeout=5)
                return
            except (urllib.error.URLError, OSError):
                if self.process.poll() is not None:
                    raise SystemExit(f"the server ended: {''.join(self.log)}") from None
                time.sleep(0.1)
        raise SystemExit("the server did not get ready")


@contextlib.contextmanager
def serving(*arguments):
    """A server with these arguments. It must exit without an error after SIGTERM."""
    server = Server(*arguments)
    try:
        yield server
    finally:
        server.process.terminate()
        status = server.process.wait(timeout=30)
    if status != 0:
        raise SystemExit(f"the server ended with status {status}: {''.join(server.log)}")
