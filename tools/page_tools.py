"""Tests of tools on the server's page: the list of an MCP server, consent, calls and results. Only the model's answers are scripted."""

import contextlib
import http.server
import json
import pathlib
import tempfile
import threading

from page_trouble import Tab
from serving import serving

TEXT = {"type": "object", "properties": {"text": {"type": "string"}}}


class Mcp(http.server.BaseHTTPRequestHandler):
    """An MCP server over HTTP with two tools, one of which fails."""

    calls = []

    def do_POST(self):
        message = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        result = self.result(message["method"], message.get("params", {}))
        body = json.dumps({"jsonrpc": "2.0", "id": message.get("id"), "result": result}).encode() if "id" in message else b""
        self.send_response(200 if body else 202)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def result(self, method, params):
        if method == "initialize":
            return {"protocolVersion": "2025-06-18", "capabilities": {"tools": {}}, "serverInfo": {"name": "test", "version": "1"}}
        if method == "tools/list":
            return {"tools": [{"name": name, "inputSchema": TEXT} for name in ("echo", "fail")]}
        if method == "tools/call":
            self.calls.append(params)
            text = params["arguments"].get("text", "")
            return {"content": [{"type": "text", "text": text}], "isError": params["name"] == "fail"}
        return {}

    def log_message(self, *_):
        pass


@contextlib.contextmanager
def serving_tools():
    """Starts a server whose page has the tools of `Mcp` and of a missing program. Returns its address."""
    mcp = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Mcp)
    threading.Thread(target=mcp.serve_forever, daemon=True).start()
    with tempfile.TemporaryDirectory() as folder:
        config = pathlib.Path(folder, "config.toml")
        config.write_text(f'[mcp.servers.notes]\nurl = "http://127.0.0.1:{mcp.server_port}/mcp"\n[mcp.servers.broken]\ncommand = "/nowhere"\n')
        with serving("--device", "cpu", "--config", str(config)) as server:
            yield server.url
    mcp.shutdown()


def answer(t, call=None, text=""):
    """Ends the answer with a text, or with a call (name and arguments)."""
    pieces = [json.dumps({"content": text})] if text else []
    if call:
        name, arguments = call
        half = len(arguments) // 2
        pieces.append(json.dumps({"tool_calls": [{"index": 0, "id": "call1", "function": {"name": name, "arguments": arguments[:half]}}]}))
        pieces.append(json.dumps({"tool_calls": [{"index": 0, "function": {"arguments": arguments[half:]}}]}))
    for piece in pieces:
        t.run(f"answers.at(-1).event({{choices: [{{index: 0, delta: {piece}, finish_reason: null}}]}})")
    t.run(f"answers.at(-1).end({json.dumps('tool_calls' if call else 'stop')})")


def until_asked(t, n):
    t.until(f"asked.length == {n}", f"request {n}")
    return t.run("asked.at(-1)")


def until_done(t):
    t.until("document.getElementById('log').getAttribute('aria-busy') == 'false'", "the end")


CONSENT = "document.querySelector('.consent')"


def check_list(t, shots):
    """The settings list the servers. No tool is offered until its server is enabled."""
    t.ask("hello")
    assert t.run("offered.at(-1)") is None
    answer(t, text="hi")
    until_done(t)
    t.click("open-settings")
    t.until("document.querySelector('#servers input')", "the servers")
    shown = t.run("document.getElementById('servers').innerText")
    assert "notes" in shown and "echo, fail" in shown and "broken" in shown and "cannot start" in shown, shown
    t.run("document.querySelector('#servers input[value=notes]').click()")
    t.run("document.getElementById('tools').scrollIntoView()")
    t.page.shot(shots, "tools-settings")
    t.run("document.getElementById('settings').close()")
    t.load()
    assert t.run("JSON.parse(localStorage.settings).servers") == ["notes"]


def check_consent(t, shots):
    """Each call is shown with all arguments and waits for consent. The tool's result is sent to the model."""
    t.click("new")
    t.ask("say it")
    names = [f["function"]["name"] for f in t.run("offered.at(-1)")]
    assert names == ["echo", "fail"], names
    n = t.run("asked.length")
    answer(t, ("echo", json.dumps({"text": "one <b>\u202e\n" + "long " * 500})), text="I call a tool.")
    t.until(CONSENT, "the question for consent")
    t.page.shot(shots, "tools-consent")
    shown = t.run(f"{CONSENT}.textContent")
    assert "Call echo of the server notes?" in shown and "<b>\\u202e\\n" in shown and shown.count("long") == 500, shown
    assert t.run(f"document.activeElement == {CONSENT}"), "the question has the focus, and none of its buttons"
    for key in ("Enter", " "):
        t.page.key(key)
    assert t.run(f"!!{CONSENT}") and Mcp.calls == [], "nothing is called without consent"
    t.click("Allow once")
    messages = until_asked(t, n + 1)
    call = {"id": "call1", "type": "function", "function": {"name": "echo", "arguments": messages[1]["tool_calls"][0]["function"]["arguments"]}}
    assert messages[1] == {"role": "assistant", "content": "I call a tool.", "tool_calls": [call]}, messages[1]
    assert (messages[2]["role"], messages[2]["tool_call_id"]) == ("tool", "call1")
    assert messages[2]["content"].startswith("one <b>\u202e\nlong ") and len(Mcp.calls) == 1
    answer(t, ("echo", '{"text": "two"}'))
    # Consent for one call covers one call. The question does not take the focus while the user types.
    t.until(CONSENT, "the question for consent")
    t.click("Always allow")
    until_asked(t, n + 2)
    answer(t, ("echo", '{"text": "three"}'))
    messages = until_asked(t, n + 3)
    assert [m["content"] for m in messages if m["role"] == "tool"][1:] == ["two", "three"] and not t.run(f"!!{CONSENT}")
    answer(t, text="**done**")
    until_done(t)
    t.run("document.querySelectorAll('details.call').forEach((d) => { d.open = true; })")
    t.page.shot(shots, "tools-done")
    # The result is stored and sent with the next question.
    t.load()
    assert t.run("document.querySelectorAll('.call').length") == 3 and not t.run("document.querySelector('.call b')")
    t.ask("and again")
    roles = [m["role"] for m in t.run("asked.at(-1)")]
    assert roles == ["user", "assistant", "tool", "assistant", "tool", "assistant", "tool", "assistant", "user"], roles
    answer(t, text="yes")
    until_done(t)


def check_refusals(t):
    """Rejected, unknown and damaged calls are not made. The model gets a message about them and about failures. Stopping calls nothing."""
    t.click("new")
    n_calls = len(Mcp.calls)
    t.ask("do it")
    n = t.run("asked.length")
    t.run("document.getElementById('input').value = 'a draft'; document.getElementById('input').focus()")
    answer(t, ("fail", "{}"))
    t.until(CONSENT, "the question for consent")
    assert t.run("document.activeElement.id") == "input", "the focus is left where something is typed"
    t.click("Refuse")
    for i, (call, result) in enumerate([
        (("none", "{}"), "The user does not want this call. Do not repeat it."),
        (("echo", "[1]"), "There is no tool none."),
        (("echo", "{broken"), "The tool was not called: its arguments are no JSON object."),
        (None, "The tool was not called: its arguments are no JSON object."),
    ]):
        assert until_asked(t, n + 1 + i)[-1]["content"] == result
        if call:
            answer(t, call)
    assert len(Mcp.calls) == n_calls
    answer(t, ("fail", '{"text": "no luck"}'))
    t.click("Allow once")
    assert until_asked(t, n + 5)[-1]["content"] == "The tool failed: no luck"
    answer(t, ("fail", "{}"))
    t.until(CONSENT, "the question for consent")
    t.click("stop")
    until_done(t)
    assert not t.run(f"!!{CONSENT}") and t.run("document.querySelector('.message:last-child .cut').textContent") == "Stopped before its end."
    assert len(Mcp.calls) == n_calls + 1
    t.ask("go on")
    assert t.run("asked.at(-1)")[-2]["content"] == "The tool was not called."
    answer(t, text="yes")
    until_done(t)


def check_rounds(t):
    """A limit ends a conversation in which the model only calls tools."""
    t.click("new")
    t.ask("forever")
    n = t.run("asked.length")
    for i in range(20):
        until_asked(t, n + i)
        answer(t, ("echo", json.dumps({"text": str(i)})))
    until_done(t)
    assert t.run("asked.length") == n + 19
    assert "called tools 20 times in a row" in t.run("document.querySelector('.message:last-child .cut').textContent")


def check(tab, shots):
    """Runs all tests of this file."""
    with serving_tools() as url:
        t = Tab(tab, url)
        t.fresh()
        check_list(t, shots)
        check_consent(t, shots)
        check_refusals(t)
        check_rounds(t)
        t.close()
