// Markdown to elements. Text only ever becomes text: no HTML is read, so none can be smuggled in.

/** The elements that `text` describes. */
export function markdown(text) {
  const fragment = document.createDocumentFragment();
  blocks(text.replace(/\r\n?/g, "\n").split("\n"), fragment);
  return fragment;
}

const FENCE = /^ {0,3}(```+|~~~+)\s*([\w+#.-]*)/;
const HEADING = /^ {0,3}(#{1,6})\s+(.*?)\s*#*$/;
const RULE = /^ {0,3}([-*_])( *\1){2,} *$/;
const ITEM = /^( *)([-*+]|\d{1,9}[.)])(?: +|$)(.*)$/;
const QUOTE = /^ {0,3}> ?(.*)$/;
const DIVIDER = /^ *\|? *:?-+:? *(\| *:?-+:? *)*\|? *$/;

function element(name, parent, className) {
  const node = document.createElement(name);
  if (className) node.className = className;
  parent?.append(node);
  return node;
}

function blocks(lines, parent) {
  let i = 0;
  while (i < lines.length) {
    const line = lines[i];
    let match;
    if (!line.trim()) {
      i++;
    } else if ((match = FENCE.exec(line))) {
      const end = new RegExp(`^ {0,3}${match[1][0]}{${match[1].length},} *$`);
      const body = [];
      for (i++; i < lines.length && !end.test(lines[i]); i++) body.push(lines[i]);
      i++;
      code(body.join("\n"), match[2], parent);
    } else if ((match = HEADING.exec(line))) {
      // The page has the first two levels itself.
      inline(match[2], element(`h${Math.min(match[1].length + 2, 5)}`, parent));
      i++;
    } else if (RULE.test(line)) {
      element("hr", parent);
      i++;
    } else if (QUOTE.test(line)) {
      const body = [];
      for (; i < lines.length && (match = QUOTE.exec(lines[i])); i++) body.push(match[1]);
      blocks(body, element("blockquote", parent));
    } else if (line.includes("|") && i + 1 < lines.length && lines[i + 1].includes("-") && DIVIDER.test(lines[i + 1])) {
      i = table(lines, i, parent);
    } else if (ITEM.test(line)) {
      i = list(lines, i, parent);
    } else {
      const body = [];
      do body.push(lines[i++].trim()); while (i < lines.length && lines[i].trim() && !startsBlock(lines[i]));
      inline(body.join("\n"), element("p", parent));
    }
  }
}

function startsBlock(line) {
  return FENCE.test(line) || HEADING.test(line) || RULE.test(line) || QUOTE.test(line) || ITEM.test(line);
}

function code(text, language, parent) {
  const box = element("div", parent, "code");
  const bar = element("div", box, "bar");
  element("span", bar).textContent = language || "text";
  const copy = element("button", bar);
  copy.type = "button";
  copy.textContent = "Copy";
  copy.setAttribute("aria-label", "Copy this code");
  copy.addEventListener("click", async () => {
    await navigator.clipboard?.writeText(text);
    copy.textContent = "Copied";
    setTimeout(() => { copy.textContent = "Copy"; }, 1500);
  });
  const pre = element("pre", box);
  // Long lines scroll: with the keyboard, too.
  pre.tabIndex = 0;
  element("code", pre).textContent = text;
}

function list(lines, from, parent) {
  const first = ITEM.exec(lines[from]);
  const indent = first[1].length;
  const ordered = /\d/.test(first[2]);
  const node = element(ordered ? "ol" : "ul", parent);
  if (ordered) node.start = parseInt(first[2], 10);
  let i = from;
  while (i < lines.length) {
    const match = ITEM.exec(lines[i]);
    if (!match || match[1].length !== indent || /\d/.test(match[2]) !== ordered || RULE.test(lines[i])) break;
    const width = indent + match[2].length + 1;
    const body = [match[3]];
    for (i++; i < lines.length; i++) {
      const line = lines[i];
      const depth = line.length - line.trimStart().length;
      if (!line.trim()) {
        // An empty line ends the item unless what follows belongs to it.
        const next = lines[i + 1] ?? "";
        if (!next.trim() || next.length - next.trimStart().length <= indent) break;
        body.push("");
      } else if (depth > indent) {
        body.push(line.slice(Math.min(depth, width)));
      } else if (ITEM.test(line) || startsBlock(line)) {
        break;
      } else {
        body.push(line);
      }
    }
    const item = element("li", node);
    const rest = body.findIndex((line, n) => n > 0 && (!line.trim() || startsBlock(line)));
    const head = rest < 0 ? body : body.slice(0, rest);
    if (startsBlock(body[0])) {
      blocks(body, item);
    } else {
      inline(head.join("\n"), item);
      if (rest >= 0) blocks(body.slice(rest), item);
    }
    while (i < lines.length && !lines[i].trim() && ITEM.test(lines[i + 1] ?? "")) i++;
  }
  return i;
}

function cells(line) {
  const row = line.trim().replace(/^\|/, "").replace(/\|$/, "");
  return row.split(/(?<!\\)\|/).map((cell) => cell.trim().replaceAll("\\|", "|"));
}

function table(lines, from, parent) {
  const sides = cells(lines[from + 1]).map((cell) => (cell.endsWith(":") ? (cell.startsWith(":") ? "center" : "right") : ""));
  const node = element("table", element("div", parent, "table"));
  const row = (line, name, into) => {
    const tr = element("tr", into);
    const texts = cells(line);
    sides.forEach((side, n) => inline(texts[n] ?? "", element(name, tr, side)));
  };
  row(lines[from], "th", element("thead", node));
  const body = element("tbody", node);
  let i = from + 2;
  for (; i < lines.length && lines[i].trim() && lines[i].includes("|"); i++) row(lines[i], "td", body);
  return i;
}

// Each with the element it makes; what comes first in the text wins.
const INLINE = /(`+)([^]*?[^`])\1(?!`)|\*\*(\S|\S[^]*?\S)\*\*|__(\S|\S[^]*?\S)__(?!\w)|~~(\S|\S[^]*?\S)~~|\*(?=[^\s*])([^*]*?[^\s*])\*|(?<!\w)_(?=[^\s_])([^_]*?[^\s_])_(?!\w)|!?\[([^\]\n]*)\]\(([^()\s]*(?:\([^()\s]*\)[^()\s]*)*)(?:\s+"[^"]*")?\)|\b(https?:\/\/[^\s<>"'`]+[^\s<>"'`.,;:!?)\]])|\\([!-/:-@[-`{-~])/g;

function inline(text, parent) {
  let at = 0;
  for (const match of text.matchAll(INLINE)) {
    if (match.index < at) continue;
    plain(text.slice(at, match.index), parent);
    at = match.index + match[0].length;
    const [all, , codeText, strong, strong2, gone, em, em2, label, target, bare, escaped] = match;
    if (codeText !== undefined) element("code", parent).textContent = codeText.replace(/^ (.+) $/, "$1");
    else if (strong ?? strong2) inline(strong ?? strong2, element("strong", parent));
    else if (gone) inline(gone, element("del", parent));
    else if (em ?? em2) inline(em ?? em2, element("em", parent));
    else if (bare) link(bare, parent, bare, all);
    else if (escaped) parent.append(escaped);
    else link(target, parent, label || target, all);
  }
  plain(text.slice(at), parent);
}

function plain(text, parent) {
  text.split("\n").forEach((line, n) => {
    if (n) element("br", parent);
    if (line) parent.append(line);
  });
}

/** A link, where it leads to the web and not into a script. */
function link(target, parent, label, all) {
  if (!/^(https?:\/\/|mailto:)/i.test(target)) {
    parent.append(all);
    return;
  }
  const a = element("a", parent);
  a.href = target;
  a.target = "_blank";
  a.rel = "noopener noreferrer";
  a.textContent = label;
}
