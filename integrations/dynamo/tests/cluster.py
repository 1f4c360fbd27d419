#!/usr/bin/env python3
"""One frontend of Dynamo and two workers on the built-in model: migrated requests, restarted workers, cached prompts.

usage: cluster.py WORKER [SCENARIO ...]
WORKER is the program metal-attention-dynamo; without a SCENARIO, all that are named at the end of this file are run.
"""

import contextlib
import http.client
import json
import os
import pathlib
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback

# A delay for each token, so that a worker can be killed within a text.
TOKEN_DELAY_MS = 20
MODEL = "stories"
PAGE = 64


class Failure(Exception):
    """A wait has timed out."""


def free_port():
    """A free port below 32768, since Dynamo stores that of the status server in a signed 16-bit integer."""
    while True:
        with socket.socket() as s, contextlib.suppress(OSError):
            s.bind(("127.0.0.1", random.randrange(16384, 32768)))
            return s.getsockname()[1]


def wait_for(what, is_so, seconds=60):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if result := is_so():
            return result
        time.sleep(0.1)
    raise Failure(f"waited {seconds} s in vain for {what}")


def get(port, path):
    """The body of a response with status 200, otherwise None."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    with contextlib.closing(connection), contextlib.suppress(OSError, http.client.HTTPException):
        connection.request("GET", path)
        answer = connection.getresponse()
        body = answer.read()
        return body.decode() if answer.status == 200 else None


class Process:
    """A process that writes its log to a file."""

    def __init__(self, name, command, environment, logs):
        self.log = logs / f"{name}.log"
        with open(self.log, "ab") as log:
            self.process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)

    def end(self, sig):
        self.process.send_signal(sig)
        return self.process.wait(60)


class Worker(Process):
    def __init__(self, name, command, environment, logs):
        self.name = name
        self.port = free_port()
        super().__init__(name, command, environment | {"DYN_SYSTEM_PORT": str(self.port)}, logs)
        wait_for(f"{name} to serve", lambda: self.process.poll() is not None or self.serves())
        assert self.process.poll() is None, f"the worker {name} ended with exit code {self.process.poll()}"

    def serves(self):
        return self.metric("dynamo_component_inflight_requests") is not None

    def metric(self, name):
        """The sum of a metric over the endpoint `generate`."""
        lines = (get(self.port, "/metrics") or "").splitlines()
        values = [float(line.rsplit(" ", 1)[1]) for line in lines
                  if line.startswith(name + "{") and 'dynamo_endpoint="generate"' in line]
        return sum(values) if values else None

    def in_flight(self):
        return self.metric("dynamo_component_inflight_requests") or 0

    def served(self):
        return self.metric("dynamo_component_requests_total") or 0


class Answer:
    """A streamed completion: its text so far, and the usage and finish reason at its end."""

    def __init__(self, port, request):
        self.text, self.n_chunks, self.reason, self.usage, self.error = "", 0, None, None, None
        self.longest_gap = 0.0
        self.thread = threading.Thread(target=self.read, args=(port, request))
        self.thread.start()

    def read(self, port, request):
        try:
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
            body = request | {"model": MODEL, "stream": True, "stream_options": {"include_usage": True}}
            connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
            answer = connection.getresponse()
            if answer.status != 200:
                raise RuntimeError(f"status {answer.status}: {answer.read().decode()}")
            last = None
            for line in answer:
                if line.startswith(b"event: error"):
                    raise RuntimeError(answer.read().decode())
                if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
                    continue
                event = json.loads(line[6:])
                if "error" in event:
                    raise RuntimeError(line.decode())
                self.usage = event.get("usage") or self.usage
                for choice in event["choices"]:
                    now = time.monotonic()
                    if last is not None:
                        self.longest_gap = max(self.longest_gap, now - last)
                    last = now
                    self.n_chunks += 1
                    self.text += choice.get("text") or ""
                    self.reason = choice.get("finish_reason") or self.reason
        except Exception as why:  # reported when the result is read
            self.error = repr(why)

    def done(self):
        self.thread.join(120)
        assert self.error is None, self.error
        assert not self.thread.is_alive(), "the answer does not end"
        return self

    def wait_for_tokens(self, n):
        wait_for(f"token {n}", lambda: self.n_chunks >= n or self.error)
        assert self.error is None, self.error

    def same_as(self, other, n_tokens):
        self.done()
        assert self.text == other.text, f"another text:\n{other.text!r}\n{self.text!r}"
        assert self.reason == other.reason == "length", (self.reason, other.reason)
        for usage in (self.usage, other.usage):
            assert usage["completion_tokens"] == n_tokens, usage
            assert usage["prompt_tokens"] == other.usage["prompt_tokens"], usage
            assert usage["total_tokens"] == usage["prompt_tokens"] + n_tokens, usage


class Cluster:
    def __init__(self, program, root):
        self.command = [program, "--alias", MODEL, "--device", "cpu", "--threads", "1",
                        "--ctx-size", "512", "--parallel", "16", "--token-delay", str(TOKEN_DELAY_MS)]
        local = ["DYN_TCP_RPC_HOST", "DYN_TCP_RESPONSE_STREAM_HOST", "DYN_EVENT_PLANE_HOST", "DYN_SYSTEM_HOST",
                 "DYN_HTTP_HOST"]
        self.environment = os.environ | {name: "127.0.0.1" for name in local} | {
            "DYN_FILE_KV": str(root / "discovery"),
            "DYN_DISCOVERY_BACKEND": "file",
            "DYN_REQUEST_PLANE": "tcp",
            "DYN_EVENT_PLANE": "zmq",
            "DYN_WORKER_GRACEFUL_SHUTDOWN_TIMEOUT": "30",
            "DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS": "1",
            "HOME": str(root),
            "HF_HUB_OFFLINE": "1",
        }
        self.logs = root
        self.workers = []
        self.port = free_port()
        frontend = [sys.executable, "-m", "dynamo.frontend", "--http-port", str(self.port), "--router-mode", "kv",
                    "--kv-cache-block-size", str(PAGE), "--migration-limit", "3"]
        self.frontend = Process("frontend", frontend, self.environment, root)

    def add_worker(self, name, **environment):
        worker = Worker(name, self.command, self.environment | environment, self.logs)
        self.workers.append(worker)
        return worker

    def wait_until_ready(self):
        wait_for("the frontend to know the model", lambda: MODEL in (get(self.port, "/v1/models") or ""))

    def ask(self, prompt, n_tokens, **options):
        return Answer(self.port, {"prompt": prompt, "max_tokens": n_tokens, "ignore_eos": True} | options)

    def busy(self):
        """The workers with requests in flight."""
        return [worker for worker in self.workers if worker.in_flight() > 0]

    def kill(self, worker):
        worker.end(signal.SIGKILL)
        self.workers.remove(worker)

    def end(self):
        for process in [*self.workers, self.frontend]:
            process.process.kill()
            process.process.wait()


def report(line):
    print(f"cluster: {line}", flush=True)


def one_text_moves(cluster):
    """SIGKILL at token 80: the migrated request has the same text, and the right usage and finish reason."""
    for name, options in {"greedy": {"temperature": 0}, "seeded": {"temperature": 1.1, "seed": 7},
                          "penalised": {"temperature": 1.0, "seed": 8, "frequency_penalty": 0.5,
                                        "presence_penalty": 0.5}}.items():
        prompt = "Once upon a time, there was a little girl"
        alone = cluster.ask(prompt, 200, **options).done()
        moved = cluster.ask(prompt, 200, **options)
        moved.wait_for_tokens(80)
        [worker] = cluster.busy()
        cluster.kill(worker)
        moved.same_as(alone, 200)
        report(f"a {name} text moved at token 80: longest gap {moved.longest_gap * 1000:.0f} ms")
        cluster.add_worker(f"{worker.name}'")


def many_texts_move(cluster, n=24):
    def ask(i):
        sampling = {"temperature": 0} if i % 2 else {"temperature": 1.0, "seed": i}
        return cluster.ask(f"Tom and Lily had {i} red balls. One day", 120, **sampling)

    alone = [ask(i).done() for i in range(2)] + [answer.done() for answer in [ask(i) for i in range(2, n)]]
    moved = [ask(i) for i in range(n)]
    for answer in moved:
        answer.wait_for_tokens(20)
    assert len(cluster.busy()) == 2, "both workers have some of the texts"
    worker = cluster.workers[0]
    n_moved = worker.in_flight()
    cluster.kill(worker)
    for one, other in zip(moved, alone, strict=True):
        one.same_as(other, 120)
    gap = max(answer.longest_gap for answer in moved)
    report(f"{n} texts at once, {n_moved:.0f} of them moved: longest gap {gap * 1000:.0f} ms")


def a_worker_comes_back(cluster):
    cluster.kill(cluster.workers[0])
    worker = cluster.add_worker("c")

    def is_used():
        answers = [cluster.ask(f"A worker came {i} times back", 10, temperature=0) for i in range(8)]
        for answer in answers:
            answer.done()
        return worker.served() > 0

    wait_for("the worker that came back to be used", is_used)
    report("a worker that came back is used again")


def a_worker_ends_in_peace(cluster):
    """SIGTERM: the worker finishes its running requests."""
    options = {"temperature": 0.9, "seed": 3}
    alone = cluster.ask("The sun was hot", 200, **options).done()
    answer = cluster.ask("The sun was hot", 200, **options)
    answer.wait_for_tokens(20)
    [worker] = cluster.busy()
    [other] = [other for other in cluster.workers if other is not worker]
    before = other.served() + other.in_flight()
    code = worker.end(signal.SIGTERM)
    cluster.workers.remove(worker)
    answer.same_as(alone, 200)
    assert code == 0, f"the worker ended with exit code {code}"
    assert other.served() + other.in_flight() == before, "the text was moved"
    report("SIGTERM finishes in place")


def a_worker_that_has_to_end_hands_its_texts_on(cluster):
    """SIGTERM with a short grace period: unfinished requests continue on the other worker."""
    options = {"temperature": 0.9, "seed": 4}
    alone = cluster.ask("The moon was bright", 300, **options).done()
    for worker in list(cluster.workers):
        cluster.kill(worker)
        # One second after the grace period.
        cluster.add_worker(f"{worker.name}'", DYN_WORKER_GRACEFUL_SHUTDOWN_TIMEOUT="3")
    answer = cluster.ask("The moon was bright", 300, **options)
    answer.wait_for_tokens(20)
    [worker] = cluster.busy()
    code = worker.end(signal.SIGTERM)
    cluster.workers.remove(worker)
    assert not answer.reason, "the text was finished in time"
    answer.same_as(alone, 300)
    assert code == 0, f"the worker ended with exit code {code}"
    report(f"a worker that has to end hands its text on: longest gap {answer.longest_gap * 1000:.0f} ms")


def prompts_go_where_their_pages_are(cluster, n_prompts=10, times=3):
    """Repeated long prompts are sent to the worker that evaluated them first."""
    def served():
        return [worker.served() for worker in cluster.workers]

    def prompt(i):
        return f"{i} was the number of the day. " + "The cat and the dog went to the park to play. " * 12

    def who(i):
        before = served()
        cluster.ask(prompt(i), 2, temperature=0).done()
        after = wait_for("the request to be counted", lambda: (now := served()) != before and now)
        [worker] = [i for i, (a, b) in enumerate(zip(before, after, strict=True)) if b > a]
        return worker

    first = [who(i) for i in range(n_prompts)]
    # The router is notified of the pages with a delay.
    time.sleep(1)
    right = 0
    for _ in range(times):
        right += sum(who(i) == first[i] for i in range(n_prompts))
    n = n_prompts * times
    report(f"{right} of {n} long prompts went to the worker that has their pages ({first.count(0)} and {first.count(1)})")
    assert right == n


def requests_are_refused(cluster):
    refused = cluster.ask("Once", 5, n=2)
    refused.thread.join()
    assert refused.error and "n: one text a request" in refused.error, refused.error
    report("what a worker cannot do is refused")


SCENARIOS = [
    prompts_go_where_their_pages_are,
    one_text_moves,
    many_texts_move,
    a_worker_comes_back,
    a_worker_ends_in_peace,
    a_worker_that_has_to_end_hands_its_texts_on,
    requests_are_refused,
]


def run(scenario, program):
    """Runs a scenario with a new frontend and two new workers. Returns whether it passed."""
    with tempfile.TemporaryDirectory() as root:
        cluster = Cluster(program, pathlib.Path(root))
        try:
            cluster.add_worker("a")
            cluster.add_worker("b")
            cluster.wait_until_ready()
            scenario(cluster)
            return True
        except (AssertionError, Failure, ValueError):
            traceback.print_exc()
            for log in sorted(pathlib.Path(root).glob("*.log")):
                lines = log.read_text(errors="replace").splitlines()[-20:]
                print(f"== {log.name}", *(line[:400] for line in lines), sep="\n", file=sys.stderr)
            return False
        finally:
            cluster.end()


def main():
    program, *names = sys.argv[1:]
    start = time.monotonic()
    chosen = [scenario for scenario in SCENARIOS if not names or scenario.__name__ in names]
    failed = [scenario.__name__ for scenario in chosen if not run(scenario, program)]
    if failed:
        raise SystemExit(f"cluster: failed: {', '.join(failed)}")
    report(f"all is well after {time.monotonic() - start:.0f} s")


if __name__ == "__main__":
    main()
