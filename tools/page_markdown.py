"""Tests of the page's Markdown with hostile texts: long, deep, or with markup that must not become HTML."""

import json

from page_trouble import Tab

# Pieces of Markdown, each of which is repeated to a long text.
REPEATED = [
    ">", "> ", "- ", "1. ", "> - 1. ", "* > ", "**a ", "a** ", "**a** ", "__a ", "_a ", "*a ", "~~a ", "*a **b _c __d ~~e ", "*", "_", "~", "*_", "*_a", "a*_", "***a ",
    "**a*", "*a**b", "`", "`a", "``a`", "\\`", "[", "[]", "[a", "[a](", "[a](b ", '[a](b "', '[a](b "c" ', "[a](()", "[a](x(y)", "![", "!", "[a](http://b) ", '[a](b\n"c',
    "http://", "http://.", "http", "https://*", "# a\n", "#", "- - -\n", "***\n", "* * *\n* ", "|a", "a|b\n-|-\n", "a|b\n- ", ":-:|", "|", "|\n", "|-\n", "```\n", "````\n```\n",
    "- ```\n", "> ```\n", "~~~\n```\n", "\n", "\r", "\r\n", " ", " \n", "\t", "> \u2028", "\u00a0\n", "&amp;", "<", "<div>", "\\", "- a\n\n", "- a\n  - b\n", "- a\n1. b\n", "-\n",
    "> a\n\n", "- # a\n", "a\n", "\U0001f600", "e\u0301", "\u202e", "a|\\|", "[a]: b\n", "<!--", "$$", "$a", "$ ", "$$\n", "\\(", "\\(a\\)", "\\[", "\\[\n", "a$", "==", "^", "| - ",
]
MADE = [
    "'# ' + '#'.repeat(n) + 'x'", "'# a' + ' '.repeat(n) + 'b'", "'# a' + ' #'.repeat(n / 2) + 'b'", "'-' + ' '.repeat(n) + 'x'", "'- '.repeat(n / 2) + 'x'", "'[a](b' + ' '.repeat(n)",
    "'[a](' + '()'.repeat(n / 2)", "'[a]('.repeat(n / 4) + ')'.repeat(n / 4)", "'['.repeat(n / 2) + ']'.repeat(n / 2)", "'http://a' + '.'.repeat(n)", "'a|b\\n' + ' '.repeat(n) + 'x-'",
    "'a|' + ' '.repeat(n) + '\\n-|-\\n' + ' '.repeat(n) + '|'", "'|a'.repeat(n / 8) + '\\n' + '|-'.repeat(n / 8) + '\\n' + '|\\n'.repeat(n / 4)", "'```' + ' '.repeat(n)",
    "'`'.repeat(n / 2) + '\\n' + '`'.repeat(n / 2)", "'*a'.repeat(n / 4) + 'a*'.repeat(n / 4)", "'*a **b _c __d ~~e '.repeat(n / 40) + 'e~~ d__ c_ b** a* '.repeat(n / 40)",
    "'- a\\n' + 'b\\n'.repeat(n / 2)", "'- a\\n' + '  b\\n'.repeat(n / 4)", "'a' + '*'.repeat(n) + 'b'", "'*'.repeat(n) + 'a'", "'``' + '`a` '.repeat(n / 4)",
    *[f"Array.from({{length: {count}}}, (_, i) => {line}).join('\\n')" for count, line in (
        (500, "' '.repeat(2 * i) + '- a'"), (500, "' '.repeat(1000 - 2 * i) + '- a'"), (500, "'>'.repeat(i) + ' a'"), (500, "'`'.repeat(i + 3)"), (400, "' '.repeat(2 * i) + '- a\\n'"),
        (300, "'  '.repeat(i) + '- > ```'"), (500, "'`'.repeat(i + 1) + 'a'"), (500, "'`'.repeat(500 - i) + 'a'"), (3000, "' '.repeat(i % 300) + '- a'"))],
]
HURT = r"""
async (make, n) => {
  const { markdown } = await import("./markdown.js");
  const text = make(n);
  const root = markdown(text);
  let depth = 0;
  let elements = 0;
  for (let level = [...root.children]; level.length && depth < 300; depth++) {
    elements += level.length;
    level = level.flatMap((node) => [...node.children]);
  }
  return { length: text.length, elements, depth };
}
"""

SMUGGLED = [
    "<script>pwned=1</script>", "<img src=x onerror=pwned=1>", "<svg onload=pwned=1>", "<iframe srcdoc='<script>pwned=1</script>'>", "[a](javascript:pwned=1)", "[a](JaVaScRiPt:pwned=1)",
    "[a](java\tscript:pwned=1)", "[a](\x01javascript:pwned=1)", "[a](data:text/html,<script>pwned=1</script>)", "[a](vbscript:x)", "[a](//evil.example)", "[a](/v1/models)",
    "[a](https:javascript:pwned=1)", "![a](javascript:pwned=1)", "![a](https://evil.example/x.png)", "[a](https://x\" onmouseover=pwned=1 \")", "[a](https://x' onclick='pwned=1)",
    "[<img src=x onerror=pwned=1>](https://x)", "`<img src=x onerror=pwned=1>`", "```html\n<script>pwned=1</script>\n```", "```\"><img/src=x>\nx\n```", "# <b onclick=pwned=1>x</b>",
    "| <script>pwned=1</script> | b |\n|--|--|\n| <img src=x onerror=pwned=1> | c |", "- <img src=x onerror=pwned=1>", "> <a href=javascript:pwned=1>x</a>", "**<img src=x onerror=pwned=1>**",
    "https://x/<script>pwned=1</script>", "https://x/\"onmouseover=pwned=1", "<https://x>", "<javascript:pwned=1>", "&lt;script&gt;pwned=1&lt;/script&gt;", "\\<script>pwned=1</script>",
    "[a][b]\n\n[b]: javascript:pwned=1", "mailto:x", "[a](mailto:x@y.z?subject=<script>)", "[a](blob:https://x)", "[a](file:///etc/passwd)", "[a](https://x)[b](javascript:1)",
    "<style>*{display:none}</style>", "<meta http-equiv=refresh content=0;url=https://evil.example>", "<form action=https://evil.example><input name=x>", "<base href=https://evil.example>",
]
ALLOWED = set("p br strong em del code a h3 h4 h5 hr blockquote ul ol li div span button pre table thead tbody tr th td".split())
SMUGGLE = r"""
(async () => {
  const { markdown } = await import("./markdown.js");
  const box = document.createElement("div");
  document.body.append(box);
  const names = new Set(), attributes = new Set(), targets = new Set();
  let seed = 1;
  const random = (n) => { seed = (seed * 1103515245 + 12345) & 0x7fffffff; return (seed >> 8) % n; };
  const mixed = Array.from({ length: 1000 }, () => Array.from({ length: 6 }, () => { const text = SMUGGLED[random(SMUGGLED.length)]; const from = random(text.length);
    return text.slice(from, from + random(20)); }).join(["", " ", "\n", "**", "](", "`", "|"][random(7)]));
  for (const text of [...SMUGGLED, ...mixed]) {
    box.replaceChildren(markdown(text));
    for (const node of box.querySelectorAll("*")) {
      names.add(node.localName);
      for (const { name } of node.attributes) attributes.add(`${node.localName} ${name}`);
      if (node.localName === "a") targets.add(node.protocol);
      node.dispatchEvent(new Event("mouseover"));
    }
  }
  box.remove();
  await new Promise((resolve) => setTimeout(resolve, 50));
  return { names: [...names], attributes: [...attributes], targets: [...targets], pwned: "pwned" in window };
})()
"""
GROWN = r"""
(async () => {
  const { markdown, Growing } = await import("./markdown.js");
  const html = (node) => { const div = document.createElement("div"); div.append(node); return div.innerHTML; };
  let seed = 7;
  const random = (n) => { seed = (seed * 1103515245 + 12345) & 0x7fffffff; return (seed >> 8) % n; };
  const parts = ["a", "b c", " ", "  ", "\n", "\n", "\n\n", "- ", "1. ", "> ", "# ", "```", "```\n", "~~~", "|", "|-|-|", "|a|b|\n", "---", "***", "**", "*", "_", "`", "$", "$$", "\\(", "\\)", "\\[", "\\]", "[x](http://y)", "\r\n", "\r", "    ", "\t", "\\", "2) "];
  for (let n = 0; n < 150; n++) {
    const text = Array.from({ length: random(60) + 1 }, () => parts[random(parts.length)]).join("");
    const node = document.createElement("div");
    const growing = new Growing(node);
    for (let at = 0; at < text.length;) {
      at = Math.min(text.length, at + 1 + random(6));
      growing.show(text.slice(0, at));
      if (node.innerHTML !== html(markdown(text.slice(0, at)))) return { differs: text.slice(0, at) };
    }
    // A text other than the growing one.
    growing.show("other\n\ntext\n\nhere\n\nnow");
    if (node.innerHTML !== html(markdown("other\n\ntext\n\nhere\n\nnow"))) return { differs: text };
  }
  const made = document.createElement.bind(document);
  let count = 0;
  document.createElement = (name) => { count++; return made(name); };
  const work = (blocks) => {
    const text = Array.from({ length: blocks }, (_, i) => `Paragraph ${i} with **bold** text.\n\n- a\n- b\n\n`).join("");
    const growing = new Growing(made("div"));
    count = 0;
    for (let at = 0; at < text.length; at += 50) growing.show(text.slice(0, at));
    growing.show(text);
    const whole = count;
    count = 0;
    markdown(text);
    return whole / count;
  };
  const result = { once: work(200), four: work(800) };
  delete document.createElement;
  return result;
})()
"""


def check(tab, url):
    """Checks that Markdown is parsed in linear time and to a bounded depth, and becomes only text and a few allowed elements."""
    t = Tab(tab, url)
    t.fresh()
    makers = [f"(n) => {json.dumps(part)}.repeat(n / {len(part)})" for part in REPEATED] + [f"(n) => {made}" for made in MADE]
    t.page.call("Performance.enable", timeDomain="threadTicks")
    for make in makers:
        short, _ = t.worked(f"({HURT})({make}, 15000)")
        # A text four times as long takes four times as long, or sixteen times with quadratic work. Garbage collection adds noise.
        for last in (False, False, True):
            long, made = t.worked(f"({HURT})({make}, 60000)")
            if long < 8 * short + 0.05:
                break
            assert not last, f"{make} takes too long: {short} s, then {long} s"
        assert made["depth"] < 150 and made["elements"] <= 2 * made["length"] + 10, f"too much is made of {make}: {made}"
    found = t.run(f"const SMUGGLED = {json.dumps(SMUGGLED)};" + SMUGGLE)
    assert set(found["names"]) <= ALLOWED, found
    assert set(found["targets"]) <= {"http:", "https:", "mailto:"} and not found["pwned"], found
    plain = {"a href", "a target", "a rel", "div class", "button type", "button aria-label", "pre tabindex", "ol start", "th class", "td class"}
    assert set(found["attributes"]) <= plain, found
    grown = t.run(GROWN)
    assert "differs" not in grown, grown
    # The same check for the number of created elements.
    assert grown["once"] < 5 and grown["four"] < 1.5 * grown["once"], grown
    # In the page: a streamed answer of all pieces.
    t.ask("hurt me")
    t.run("answers[0].text('> '.repeat(5000) + '\\n\\n' + Array.from({length: 3000}, (_, i) => ' '.repeat(2 * (i % 400)) + '- a').join('\\n') + '\\n\\n')")
    t.run("window.made = 0; { const make = document.createElement; document.createElement = function (...a) { made++; return make.apply(this, a); }; }")
    t.run("(async () => { for (let i = 0; i < 400; i++) { answers[0].text('**a '.repeat(20)); await new Promise((r) => setTimeout(r)); } answers[0].text(' the end'); answers[0].end(); })()")
    t.until("document.getElementById('log').getAttribute('aria-busy') == 'false'", "the end", 60)
    t.sees("the end")
    assert t.run("made") < 20_000, t.run("made")
    t.load()
    t.sees("the end")
    t.fresh()
    t.close()
