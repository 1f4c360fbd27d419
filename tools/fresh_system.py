"""Fresh systems in folders, and a stand-in for the address of releases, for the tools that try a release as its users do."""

import functools
import hashlib
import http.server
import json
import os
import pathlib
import platform
import re
import shutil
import subprocess
import sys
import threading

ROOT = pathlib.Path(__file__).resolve().parent.parent
WORK = pathlib.Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target")).resolve() / "packages"
MIRROR = os.environ.get("DEBIAN_MIRROR", "http://deb.debian.org/debian")
MACHINE = platform.machine()


def fail(message):
    raise SystemExit(f"{sys.argv[0]}: {message}")


class Checks:
    """Counts what holds, and ends the program at the first thing that does not."""

    passed = 0

    @classmethod
    def check(cls, what, holds, details=""):
        if not holds:
            fail(f"failed: {what}\n{details}")
        cls.passed += 1
        print(f"ok: {what}", flush=True)


def need(*programs):
    """Ends the program unless it runs as root and finds these programs."""
    missing = [program for program in programs if shutil.which(program) is None]
    if os.geteuid() != 0 or missing:
        fail(f"needs root and {', '.join(missing) or 'nothing else'}: apt-get install debootstrap bubblewrap busybox-static shellcheck")


def debian(name, release, packages):
    """Makes the root `name` with a release of Debian and packages beside those that every Debian has, unless it is there."""
    root = WORK / "roots" / name
    if (root / "complete").exists():
        return
    shutil.rmtree(root, ignore_errors=True)
    print(f"making a root with Debian {release}", flush=True)
    log = WORK / f"{name}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as file:
        command = ["debootstrap", "--variant=minbase", f"--include={packages}", release, root, MIRROR]
        if subprocess.run(command, stdout=file, stderr=file).returncode != 0:
            fail(f"debootstrap failed, see {log}")
    (root / "complete").touch()


def busybox():
    """Makes a root that has busybox, statically linked, and nothing else."""
    root = WORK / "roots" / "busybox"
    shutil.rmtree(root, ignore_errors=True)
    for folder in ("bin", "tmp", "proc", "dev", "run", "root", "home/user", "etc"):
        (root / folder).mkdir(parents=True)
    shutil.copy(shutil.which("busybox"), root / "bin/busybox")
    subprocess.run(["bwrap", "--bind", root, "/", "/bin/busybox", "--install", "-s", "/bin"], check=True)


class System:
    """A copy of a root, and commands in it; one at a time. `environment`: variables; `options`: more arguments of bwrap."""

    def __init__(self, name, environment=(), options=()):
        self.name, self.root = name, WORK / "now"
        self.environment, self.options = dict(environment), list(options)
        System.remove()
        subprocess.run(["cp", "-a", WORK / "roots" / name, self.root], check=True)

    @staticmethod
    def remove():
        shutil.rmtree(WORK / "now", ignore_errors=True)

    def arguments(self, command, user=None, shell="sh"):
        """The command line that runs `command` here, as root or the user with this number."""
        out = ["bwrap", "--bind", self.root, "/", "--proc", "/proc", "--dev", "/dev", "--tmpfs", "/run", "--unshare-pid", "--die-with-parent"]
        out += [*self.options, "--cap-add", "ALL", "--clearenv"]
        environment = {
            "DEBIAN_FRONTEND": "noninteractive",
            "HOME": "/root" if user is None else "/home/user",
            "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
            **self.environment,
        }
        for name, value in environment.items():
            out += ["--setenv", name, value]
        if user is not None:
            out += ["setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups"]
        return [*out, shell, "-c", command]

    def run(self, command, user=None, shell="sh", timeout=300):
        return subprocess.run(self.arguments(command, user, shell), capture_output=True, text=True, timeout=timeout)

    def succeeds(self, what, command, contains="", user=None, shell="sh"):
        done = self.run(command, user, shell)
        output = done.stdout + done.stderr
        Checks.check(f"{self.name}: {what}", done.returncode == 0 and contains in output, f"$ {command}\n{output}")

    def fails(self, what, command, contains, user=None, shell="sh"):
        done = self.run(command, user, shell)
        output = done.stdout + done.stderr
        Checks.check(f"{self.name}: {what}", done.returncode != 0 and contains in output, f"$ {command}\n{output}")

    def exists(self, path):
        return os.path.lexists(self.root / path.lstrip("/"))


class Release(http.server.SimpleHTTPRequestHandler):
    """The stand-in: OWNER/metal-attention/releases/{latest/download,download/vVERSION}/FILE."""

    damaged = False

    def translate_path(self, path):
        match = re.fullmatch(r"/owner/metal-attention/releases/(?:latest/download|download/v\d+\.\d+\.\d+)/([\w.-]+)", path)
        if match and self.damaged and match[1].endswith(".tar.gz"):
            return str(WORK / "damaged")
        return str(pathlib.Path(self.directory) / (match[1] if match and "v9.9.9" not in path else "there-is-no-such-file"))

    def log_message(self, *_):
        pass


class Hub(http.server.BaseHTTPRequestHandler):
    """A stand-in for the Hugging Face hub: every repository has the same model, as NAME-Q4_K_M.gguf and as NAME-Q8_0.gguf."""

    model = ROOT / "models/stories260K.gguf"
    commit = "0" * 40

    def do_GET(self):
        data = self.model.read_bytes()
        if match := re.match(r"/api/models/[^/]+/([^/]+)/revision/main\b", self.path):
            large = {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data)}
            names = [f"{match[1].removesuffix('-GGUF')}-{kind}.gguf" for kind in ("Q4_K_M", "Q8_0")]
            files = [{"rfilename": name, "size": len(data), "lfs": large} for name in names]
            self.answer(200, json.dumps({"sha": self.commit, "siblings": files}).encode())
        elif re.match(rf"/[^/]+/[^/]+/resolve/{self.commit}/[^/]+\.gguf$", self.path):
            start = int(re.match(r"bytes=(\d+)-$", self.headers["range"])[1]) if "range" in self.headers else 0
            self.answer(206 if start else 200, data[start:], {"content-range": f"bytes {start}-{len(data) - 1}/{len(data)}"} if start else {})
        else:
            self.answer(404, b"")

    def answer(self, status, data, headers=()):
        self.send_response(status)
        for name, value in {"content-length": str(len(data)), **dict(headers)}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_):
        pass


def served(handler, host="127.0.0.1"):
    """Starts a server on this machine; returns its address."""
    server = http.server.ThreadingHTTPServer((host, 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return f"http://{host}:{server.server_port}"


def make_release(binaries, *options):
    """Makes a release of these programs; returns its folder and the address where it is served."""
    release = WORK / "release"
    shutil.rmtree(release, ignore_errors=True)
    (WORK / "damaged").write_bytes(b"not an archive")
    address = f"{served(functools.partial(Release, directory=release))}/owner/metal-attention"
    command = [sys.executable, ROOT / "tools/release/make", "--binaries", binaries, "--out", release, "--address", address, *options]
    if subprocess.run(command).returncode != 0:
        fail("tools/release/make failed")
    return release, address
