"""Tests of pictures on the server's page: how they are added, sent, shown, stored and refused. Most answers are scripted."""

import base64
import contextlib
import json
import pathlib
import tempfile

from page_trouble import Tab
from serving import ROOT, run, serving

# `png(side)` and `bmp(side)` make files; `drop`, `paste` and `choose` give files to the page.
FILES = r"""
window.png = async (side, colour = "teal") => {
  const canvas = document.createElement("canvas");
  canvas.width = canvas.height = side;
  const context = canvas.getContext("2d");
  context.fillStyle = colour;
  context.fillRect(0, 0, side, side / 2);
  return new File([await new Promise((resolve) => canvas.toBlob(resolve))], `${colour}.png`, { type: "image/png" });
};
window.bmp = (side) => {
  const row = Math.ceil(3 * side / 4) * 4;
  const file = new DataView(new ArrayBuffer(54 + row * side));
  [0x42, 0x4d].forEach((byte, i) => file.setUint8(i, byte));
  for (const [at, value] of [[2, file.byteLength], [10, 54], [14, 40], [18, side], [22, side]]) file.setUint32(at, value, true);
  file.setUint16(26, 1, true);
  file.setUint16(28, 24, true);
  return new File([file.buffer], "large.bmp", { type: "image/bmp" });
};
window.file = (text, name, type) => new File([text], name, { type });
const transfer = (files, text) => {
  const data = new DataTransfer();
  for (const file of files) data.items.add(file);
  if (text) data.setData("text/plain", text);
  return data;
};
window.drop = (...files) => {
  const events = ["dragover", "drop"].map((name) => new DragEvent(name, { dataTransfer: transfer(files), bubbles: true, cancelable: true }));
  return events.map((event) => !document.body.dispatchEvent(event));
};
window.paste = (files, text) =>
  !document.getElementById("input").dispatchEvent(new ClipboardEvent("paste", { clipboardData: transfer(files, text), bubbles: true, cancelable: true }));
window.choose = (...files) => {
  const input = document.getElementById("files");
  input.files = transfer(files).files;
  input.dispatchEvent(new Event("change"));
};
window.urlOf = (file) => new Promise((resolve) => { const r = new FileReader(); r.onload = () => resolve(r.result); r.readAsDataURL(file); });
window.storedKeys = () => new Promise((resolve) => {
  indexedDB.open("pictures").onsuccess = ({ target: { result: db } }) => {
    db.transaction("pictures").objectStore("pictures").getAllKeys().onsuccess = ({ target }) => { db.close(); resolve(target.result); };
  };
});
"""
ATTACHED = "document.querySelectorAll('.attachment img[src^=blob]').length"
SHOWN = "[...document.querySelectorAll('.user .picture img')].filter((i) => i.naturalWidth).length"


def attached(t, n):
    t.until(f"{ATTACHED} == {n} && document.querySelectorAll('.attachment').length == {n}", f"{n} pictures above the input")


def noticed(t, text):
    t.until(f"document.getElementById('notice').checkVisibility() && document.getElementById('notice-text').textContent == {json.dumps(text)}", f"the notice {text!r}")


def end(t, text="a picture"):
    t.run(f"answers.at(-1).text({json.dumps(text)}); answers.at(-1).end()")
    t.until("document.getElementById('log').getAttribute('aria-busy') == 'false'", "the end")


def send(t, text):
    """Sends the text with the pictures above the input. Returns the content that was sent."""
    t.ask(text)
    return t.run("asked.at(-1).at(-1).content")


def url(t, script):
    return t.run(f"(async () => urlOf(await {script}))()")


def image(address):
    return {"type": "image_url", "image_url": {"url": address}}


def open_tab(tab, address, before=""):
    t = Tab(tab, address, FILES + before)
    t.fresh()
    return t


def offered(t):
    t.until("document.getElementById('attach').checkVisibility()", "the button for pictures")


def check_added(t, shots):
    """Pictures are dropped, pasted and chosen, removed, and sent unchanged before the text."""
    offered(t)
    assert t.run("document.getElementById('send').disabled")
    assert t.run("(async () => drop(await png(60), await png(40, 'red')))()") == [True, True], "the browser does not leave the page for a file"
    attached(t, 2)
    assert not t.run("document.getElementById('send').disabled"), "pictures can be sent without a text"
    assert t.run("(async () => paste([await png(30, 'blue')]))()")
    attached(t, 3)
    assert not t.run("(async () => paste([await png(30)], 'a text'))()"), "a text that comes with its picture is pasted as text"
    t.run("(async () => choose(await png(20, 'gold')))()")
    attached(t, 4)
    assert t.page.unlabelled() == [], "every control has a name"
    t.page.shot(shots, "pictures-attached")
    t.click("Remove the picture red.png")
    attached(t, 3)
    assert t.run("document.activeElement.title") == "Remove the picture blue.png", "the focus moves to the next one"
    t.click("Remove the picture gold.png")
    t.click("Remove the picture blue.png")
    attached(t, 1)
    t.run("(async () => paste([await png(30, 'blue')]))()")
    attached(t, 2)
    teal, blue = url(t, "png(60)"), url(t, "png(30, 'blue')")
    assert send(t, "What is this?") == [image(teal), image(blue), {"type": "text", "text": "What is this?"}]
    attached(t, 0)
    end(t)
    t.until(f"{SHOWN} == 2", "the pictures in the conversation")
    t.page.shot(shots, "pictures-sent")


def check_kept(t):
    """Pictures stay in later requests, repeated and edited questions, after a reload, and in their own file."""
    first = t.run("asked.at(-1)")[0]
    t.click("Answer again")
    t.until("asked.length == 2", "the question")
    assert t.run("asked.at(-1)") == [first]
    end(t)
    t.until("(async () => (await storedKeys()).length == 2)()", "the stored pictures")
    assert "base64" not in t.run("JSON.stringify(localStorage)")
    t.load()
    t.until(f"{SHOWN} == 2", "the pictures after a reload")
    t.ask("And now?")
    assert t.run("asked.at(-1)")[0] == first and t.asked()[-1] == ("user", "And now?")
    end(t)
    t.click("Edit this message", 0)
    t.run("document.querySelector('.editor textarea').value = 'Which colours?'")
    t.click("Send")
    t.until("asked.length == 2", "the edited question")
    assert t.run("asked.at(-1)") == [{"role": "user", "content": [*first["content"][:2], {"type": "text", "text": "Which colours?"}]}]
    end(t)
    # Pictures without a text, after which a deleted answer makes questions neighbours.
    t.run("(async () => drop(await png(10, 'red')))()")
    attached(t, 1)
    assert send(t, "") == [image(url(t, "png(10, 'red')"))]
    end(t)
    t.click("Delete this message", 1)
    t.ask("All of them.")
    content = t.run("asked.at(-1)")[0]["content"]
    assert [part.get("text", "picture") for part in content] == ["picture", "picture", "Which colours?", "\n\n", "picture"], content
    end(t)
    # The other conversation has two of the pictures, so that they are kept when this one is deleted, until it is deleted, too.
    t.click("delete")
    t.load()
    t.until("(async () => (await storedKeys()).length == 2)()", "the pictures of the conversation that is left")
    t.click("delete")
    t.click("undo")
    t.until(f"{SHOWN} == 2", "the pictures that are back")
    t.click("delete")
    t.load()
    t.until("(async () => (await storedKeys()).length == 0)()", "no picture without a message")


def check_large(t):
    """A picture opens large, by keys as well. Only a file of more than 20 MB is reduced."""
    offered(t)
    t.run("(async () => drop(await png(60)))()")
    attached(t, 1)
    t.ask("look")
    t.until(f"{SHOWN} == 1", "the picture")
    for close in ("t.page.key('Escape')", "t.run(\"document.getElementById('large-image').click()\")", "t.click('Close')"):
        t.run("document.querySelector('.user .picture').focus()")
        t.page.key("Enter")
        t.until("document.getElementById('large').open && document.getElementById('large-image').naturalWidth == 60", "the large picture")
        assert t.run("document.getElementById('large-image').alt") == "teal.png" and t.page.unlabelled() == []
        eval(close)
        t.until("!document.getElementById('large').open", "the end of the large picture")
    assert not t.run("answers.at(-1).stopped()"), "Escape closes the picture only"
    end(t)
    t.click("new")
    t.run("drop(bmp(2800))")
    attached(t, 1)
    address = send(t, "large")[0]["image_url"]["url"]
    assert address.startswith("data:image/jpeg;base64,") and len(address) < 20 << 20, address[:40]
    size = f"(async () => {{ const i = await createImageBitmap(new Blob([Uint8Array.from(atob({json.dumps(address.split(',')[1])}), (c) => c.charCodeAt())])); return [i.width, i.height]; }})()"
    assert t.run(size) == [2800, 2800]
    end(t)


def check_damaged(t):
    """What is no picture is left out, with a notice; the rest is added."""
    t.click("new")
    t.run("(async () => drop(file('PNG', 'broken.png', 'image/png'), await png(20), file('text', 'notes.txt', 'text/plain')))()")
    noticed(t, "Not read as a picture: notes.txt, broken.png.")
    attached(t, 1)
    t.click("Remove the picture teal.png")
    attached(t, 0)
    # A name is shown as it is, and never as HTML.
    t.run("(async () => drop(new File([await png(20)], '<b>\\u202e.png', { type: 'image/png' })))()")
    attached(t, 1)
    assert t.run("document.querySelector('.attachment .picture').title") == "<b>\\u{202e}.png" and not t.run("document.querySelector('.attachment b')")
    send(t, "odd")
    end(t)


def check_stored(t):
    """Stored messages with damaged lists of pictures are shown without them."""
    for pictures in ("5", "[]", '[{"id": 7}]', '[{"id": "../x", "name": "a"}]', '[{"id": "0aaaaaaaaaaaaa"}]', '{"length": 1}'):
        t.fresh()
        t.run(f"sessionStorage.clear(); localStorage['chat/0aaaaaaaaaaaaa/0aaaaaaaaaaaaa'] = '{{\"role\":\"user\",\"content\":\"x\",\"pictures\":{pictures}}}'")
        t.load()
        t.ask("works?")
        assert t.asked() == [("user", "x\n\nworks?")], t.asked()
        end(t)
    t.fresh()
    t.close()


def check_unkept(tab, address):
    """Without a database pictures live as long as the page, which says so. A lost picture has its place, and is not sent."""
    for off in ("{ value: undefined }", "{ get() { throw new DOMException('denied', 'SecurityError'); } }", "{ value: { open() { throw new Error('off'); } } }"):
        t = open_tab(tab, address, f"Object.defineProperty(window, 'indexedDB', {off});")
        offered(t)
        t.run("(async () => drop(await png(20)))()")
        attached(t, 1)
        assert len(send(t, "kept?")) == 2
        t.until("document.getElementById('unkept').checkVisibility()", "the notice")
        end(t)
        t.load()
        t.sees("The picture is no longer there.")
        t.ask("And now?")
        assert t.asked()[0] == ("user", "kept?")
        end(t)
        t.fresh()
        t.close()


def check_answered(tab, address):
    """The server's own model answers a question with a picture."""
    page = tab("about:blank")
    page.call("Page.addScriptToEvaluateOnNewDocument", source=FILES)
    page.call("Page.navigate", url=f"{address}/")
    page.until("document.getElementById('attach')?.checkVisibility()", "the button for pictures")
    page.run("(async () => { drop(await png(60)); })()")
    page.until(f"{ATTACHED} == 1", "the picture above the input")
    page.type("What is this?")
    page.key("Enter")
    page.until("document.querySelector('.assistant .numbers')?.textContent || document.querySelector('.error')", "an answer", 60)
    assert page.run("document.querySelector('.assistant .body')?.textContent.length > 0"), page.run("document.getElementById('log').textContent")
    assert not page.problems, page.problems
    page.call("Page.close")


def check_refused(tab, address):
    """A model without an encoder is offered no pictures; the server's refusal of one is shown."""
    t = open_tab(tab, address)
    t.until("document.getElementById('model').textContent", "the model's name")
    assert not t.run("document.getElementById('attach').checkVisibility()")
    t.run("(async () => drop(await png(20)))()")
    noticed(t, "This model does not see pictures.")
    attached(t, 0)
    t.fresh()
    t.close()
    page = tab("about:blank")
    page.call("Page.addScriptToEvaluateOnNewDocument", source=FILES)
    page.call("Page.navigate", url=f"{address}/")
    page.until("document.getElementById('model')?.textContent", "the model's name")
    # As if another model had been served when the picture was added.
    page.run("import('./attachments.js').then(async ({ offerPictures }) => { offerPictures(true); drop(await png(20)); })")
    page.until(f"{ATTACHED} == 1", "the picture above the input")
    page.type("What is this?")
    page.key("Enter")
    page.until("document.querySelector('.error')", "the refusal")
    text = page.run("document.querySelector('.error').textContent")
    assert "picture" in text or "mmproj" in text, text
    assert page.run(SHOWN) == 1, "the question stays with its picture"
    page.call("Page.close")


@contextlib.contextmanager
def serving_pictures():
    """Starts a server whose model has a picture encoder with random weights. Returns its address."""
    with tempfile.TemporaryDirectory() as folder:
        run(["cargo", "run", "-q", "-p", "metal-attention-testing", "--example", "write_models", "--", folder, "pictures"], cwd=ROOT)
        model = pathlib.Path(folder, "pictures")
        with serving("--device", "cpu", "-m", str(model / "tiny.gguf"), "--mmproj", str(model / "tiny-mmproj.gguf")) as server:
            yield server.url


def check(tab, url_without, shots):
    """Runs all tests of this file. `url_without`: the address of a server whose model sees no pictures."""
    check_refused(tab, url_without)
    with serving_pictures() as address:
        t = open_tab(tab, address)
        check_added(t, shots)
        check_kept(t)
        check_large(t)
        check_damaged(t)
        check_stored(t)
        check_unkept(tab, address)
        check_answered(tab, address)
