"""Tests of the server's page in situations in which it could lose text or fail: two conversations at once, two tabs, a full context,
interrupted answers, storage with arbitrary content. Most of them use scripted answers in place of the server's."""

import json
import time

from serving import Server

# In place of the server's answers: `answers[i]` writes the answer to the page's i-th question, which is `asked[i]`, with the tools
# `offered[i]`.
SCRIPTED = r"""
window.asked = []; window.offered = []; window.answers = []; window.refusals = [];
{
  const real = window.fetch;
  window.fetch = (url, options) => {
    if (!String(url).endsWith("chat/completions")) return real(url, options);
    const request = JSON.parse(options.body);
    asked.push(request.messages);
    offered.push(request.tools ?? null);
    const refusal = refusals.shift();
    if (refusal) return refusal.status ? Promise.resolve(new Response(refusal.body, refusal)) : Promise.reject(new TypeError("no route"));
    let out;
    const body = new ReadableStream({ start(controller) { out = controller; } });
    options.signal.addEventListener("abort", () => out.error(options.signal.reason));
    const raw = (text) => out.enqueue(new TextEncoder().encode(text));
    const event = (value) => raw(`data: ${JSON.stringify(value)}\n\n`);
    const choice = (delta, finish_reason = null) => event({ choices: [{ index: 0, delta, finish_reason }] });
    answers.push({
      raw, event, text: (content) => choice({ content }), think: (reasoning_content) => choice({ reasoning_content }),
      end: (reason = "stop") => { choice({}, reason); raw("data: [DONE]\n\n"); out.close(); },
      close: () => out.close(), lose: () => out.error(new TypeError("network error")), stopped: () => options.signal.aborted,
    });
    return Promise.resolve(new Response(body));
  };
}
"""
LOG = "document.getElementById('log').textContent"
KEYS = "Object.keys(localStorage).filter((key) => key.startsWith('chat/'))"


class Tab:
    """A tab whose requests are answered by the script above."""

    def __init__(self, tab, url, before=""):
        self.page = tab("about:blank")
        self.url = url
        self.page.call("Page.addScriptToEvaluateOnNewDocument", source=SCRIPTED)
        if before:
            self.page.call("Page.addScriptToEvaluateOnNewDocument", source=before)
        self.load()

    def load(self):
        self.page.run("window.isOld = true")
        self.page.call("Page.navigate", url=f"{self.url}/")
        self.page.until("!window.isOld && document.readyState == 'complete' && document.getElementById('conversations')?.options.length",
                        "the page")

    def run(self, script):
        return self.page.run(script)

    def until(self, script, what, seconds=20):
        self.page.until(script, what, seconds)

    def worked(self, script):
        """The CPU time of a script in seconds, which does not depend on the machine's load, and its value."""
        spent = lambda: next(m["value"] for m in self.page.call("Performance.getMetrics")["metrics"] if m["name"] == "ThreadTime")
        before = spent()
        value = self.run(script)
        return spent() - before, value

    def ask(self, text):
        n = self.run("asked.length")
        self.run(f"document.getElementById('input').value = {json.dumps(text)}; document.getElementById('input').dispatchEvent(new Event('input'));"
                 "document.getElementById('send').click()")
        self.until(f"asked.length == {n + 1}", "the question")

    def log(self):
        return self.run(LOG)

    def sees(self, text):
        self.until(f"{LOG}.includes({json.dumps(text)})", f"to see {text!r}")

    def click(self, name, n=0):
        """Clicks the element with this id, or the n-th visible button of this name."""
        self.until(f"""(() => {{ const named = document.getElementById({json.dumps(name)}) ?? [...document.querySelectorAll("button")].filter((b) =>
            [b.textContent, b.title].includes({json.dumps(name)}) && b.checkVisibility()).at({n}); named?.click(); return named; }})()""", f"to click {name}")

    def turn_to(self, n):
        self.run(f"document.getElementById('conversations').selectedIndex = {n}; document.getElementById('conversations').dispatchEvent(new Event('change'))")

    def titles(self):
        return self.run("[...document.getElementById('conversations').options].map((o) => o.textContent)")

    def asked(self, n=-1):
        """The messages that the page sent: roles and texts."""
        return [(m["role"], m["content"]) for m in self.run(f"asked.at({n})")]

    def answered(self, question, answer):
        self.ask(question)
        self.run(f"answers.at(-1).text({json.dumps(answer)}); answers.at(-1).end()")
        self.until("document.getElementById('log').getAttribute('aria-busy') == 'false'", "the end")

    def fresh(self):
        """Opens an empty page without stored conversations."""
        self.run("sessionStorage.clear(); localStorage.clear(); for (const name of ['pagehide', 'visibilitychange']) "
                 "for (const at of [window, document]) at.addEventListener(name, (event) => event.stopImmediatePropagation(), true)")
        self.load()

    def close(self):
        assert not self.page.problems, self.page.problems
        self.page.call("Page.close")


def check_conversations(tab, url):
    """An answer is added to its conversation, whichever one is shown. Conversations and messages are removed only on request."""
    t = Tab(tab, url)
    t.fresh()
    t.ask("question one")
    t.run("answers[0].text('first part')")
    t.sees("first part")
    t.click("new")
    assert t.log() == "", "a new conversation is empty"
    t.ask("question two")
    assert t.asked() == [("user", "question two")], "nothing of the other conversation is asked"
    t.run("answers[0].text(', first end'); answers[1].text('second part')")
    t.sees("second part")
    assert "first" not in t.log(), "an answer came into another conversation"
    t.run("answers[0].end(); answers[1].end()")
    t.until("document.getElementById('log').getAttribute('aria-busy') == 'false'", "the end")
    assert t.titles() == ["question two", "question one"], t.titles()
    t.turn_to(1)
    assert "first part, first end" in t.log() and "second" not in t.log(), t.log()
    assert not t.run("document.querySelector('.cut')"), "it is whole"
    t.load()
    assert "first part, first end" in t.log(), "the tab's own conversation is shown again"
    # Clearing needs no confirmation and can be undone.
    t.click("delete")
    assert t.titles() == ["question two"] and "second part" in t.log(), t.log()
    t.click("Undo")
    assert "first part, first end" in t.log() and len(t.titles()) == 2, t.log()
    t.click("Delete this message", 0)
    assert "question one" not in t.log()
    t.load()
    assert "question one" not in t.log() and "first end" in t.log(), "a deleted message stays deleted"
    # A question without an answer can be sent again.
    t.click("Delete this message", 0)
    t.ask("unanswered")
    t.load()
    t.click("Ask again")
    t.until("answers.length == 1", "to ask again")
    assert t.asked() == [("user", "unanswered")]
    t.run("answers[0].text('first end'); answers[0].end()")
    t.sees("first end")
    t.click("Delete this message", 1)
    assert "first end" not in t.log()
    t.click("Undo")
    assert "first end" in t.log()
    # A conversation deleted during its answer does not reappear with the answer, but with Undo.
    t.click("new")
    t.ask("question three")
    t.run("answers.at(-1).text('third part')")
    t.sees("third part")
    t.click("delete")
    t.until("answers.at(-1).stopped()", "the stop")
    time.sleep(0.4)
    assert not any("third" in value for value in t.run(f"{KEYS}.map((key) => localStorage[key])"))
    t.click("Undo")
    t.sees("third part")
    # A regenerated answer replaces the old one only once it has text, and that can be undone, too.
    t.click("Answer again")
    t.until("answers.length == 3", "to ask again")
    assert "third part" in t.log()
    t.run("answers.at(-1).lose()")
    t.sees("The server cannot be reached.")
    assert "third part" in t.log(), "no answer came, so the old one stays"
    t.click("Try again")
    t.until("answers.length == 4", "to ask again")
    t.run("answers.at(-1).text('another answer'); answers.at(-1).end()")
    t.sees("another answer")
    t.until(f"!{LOG}.includes('third part')", "the old answer to go")
    t.click("Undo")
    t.sees("third part")
    assert "another answer" not in t.log(), "one answer is in place of the other"
    assert not any("another answer" in value for value in t.run(f"{KEYS}.map((key) => localStorage[key])"))
    # The typed text stays during all of this.
    t.run("document.getElementById('input').value = 'a draft'")
    t.click("Continue")
    t.until("answers.length == 5", "to go on")
    assert t.run("document.getElementById('input').value") == "a draft"
    t.close()


def check_cut(tab, url):
    """The text of an interrupted answer is kept and marked as incomplete, whatever interrupted it."""
    t = Tab(tab, url)
    t.fresh()
    ends = [
        ("a.end('length')", "context is full"), ("a.end('content_filter')", "by the server (content_filter)"), ("a.lose()", "connection was lost"),
        ("a.close()", "ended before the answer did"), ("a.raw('data: [DONE]\\n\\n'), a.close()", "ended before the answer did"),
        ("a.event({error: {message: 'the engine died', code: 'x'}}), a.close()", "the engine died"),
        ("a.event({error: {}}), a.close()", "did not say why"), ("a.event({error: 'text'}), a.close()", "did not say why"),
        ("a.raw('data: {broken\\n\\n')", "no answer"), ("a.raw('data: null\\n\\n')", "no answer"),
        ("a.event({}), a.event([]), a.event({choices: []}), a.event({choices: null}), a.close()", "ended before the answer did"),
        ("a.raw('x'.repeat(5 << 20))", "no answer"), ("document.getElementById('stop').click()", "Stopped"),
    ]
    for n, (end, mark) in enumerate(ends):
        t.ask(f"question {n}")
        t.run(f"{{ const a = answers.at(-1); a.text('answer {n}'); setTimeout(() => {{ {end}; }}, 5); }}")
        t.until(f"document.querySelector('.message:last-child .cut')?.textContent.includes({json.dumps(mark)})", f"the mark of {end}")
        assert t.run("document.querySelector('.message:last-child .body').textContent") == f"answer {n}", end
    t.click("Continue")
    t.until(f"asked.length == {len(ends) + 1}", "to go on")
    assert t.asked()[-2:] == [("assistant", f"answer {len(ends) - 1}"), ("user", "Continue where you stopped.")], t.asked()
    # Complete answers have no mark: with CRLF line breaks, in pieces, without a final line break.
    t.run("{ const a = answers.at(-1); for (const c of 'data: ' + JSON.stringify({choices: [{delta: {content: 'piece by piece'}}]}) + '\\r\\n\\r\\n') a.raw(c);"
          "a.raw(': alive\\n\\ndata: {\"choices\":[{\"delta\":{},\"finish_reason\":\"stop\"}]}'); a.close(); }")
    t.sees("piece by piece")
    t.until("document.getElementById('status').textContent == 'The answer is complete.'", "its end")
    marked = "[...document.querySelectorAll('.assistant')].map((node) => node.querySelector('.cut')?.textContent ?? '')"
    marks = t.run(marked)
    assert len(marks) == len(ends) + 1 and all(marks[:-1]) and not marks[-1], marks
    t.load()
    assert t.run(marked) == marks, "marks are kept"
    # Interrupted thoughts are kept as well.
    t.ask("think")
    t.run("answers.at(-1).think('a thought'); setTimeout(() => answers.at(-1).lose(), 5)")
    t.until("document.querySelector('.message:last-child .cut')?.textContent.includes('lost')", "the mark")
    t.load()
    t.sees("a thought")
    # Thoughts are expanded while they arrive and collapse when the answer begins.
    t.ask("think and answer")
    t.run("answers.at(-1).think('all thoughts')")
    t.until("document.querySelector('.message:last-child details')?.open", "open thoughts")
    t.run("answers.at(-1).text('the answer'); answers.at(-1).end()")
    t.until("document.querySelector('.message:last-child details')?.open === false", "closed thoughts")
    # Copying also works where the clipboard API is missing, as over plain HTTP.
    t.run("Object.defineProperty(navigator, 'clipboard', { value: undefined }); window.copies = [];"
          "document.addEventListener('copy', () => copies.push(document.activeElement.value))")
    # Browsers allow copying only on a user's action in a focused window.
    t.page.call("Emulation.setFocusEmulationEnabled", enabled=True)
    last = "[...document.querySelectorAll('[aria-label=\"Copy this message\"]')].at(-1)"
    t.page.call("Runtime.evaluate", expression=f"{last}.click()", userGesture=True)
    t.until("copies.length == 1 && document.getElementById('status').textContent == 'Copied.'", "the copy")
    assert t.run("copies") == ["the answer"]
    # If no text arrived, the error is shown, and the question stays and can be sent again.
    error = lambda **e: json.dumps(json.dumps({"error": {"message": "it is wrong", "type": "t", "param": "temperature", "code": None, **e}}))
    for status, body, text in [
        (400, error(), "it is wrong"), (401, error(), "it is wrong"), (429, error(code="queue_full"), "it is wrong"), (503, error(), "it is wrong"),
        (413, error(code="body_too_large"), "begin a new conversation"), (500, "'<html>'", "status 500"), (502, "''", "status 502"),
        (500, "'null'", "status 500"), (500, "'[[]]'", "status 500"), (400, error(message={"a": 1}), "status 400"), (0, "''", "cannot be reached"),
    ]:
        t.run(f"refusals.push({{status: {status}, body: {body}}})")
        t.ask(f"refused {status}")
        t.until(f"document.querySelector('.error')?.textContent.includes({json.dumps(text)})", f"the error {text} of {status}")
        t.run("document.getElementById('settings').close()")
        assert f"refused {status}" in t.log()
    t.click("Try again")
    t.until("answers.length == 2", "to ask again")
    assert not t.run("document.querySelector('.error')") and t.asked()[-1][1].endswith("refused 0")
    t.run("answers.at(-1).end()")
    t.sees("without a word")
    t.close()


def check_reload(tab, url):
    """The received text of an answer is stored, also if the page is left or killed."""
    t = Tab(tab, url)
    t.fresh()
    t.ask("a story")
    t.run("answers[0].text('Once upon'); answers[0].think('hm')")
    t.sees("Once upon")
    t.load()
    assert "Once upon" in t.log() and "Not whole" in t.log(), t.log()
    t.click("Continue")
    t.until("answers.length == 1", "to go on")
    assert t.asked() == [("user", "a story"), ("assistant", "Once upon"), ("user", "Continue where you stopped.")]
    t.run("answers[0].text(' a time')")
    t.until(f"{KEYS}.some((key) => localStorage[key].includes(' a time') || localStorage[key].includes('a time'))", "to be kept")
    # The page gets no event.
    t.run("for (const name of ['pagehide', 'visibilitychange']) addEventListener(name, (event) => event.stopImmediatePropagation(), true)")
    t.load()
    assert "a time" in t.log(), t.log()
    # The longer an answer, the less often it is stored, since it is stored as a whole.
    t.ask("long")
    t.run("window.writes = 0; { const set = Storage.prototype.setItem; Storage.prototype.setItem = function (...a) { writes++; return set.apply(this, a); }; }")
    t.run("(async () => { for (let i = 0; i < 2000; i++) { answers.at(-1).text('some words, '); if (i % 50 == 0) await new Promise((r) => setTimeout(r)); } answers.at(-1).end(); })()")
    t.until("document.getElementById('log').getAttribute('aria-busy') == 'false'", "the end")
    assert t.run("writes") < 200, t.run("writes")
    t.close()


def check_tabs(tab, url):
    """Two tabs share the stored conversations."""
    a = Tab(tab, url)
    a.fresh()
    a.answered("first in a", "answer in a")
    b = Tab(tab, url)
    assert "answer in a" in b.log(), "another tab opens the newest conversation"
    a.ask("second in a")
    b.sees("second in a")
    b.ask("second in b")
    a.sees("second in b")
    a.run("answers.at(-1).text('one of a')")
    b.run("answers.at(-1).text('one of b')")
    a.sees("one of b")
    b.sees("one of a")
    for t in (a, b):
        t.run("answers.at(-1).text(', whole'); answers.at(-1).end()")
    for t in (a, b):
        t.sees("one of a, whole")
        t.sees("one of b, whole")
        t.until("!document.querySelector('.cut')", "all to be whole")
        t.load()
        assert all(text in t.log() for text in ("answer in a", "second in a", "second in b", "one of a, whole", "one of b, whole")), t.log()
    # A deletion in one tab applies to the other, and so does Undo.
    b.click("Delete this message", 0)
    a.until(f"!{LOG}.includes('first in a')", "the message to go")
    b.click("Undo")
    a.sees("first in a")
    # A new conversation in one tab does not affect the other.
    b.click("new")
    b.answered("only in b", "apart")
    assert "only in b" not in a.log() and "first in a" in a.log()
    a.until("document.getElementById('conversations').options.length == 2", "the other's conversation in the list")
    # An answer that the other tab deletes while it arrives stays deleted.
    a.turn_to(0)
    a.ask("to be deleted")
    a.run("answers.at(-1).text('unwanted')")
    b.sees("unwanted")
    b.click("Delete this message", -1)
    a.until("answers.at(-1).stopped()", "the stop")
    time.sleep(0.4)
    assert "unwanted" not in a.log() and "unwanted" not in b.log()
    # Settings of both tabs are stored.
    a.run("{ const s = document.getElementById('system'); s.value = 'from a'; s.dispatchEvent(new Event('input')); }")
    b.until("localStorage.settings?.includes('from a')", "the settings")
    time.sleep(0.1)
    b.run("{ const s = document.getElementById('max-tokens'); s.value = '7'; s.dispatchEvent(new Event('input')); }")
    assert json.loads(b.run("localStorage.settings")) == {"system": "from a", "temperature": 0.8, "topP": 0.95, "maxTokens": "7", "servers": []}
    a.fresh()
    a.close()
    b.close()


def check_full_context(tab, url):
    """A conversation that no longer fits can be edited and made shorter."""
    t = Tab(tab, url)
    t.fresh()
    for n in range(4):
        t.answered(f"q{n}", f"a{n}")
    full = {"status": 400, "body": json.dumps({"error": {"message": "it has 9 tokens, but the context has room for 8", "code": "context_length_exceeded"}})}
    t.run(f"refusals.push({json.dumps(full)}, {json.dumps(full)})")
    t.ask("q4")
    t.sees("Delete or edit messages, ask without the older half, or begin a new conversation.")
    for left in ([("user", "q2"), ("assistant", "a2"), ("user", "q3"), ("assistant", "a3"), ("user", "q4")], [("user", "q3"), ("assistant", "a3"), ("user", "q4")]):
        n = t.run("asked.length")
        t.click("Ask without the older half")
        t.until(f"asked.length == {n + 1}", "to ask again")
        assert t.asked() == left, t.asked()
    t.run("answers.at(-1).text('it fits'); answers.at(-1).end()")
    t.sees("it fits")
    t.turn_to(t.run("document.getElementById('conversations').options.length") - 1)
    assert all(f"q{n}" in t.log() for n in range(5)) and "a0" in t.log(), "the whole conversation is still there"
    # A message that alone exceeds the context.
    t.click("new")
    t.run(f"refusals.push({json.dumps(full)})")
    t.ask("too long")
    t.sees("Edit the message to make it shorter")
    t.run("document.getElementById('input').value = 'a draft'")
    t.click("Edit this message")
    assert t.run("document.querySelector('.editor textarea').value") == "too long"
    t.click("Cancel")
    assert t.run("document.getElementById('input').value") == "a draft" and "too long" in t.log()
    # An edited question begins a new branch; the old conversation stays.
    t.turn_to(t.run("document.getElementById('conversations').options.length") - 1)
    t.click("Edit this message", 2)
    assert t.run("document.querySelector('.editor textarea').value") == "q2" and "q3" in t.log()
    t.run("document.querySelector('.editor textarea').value = 'q2, better'")
    n = t.run("asked.length")
    t.click("Send")
    t.until(f"asked.length == {n + 1}", "the question")
    t.run("answers.at(-1).text('a2, better'); answers.at(-1).end()")
    t.until("document.getElementById('log').getAttribute('aria-busy') == 'false'", "the end")
    assert "q1" in t.log() and "q3" not in t.log()
    assert t.asked() == [("user", "q0"), ("assistant", "a0"), ("user", "q1"), ("assistant", "a1"), ("user", "q2, better")]
    # Messages in the middle can be removed; questions and answers still alternate.
    t.click("Delete this message", 1)
    t.click("Delete this message", 0)
    t.ask("q5")
    assert t.asked() == [("user", "q1"), ("assistant", "a1"), ("user", "q2, better"), ("assistant", "a2, better"), ("user", "q5")], t.asked()
    t.close()


KEY = "chat/0aaaaaaaaaaaaa/0aaaaaaaaaaaaa"
USER = '{"role":"user","content":"x"}'
STORED = {
    "conversation": [
        '{"a":1}', "null", "5", '"text"', "true", "{broken", "", "[", "[null]", '[1, [], {}, ""]', '[{"role":"user"}]', '[{"role":"user","content":5}]',
        '[{"role":"constructor","content":"x"}]', '{"length":3}', '[{"role":["user"],"content":{"a":1}}]', "[" * 100_000, "\ud800"],
    KEY: [
        '{"a":1}', "null", "", "[]", "{broken", '{"role":"user","content":null}', '{"role":"tool","content":"x"}', '{"role":"assistant","content":["x"]}',
        '{"role":"assistant","content":"fine","numbers":{"a":1},"cut":[],"reasoning_content":7}', "[" * 100_000, "7", "true", '"x"',
        '{"role":"assistant","content":"x","steps":[{"content":"","calls":[{"id":1}]}]}', '{"role":"assistant","content":"x","steps":{"length":1}}',
        '{"role":"assistant","content":"","reasoning_content":"' + "> " * 5000 + '","cut":"<img src=x onerror=alert(1)>"}'],
    "settings": [
        "null", "[]", "5", '"x"', "{broken", '{"system":5}', '{"system":{"a":1},"temperature":"hot","topP":null,"maxTokens":[]}', "", '{"a":1}', "[[[",
        '{"temperature":[1],"topP":-1,"maxTokens":1e99,"servers":[1,{}]}', '{"temperature":null,"topP":"","maxTokens":"many"}', '{"__proto__":{"system":"x"}}'],
    "theme": ['{"a":1}', "null", "[]", '"blue"', "{broken", "5", "", '"__proto__"'],
}
OTHERS = {key: USER for key in ("chat/", "chat//", "chat/a/b", "chat/__proto__/__proto__", KEY + "/x", "chat/zzzzzzzzzzzzzz/zzzzzzzzzzzzzz", "__proto__", "length")}


def check_storage(tab, url):
    """The page works with any content of its storage and loses nothing of it."""
    t = Tab(tab, url)
    t.fresh()
    for n in range(max(map(len, STORED.values()))):
        stored = OTHERS | {key: values[n % len(values)] for key, values in STORED.items()}
        t.run(f"sessionStorage.clear(); localStorage.clear(); for (const [key, value] of {json.dumps(list(stored.items()))}) localStorage.setItem(key, value)")
        t.load()
        t.click("new")
        t.answered("does it work?", f"it works, {n}")
        t.sees(f"it works, {n}")
        assert t.asked() == [("user", "does it work?")], t.asked()
        assert t.run("document.documentElement.dataset.theme ?? 'none'") in ("light", "dark", "none")
        # Unreadable content is not deleted: it stays, or is moved to another key.
        left = t.run("Object.keys(localStorage).map((key) => localStorage.getItem(key).slice(0, 40))")
        assert all(value[:40].encode("utf-16", "surrogatepass") in [text.encode("utf-16", "surrogatepass") for text in left] for value in stored.values()), (stored, left)
        for n in range(len(t.titles())):
            t.turn_to(n)
    # All readable parts of an earlier version's conversation are converted.
    t.fresh()
    t.run("""sessionStorage.clear(); localStorage.clear(); localStorage.conversation = '[{"role":"user","content":"old"},{"a":1},{"role":"assistant","content":"answer","numbers":"5 tokens"}]'""")
    t.load()
    assert "old" in t.log() and "answer" in t.log() and "5 tokens" in t.log() and t.run("'conversation.unreadable' in localStorage && !('conversation' in localStorage)")
    t.load()
    assert t.run("document.querySelectorAll('.message').length") == 2 and len(t.titles()) == 1, "it is taken over once"
    # Large content: a long conversation and a huge message.
    t.run("sessionStorage.clear(); localStorage.clear(); localStorage.conversation = JSON.stringify(Array.from({length: 10000}, (_, i) => ({role: i % 2 ? 'assistant' : 'user', content: `m${i}`})))")
    t.load()
    assert t.run("document.querySelectorAll('.message').length") == 200
    t.click("Show earlier messages")
    assert t.run("document.querySelectorAll('.message').length") == 400
    t.run(f"sessionStorage.clear(); localStorage.clear(); localStorage['{KEY}'] = JSON.stringify({{role: 'assistant', content: '**a '.repeat(250000)}})")
    t.load()
    t.answered("does it work?", "it does")
    # Full storage is reported; the conversation continues in the page and is stored once there is space.
    t.fresh()
    t.run("""(() => { for (let size = 1 << 22; size; size >>= 1) for (let n = 0; ; n++) { try { localStorage[`junk ${size} ${n}`] = "x".repeat(size); } catch { break; } } })()""")
    t.answered("is there room?", "no room")
    assert t.run("document.getElementById('unkept').checkVisibility()"), "it is said that nothing is kept"
    t.click("new")
    t.answered("another", "not kept either")
    t.turn_to(1)
    assert "no room" in t.log()
    t.run("for (const key of Object.keys(localStorage)) if (key.startsWith('junk')) localStorage.removeItem(key)")
    t.answered("and now?", "there is room")
    assert not t.run("document.getElementById('unkept').checkVisibility()")
    t.load()
    assert "no room" in t.log() and len(t.titles()) == 2, "all of it is kept now"
    t.fresh()
    t.close()
    for off in ("{ get() { throw new DOMException('denied', 'SecurityError'); } }", "{ value: null }", "{ value: undefined }"):
        t = Tab(tab, url, f"for (const name of ['localStorage', 'sessionStorage']) Object.defineProperty(window, name, {off})")
        t.answered("off?", "works")
        t.click("new")
        t.answered("still?", "works, too")
        t.turn_to(1)
        assert "off?" in t.log() and t.run("document.getElementById('unkept').checkVisibility()")
        t.run("{ const k = document.getElementById('key'); k.value = 'kl\\u00fc\\u2603'; k.dispatchEvent(new Event('input')); }")
        t.run("document.getElementById('send').click(); document.getElementById('input').value = 'x'; document.getElementById('composer').requestSubmit()")
        t.sees("The API key in the settings has characters that no key can have.")
        t.close()


def check_real_trouble(tab):
    """A server that is killed during an answer, and one whose context is full."""
    server = Server("--device", "cpu", "-c", "96", "--parallel", "1")
    try:
        page = tab(f"{server.url}/")
        page.until("document.getElementById('model')?.textContent == 'stories260K'", "the model's name")
        for n in range(2):
            page.run("document.getElementById('input').focus()")
            page.type("Tell me a story about a little robot who finds a garden, please.")
            page.key("Enter")
            page.until("document.querySelector('.message:last-child .numbers') || document.querySelector('.error')", "an end")
        page.until("document.querySelector('.error')?.textContent.includes('without the older half')", "the full context")
        page.run("[...document.querySelectorAll('button')].find((b) => b.textContent == 'Ask without the older half').click()")
        page.until("document.querySelector('.assistant .numbers')?.textContent", "an answer")
        assert page.run("document.getElementById('conversations').options.length") == 2
        page.throughput(20_000)
        page.run("document.getElementById('new').click()")
        page.type("Tell me a story.")
        page.key("Enter")
        page.until("document.querySelector('.assistant .body')?.textContent.length > 5", "the answer's beginning")
    finally:
        server.process.kill()
        server.process.wait()
    page.throughput(-1)
    page.until("document.querySelector('.cut')?.textContent", "the mark")
    mark = page.run("document.querySelector('.cut').textContent")
    assert "lost" in mark or "context is full" in mark, mark
    assert page.run("document.querySelector('.assistant .body').textContent.length > 5"), "what came stays"
    page.call("Page.close")


def check(tab, url):
    """Runs all tests of this file."""
    for one in (check_conversations, check_cut, check_reload, check_tabs, check_full_context, check_storage):
        one(tab, url)
    check_real_trouble(tab)
