// Markdown to tokens: markdown-it without HTML, with formulas, and with lists whose items do not depend on each other.
import MarkdownIt from 'markdown-it';
import type { Token } from 'markdown-it';

export type { Token };
/** What blocks share: link reference definitions. */
export interface Env {
  [key: PropertyKey]: unknown;
  references?: Record<string, { title: string; href: string }>;
}

export const md = new MarkdownIt({ html: false, linkify: true, typographer: false, breaks: false });
md.linkify.set({ fuzzyLink: false, fuzzyEmail: false, fuzzyIP: false });
// The browser loads no pictures of other sites: a picture becomes a link to it.
md.renderer.rules.image = (tokens, index, options, env, self) => {
  const token = tokens[index]!;
  const source = String(token.attrGet('src') ?? '');
  const text = self.renderInlineAsText(token.children ?? [], options, env) || source;
  return `<a href="${md.utils.escapeHtml(source)}">${md.utils.escapeHtml(text)}</a>`;
};
md.renderer.rules.fence = md.renderer.rules.code_block = (tokens, index) => {
  const { content, info } = tokens[index]!;
  const language = info.trim().split(/\s+/)[0] ?? '';
  return `<pre class="raw-code" data-language="${md.utils.escapeHtml(language)}">${md.utils.escapeHtml(content)}</pre>\n`;
};
// markdown-it aligns cells by style attributes, which the page's policy does not allow.
md.core.ruler.push('align_cells', (state) => {
  for (const token of state.tokens) {
    const align = /text-align:(\w+)/.exec(String(token.attrGet('style') ?? ''))?.[1];
    if (align) token.attrs = [['class', align]];
  }
});
const formula = (isBlock: boolean) => (tokens: Token[], index: number) => {
  const tag = isBlock ? 'div' : 'span';
  const { content, markup } = tokens[index]!;
  const isDisplay = isBlock || markup === '$$' || markup === '\\[';
  return `<${tag} class="formula${isDisplay ? ' display' : ''}">${md.utils.escapeHtml(content)}</${tag}>`;
};
md.renderer.rules.math_inline = formula(false);
md.renderer.rules.math_block = formula(true);

const CLOSING: Record<string, string> = { $: '$', $$: '$$', '\\(': '\\)', '\\[': '\\]' };

// Inline formulas: $x$, $$x$$, \(x\), \[x\]. A single $ begins one only where no blank follows it, and ends one only where no blank
// precedes and no digit follows it, so that amounts of money stay text.
md.inline.ruler.before('escape', 'math_inline', (state, silent) => {
  const { src, pos } = state;
  const open = ['$$', '\\(', '\\[', '$'].find((mark) => src.startsWith(mark, pos));
  if (!open) return false;
  const close = CLOSING[open]!;
  const start = pos + open.length;
  let end = src.indexOf(close, start);
  while (open === '$' && end >= 0 && src[end - 1] === '\\') end = src.indexOf(close, end + 1);
  if (end <= start || end > state.posMax) return false;
  const content = src.slice(start, end);
  if (open === '$' && (/^\s|\s$/.test(content) || /^\d/.test(src.slice(end + 1)) || content.includes('\n\n'))) return false;
  if (!silent) Object.assign(state.push('math_inline', 'math', 0), { content: content.trim(), markup: open });
  state.pos = end + close.length;
  return true;
});

// Formulas in lines of their own: from $$ or \[ at the beginning of a line to the closing mark at the end of one, or to a blank line.
md.block.ruler.before(
  'fence',
  'math_block',
  (state, startLine, endLine, silent) => {
    const from = state.bMarks[startLine]! + state.tShift[startLine]!;
    if (state.sCount[startLine]! - state.blkIndent >= 4) return false;
    const open = ['$$', '\\['].find((mark) => state.src.startsWith(mark, from));
    if (!open) return false;
    const close = CLOSING[open]!;
    const first = state.src.slice(from + open.length, state.eMarks[startLine]);
    if (first.includes(close) && !first.trimEnd().endsWith(close)) return false;
    if (silent) return true;
    const lines: string[] = [];
    let line = startLine;
    let isClosed = false;
    for (; line < endLine && !isClosed; line++) {
      const text = line === startLine ? first : state.getLines(line, line + 1, state.blkIndent, false);
      if (line > startLine && (!text.trim() || state.sCount[line]! < state.blkIndent)) break;
      isClosed = text.trimEnd().endsWith(close);
      lines.push(isClosed ? text.trimEnd().slice(0, -close.length) : text);
    }
    state.line = line;
    Object.assign(state.push('math_block', 'math', 0), { content: lines.join('\n').trim(), markup: open, map: [startLine, line], block: true });
    return true;
  },
  { alt: ['paragraph', 'reference', 'blockquote', 'list'] },
);

// An item is tight if it has one paragraph, whatever the other items are: so an item never changes when later ones arrive.
md.core.ruler.after('block', 'independent_items', (state) => {
  const open: { level: number; paragraphs: Token[] }[] = [];
  for (const token of state.tokens) {
    if (token.type === 'list_item_open') open.push({ level: token.level, paragraphs: [] });
    const item = open.at(-1);
    if (item && token.type.startsWith('paragraph_') && token.level === item.level + 1) item.paragraphs.push(token);
    if (token.type === 'list_item_close') {
      const { paragraphs } = open.pop()!;
      for (const paragraph of paragraphs) paragraph.hidden = paragraphs.length === 2;
    }
  }
});
