// Converts Markdown to elements. Text only becomes text nodes: HTML in it is not parsed, so it cannot be injected.
// The work is linear in the length of any text, since a model may write anything. LaTeX is shown as its source.
//
// Two levels: `blocks` splits lines into paragraphs, lists, code and so on; `inline` converts the text of one block.

import { copied } from "./clipboard.js";

/** Maximum nesting of quotes and lists, and of emphasis; deeper contents are shown as text. */
const DEEPEST = 24;

/** Converts `text` to elements. */
export function markdown(text) {
  const fragment = document.createDocumentFragment();
  blocks(normal(text).split("\n"), fragment, 0);
  return fragment;
}

/** Shows a growing text in `parent`. Blocks that further text can no longer change are converted once. */
export class Growing {
  #parent;
  /** The text of the final blocks. */
  #settled = "";
  /** The number of final blocks. */
  #count = 0;

  constructor(parent) {
    this.#parent = parent;
  }

  show(grown) {
    const text = normal(grown);
    if (!text.startsWith(this.#settled)) {
      this.#settled = "";
      this.#count = 0;
    }
    while (this.#parent.childNodes.length > this.#count) this.#parent.lastChild.remove();
    const rest = text.slice(this.#settled.length).split("\n");
    // Each block is one element. The last line may still become part of the block before it, but of no earlier one.
    const starts = blocks(rest, this.#parent, 0);
    if (starts.length < 3) return;
    this.#count += starts.length - 2;
    this.#settled = text.slice(0, text.length - rest.slice(starts.at(-2)).join("\n").length);
  }
}

const FENCE = /^ {0,3}(```+|~~~+)\s*([\w+#.-]*)/;
const HEADING = /^ {0,3}(#{1,6})\s/;
const RULE = /^ {0,3}([-*_])( *\1){2,} *$/;
const ITEM = /^( *)([-*+]|\d{1,9}[.)])(?: +|$)([^]*)$/;
const QUOTE = /^ {0,3}> ?([^]*)$/;
/** The start of a displayed formula, which may have several lines. */
const FORMULA = /^ {0,3}(\$\$|\\\[)/;
const FORMULA_ENDS = { "$$": "$$", "\\[": "\\]" };
const BLOCK = [FENCE, HEADING, RULE, QUOTE, ITEM, FORMULA];

const normal = (text) => text.replace(/\r\n?/g, "\n");
const isEmpty = (line) => !line.trim();
const startsBlock = (line) => BLOCK.some((form) => form.test(line));
const depthOf = (line) => line.length - line.trimStart().length;

function element(name, parent, className) {
  const node = document.createElement(name);
  if (className) node.className = className;
  parent?.append(node);
  return node;
}

/** Adds the blocks of `lines` to `parent`, each as one element. Returns the index of the first line of each. */
function blocks(lines, parent, depth) {
  const starts = [];
  let i = 0;
  while (i < lines.length) {
    const line = lines[i];
    let match;
    if (isEmpty(line)) {
      i++;
      continue;
    }
    starts.push(i);
    if (depth >= DEEPEST) {
      plain(lines.slice(i).join("\n"), element("p", parent));
      break;
    } else if ((match = FENCE.exec(line))) {
      const from = ++i;
      while (i < lines.length && !closes(lines[i], match[1])) i++;
      code(lines.slice(from, i).join("\n"), match[2], parent);
      i++;
    } else if ((match = FORMULA.exec(line))) {
      const from = i;
      const end = FORMULA_ENDS[match[1]];
      let rest = line.slice(match[0].length);
      while (!rest.includes(end) && ++i < lines.length) rest = lines[i];
      plain(lines.slice(from, ++i).join("\n"), element("p", parent));
    } else if ((match = HEADING.exec(line))) {
      // The page itself uses the first two levels.
      inline(heading(line), element(`h${Math.min(match[1].length + 2, 5)}`, parent));
      i++;
    } else if (RULE.test(line)) {
      element("hr", parent);
      i++;
    } else if (QUOTE.test(line)) {
      const body = [];
      for (; i < lines.length && (match = QUOTE.exec(lines[i])); i++) body.push(match[1]);
      blocks(body, element("blockquote", parent), depth + 1);
    } else if (line.includes("|") && isDivider(lines[i + 1] ?? "")) {
      i = table(lines, i, parent);
    } else if (ITEM.test(line)) {
      i = list(lines, i, parent, depth);
    } else {
      const body = [];
      do body.push(lines[i++].trim()); while (i < lines.length && !isEmpty(lines[i]) && !startsBlock(lines[i]));
      inline(body.join("\n"), element("p", parent));
    }
  }
  return starts;
}

/** Whether a line ends the code block that `fence` started. */
function closes(line, fence) {
  const mark = line.trim();
  return depthOf(line) < 4 && mark.startsWith(fence) && !mark.replaceAll(fence[0], "");
}

/** The text of a heading without its number signs. */
function heading(line) {
  const text = line.trim().replace(/^#+/, "");
  let end = text.length;
  while (text[end - 1] === "#") end--;
  return text.slice(0, end).trim();
}

/** Adds a code block with its language and a button to copy it. */
function code(text, language, parent) {
  const box = element("div", parent, "code");
  const bar = element("div", box, "bar");
  element("span", bar).textContent = language || "text";
  const copy = element("button", bar);
  copy.type = "button";
  copy.textContent = "Copy";
  copy.setAttribute("aria-label", "Copy this code");
  copy.addEventListener("click", async () => {
    copy.textContent = (await copied(text)) ? "Copied" : "Not allowed";
    setTimeout(() => { copy.textContent = "Copy"; }, 1500);
  });
  const pre = element("pre", box);
  // Focusable, so that long lines scroll with the keyboard, too.
  pre.tabIndex = 0;
  element("code", pre).textContent = text;
}

/** Adds the list that starts at line `from`. Returns the index of the line after it. */
function list(lines, from, parent, depth) {
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
      if (isEmpty(line)) {
        // An empty line ends the item unless the next line belongs to it.
        const next = lines[i + 1] ?? "";
        if (isEmpty(next) || depthOf(next) <= indent) break;
        body.push("");
      } else if (depthOf(line) > indent) {
        body.push(line.slice(Math.min(depthOf(line), width)));
      } else if (startsBlock(line)) {
        break;
      } else {
        body.push(line);
      }
    }
    const item = element("li", node);
    const rest = startsBlock(body[0]) ? 0 : body.findIndex((line, n) => n > 0 && (isEmpty(line) || startsBlock(line)));
    inline((rest < 0 ? body : body.slice(0, rest)).join("\n"), item);
    if (rest >= 0) blocks(body.slice(rest), item, depth + 1);
    while (i < lines.length && isEmpty(lines[i]) && ITEM.test(lines[i + 1] ?? "")) i++;
  }
  return i;
}

/** The cells of a table row. */
function cells(line) {
  const row = line.trim().replace(/^\|/, "").replace(/\|$/, "");
  return row.split(/(?<!\\)\|/).map((cell) => cell.trim().replaceAll("\\|", "|"));
}

/** Whether a line divides a table's head from its rows. */
const isDivider = (line) => line.includes("-") && cells(line).every((cell) => /^:?-+:?$/.test(cell));

/** Adds the table that starts at line `from`. Returns the index of the line after it. */
function table(lines, from, parent) {
  const sides = cells(lines[from + 1]).map((cell) => (cell.endsWith(":") ? (cell.startsWith(":") ? "center" : "right") : ""));
  const node = element("table", element("div", parent, "table"));
  // Missing cells are not added: a short text must not become a large table.
  const row = (line, name, into) => {
    const tr = element("tr", into);
    cells(line).slice(0, sides.length).forEach((text, n) => inline(text, element(name, tr, sides[n])));
  };
  row(lines[from], "th", element("thead", node));
  const body = element("tbody", node);
  let i = from + 2;
  for (; i < lines.length && !isEmpty(lines[i]) && lines[i].includes("|"); i++) row(lines[i], "td", body);
  return i;
}

/** The start of anything inside a line. Each alternative is tried once at its position, without long scans that fail. */
const SPECIAL = /`+|\$+|\\\(|\\\[|\*+|_+|~+|\\[!-/:-@[-`{-~]|!?\[[^[\]\n]*\]\([^()\s]*(?:\([^()\s]*\)[^()\s]*)*(?:\s+"[^"]*")?\)|\bhttps?:\/\/[^\s<>"'`]+/g;
const LINK = /^!?\[([^\]]*)\]\((\S*?)(?:\s+"[^"]*")?\)$/;
const NAMES = { "*": "em", _: "em", "**": "strong", __: "strong", "~~": "del" };

/** Adds the text of one block with its emphasis, code, links and formulas to `parent`. */
function inline(text, parent) {
  /** The parts: texts, links, code, and the starts (`open`) and ends (`close`) of elements. A start without an end stays text. */
  const parts = [];
  /** By mark: the indices of parts that may be starts, the innermost last. */
  const waiting = Object.fromEntries(Object.keys(NAMES).map((mark) => [mark, []]));
  const ticks = runEnds(text, /`+/g);
  const dollars = runEnds(text, /\$+/g);
  const closings = { "\\(": runEnds(text, /\\\)/g), "\\[": runEnds(text, /\\\]/g) };
  let at = 0;
  SPECIAL.lastIndex = 0;
  for (let match; (match = SPECIAL.exec(text)); SPECIAL.lastIndex = at) {
    let [found] = match;
    parts.push(text.slice(at, match.index));
    at = match.index + found.length;
    const first = found[0];
    if (first === "`") {
      const end = ticks(found.length, at);
      if (end === undefined) {
        parts.push(found);
      } else {
        parts.push({ code: text.slice(at, end) });
        at = end + found.length;
      }
    } else if (first === "$" || found in closings) {
      const end = first === "$" ? formulaEnd(text, found, at, dollars) : closings[found](2, at);
      const after = end === undefined ? at : end + found.length;
      parts.push(text.slice(match.index, after));
      at = after;
    } else if (first === "*" || first === "_" || first === "~") {
      emphasis(found, text[match.index - 1] ?? " ", text[at] ?? " ", parts, waiting);
    } else if (first === "\\") {
      parts.push(found[1]);
    } else if (first === "h") {
      found = withoutPunctuation(found);
      at = match.index + found.length;
      parts.push(found.endsWith("//") ? found : { target: found, label: found, all: found });
    } else {
      const [, label, target] = LINK.exec(found);
      parts.push({ target, label: label || target, all: found });
    }
  }
  parts.push(text.slice(at));
  build(parts, parent);
}

/** The end of a formula that starts with `run`, one or two dollars; undefined if it is no formula. As in Pandoc, a formula within
 * a line neither starts nor ends with a blank, and no digit follows it. */
function formulaEnd(text, run, at, dollars) {
  if (run.length > 2) return undefined;
  const end = dollars(run.length, at);
  if (end === undefined || run.length === 2) return end;
  const isFormula = /\S/.test(text[at]) && /\S/.test(text[end - 1]) && !/\d/.test(text[end + 1] ?? "");
  return isFormula ? end : undefined;
}

/** Returns a function that finds the next run of `marks` of a length at or after a position. Positions must not decrease. */
function runEnds(text, marks) {
  const runs = new Map();
  for (const { 0: run, index } of text.matchAll(marks)) {
    if (!runs.has(run.length)) runs.set(run.length, { places: [], next: 0 });
    runs.get(run.length).places.push(index);
  }
  return (length, from) => {
    const run = runs.get(length);
    while (run?.places[run.next] < from) run.next++;
    return run?.places[run.next];
  };
}

/** Adds the marks of a run like `***`: first those that end an element, then those that may start one. */
function emphasis(run, before, after, parts, waiting) {
  const inWord = run[0] === "_" && /\w/.test(before) && /\w/.test(after);
  const mayEnd = /\S/.test(before) && !inWord;
  const mayBegin = /\S/.test(after) && !inWord;
  const [one, two] = [run[0], run[0] + run[0]];
  let left = run.length;
  while (mayEnd && left > 0) {
    const fitting = [one, two].filter((mark) => mark.length <= left && waiting[mark]?.length);
    if (!fitting.length) break;
    const mark = fitting.reduce((a, b) => (waiting[b].at(-1) > waiting[a].at(-1) ? b : a));
    const begin = waiting[mark].pop();
    // Starts inside the element without an end become text.
    for (const others of Object.values(waiting)) while (others.at(-1) > begin) others.pop();
    parts[begin] = { open: NAMES[mark] };
    parts.push({ close: true });
    left -= mark.length;
  }
  while (left > 0) {
    const mark = left > 1 ? two : one;
    if (mayBegin && mark in NAMES) waiting[mark].push(parts.length);
    parts.push(mark);
    left -= mark.length;
  }
}

/** A bare URL without the punctuation of the sentence around it. */
function withoutPunctuation(url) {
  let end = url.length;
  while (".,;:!?)]*_~".includes(url[end - 1])) end--;
  return url.slice(0, end);
}

/** Adds the elements of `parts` to `parent`. */
function build(parts, parent) {
  let depth = 0;
  let text = "";
  const flush = () => {
    plain(text, parent);
    text = "";
  };
  for (const part of parts) {
    if (typeof part === "string") {
      text += part;
      continue;
    }
    flush();
    if (part.open) {
      if (depth++ < DEEPEST) parent = element(part.open, parent);
    } else if (part.close) {
      if (--depth < DEEPEST) parent = parent.parentNode;
    } else if (part.code !== undefined) {
      element("code", parent).textContent = part.code.replace(/^ ([^]+) $/, "$1");
    } else {
      link(part, parent);
    }
  }
  flush();
}

/** Adds `text` as it is, with its line breaks. */
function plain(text, parent) {
  text.split("\n").forEach((line, n) => {
    if (n) element("br", parent);
    if (line) parent.append(line);
  });
}

/** Adds a link if it leads to the web or a mail address, not to a script; otherwise its text. */
function link({ target, label, all }, parent) {
  if (!/^(https?:\/\/|mailto:)/i.test(target) || !URL.canParse(target)) {
    parent.append(all);
    return;
  }
  const a = element("a", parent);
  a.href = target;
  a.target = "_blank";
  a.rel = "noopener noreferrer";
  a.textContent = label;
}
