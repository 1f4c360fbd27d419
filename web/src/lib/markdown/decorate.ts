// HTML to elements: sanitizes it, and makes code blocks, tables, formulas and links of it.
import DOMPurify from 'dompurify';
import { svgIcon } from '../icons';
import { copyText, saveText } from '../browser';

/** Code up to this length is coloured while it is being written. */
const COLOURED_WHILE_OPEN = 6000;

export interface CodeBlock {
  element: HTMLElement;
  code: HTMLElement;
  language: string;
  /** The text of the whole lines. */
  text: string;
  /** The line that is being written. */
  rest: Text;
}

/** Names of languages that are not their identifiers with a capital. */
const NAMES: Record<string, string> = {
  js: 'JavaScript', javascript: 'JavaScript', ts: 'TypeScript', typescript: 'TypeScript', py: 'Python', rs: 'Rust', sh: 'Shell', bash: 'Shell', zsh: 'Shell',
  shell: 'Shell', console: 'Shell', html: 'HTML', css: 'CSS', json: 'JSON', yaml: 'YAML', yml: 'YAML', sql: 'SQL', xml: 'XML', cpp: 'C++', 'c++': 'C++', cs: 'C#',
  csharp: 'C#', php: 'PHP', md: 'Markdown', toml: 'TOML', jsx: 'JSX', tsx: 'TSX', svg: 'SVG', csv: 'CSV', tex: 'LaTeX', latex: 'LaTeX', wgsl: 'WGSL', cuda: 'CUDA',
};
const EXTENSIONS: Record<string, string> = {
  javascript: 'js', typescript: 'ts', python: 'py', rust: 'rs', shell: 'sh', bash: 'sh', zsh: 'sh', console: 'sh', csharp: 'cs', 'c++': 'cpp', markdown: 'md', yaml: 'yml',
  ruby: 'rb', kotlin: 'kt', latex: 'tex', text: 'txt', plaintext: 'txt', haskell: 'hs', perl: 'pl', makefile: 'mk', dockerfile: 'dockerfile', cuda: 'cu', golang: 'go',
};

const nameOf = (language: string) => (language ? (NAMES[language.toLowerCase()] ?? language.charAt(0).toUpperCase() + language.slice(1)) : 'Text');

/** A name for the file of a code block: the name that its first lines mention, else one by its language. */
export function codeFileName(language: string, text: string): string {
  const mentioned = /^(?:\/\/|#|--|\/\*|<!--)\s*(?:file(?:name)?:\s*)?([\w-]+(?:\.[\w-]+)+)\s*(?:\*\/|-->)?\s*$/im.exec(text.split('\n', 2).join('\n'));
  if (mentioned?.[1]) return mentioned[1];
  const id = language.toLowerCase();
  const extension = EXTENSIONS[id] ?? (/^[a-z0-9]{1,6}$/.test(id) ? id : 'txt');
  const named = /(?:^|\s)(?:class|def|fn|func|function|struct|interface)\s+([A-Za-z_]\w*)/.exec(text)?.[1];
  return `${named ? named.toLowerCase() : 'code'}.${extension}`;
}

function iconButton(label: string, icon: string, action: (button: HTMLButtonElement) => void): HTMLButtonElement {
  const button = document.createElement('button');
  button.type = 'button';
  button.className = 'icon';
  button.title = label;
  button.setAttribute('aria-label', label);
  button.append(svgIcon(icon, true));
  button.addEventListener('click', () => action(button));
  return button;
}

/** The element of a code block, empty. */
export function codeBlock(language: string): CodeBlock {
  const element = document.createElement('div');
  element.className = 'code';
  const head = document.createElement('header');
  const name = document.createElement('span');
  name.textContent = nameOf(language);
  const code = document.createElement('code');
  const pre = document.createElement('pre');
  pre.tabIndex = 0;
  pre.setAttribute('aria-label', `Code, ${name.textContent}`);
  pre.setAttribute('role', 'group');
  pre.append(code);
  const text = () => (code.textContent ?? '').replace(/\n$/, '');
  head.append(
    name,
    iconButton('Download', 'get', () => saveText(codeFileName(language, text()), `${text()}\n`)),
    iconButton('Copy code', 'copy', async (button) => {
      if (!(await copyText(text()))) return;
      button.replaceChildren(svgIcon('ok', true));
      setTimeout(() => button.replaceChildren(svgIcon('copy', true)), 1500);
    }),
  );
  element.append(head, pre);
  return { element, code, language, text: '', rest: document.createTextNode('') };
}

/** Appends lines of code, and shows `rest`, the line that is being written. */
export function appendCode(block: CodeBlock, lines: string, rest: string): void {
  if (lines) {
    block.text += lines;
    block.rest.before?.(lines);
    if (!block.rest.parentNode) block.code.append(lines);
    if (block.text.length < COLOURED_WHILE_OPEN) void colour(block);
  }
  if (!block.rest.parentNode) block.code.append(block.rest);
  block.rest.data = rest;
}

/** Colours the whole lines of a code block. */
async function colour(block: CodeBlock): Promise<void> {
  if (!block.language || !block.text) return;
  const { highlighted } = await import('./highlight');
  const html = highlighted(block.text, block.language);
  if (html === undefined) return;
  const { rest } = block;
  const isOpen = rest.parentNode === block.code;
  block.code.replaceChildren(sanitized(html));
  if (isOpen) block.code.append(rest);
}

async function setFormula(element: HTMLElement): Promise<void> {
  const source = element.textContent ?? '';
  const { render } = await import('./math');
  render(source, element);
}

const sanitized = (html: string): DocumentFragment =>
  DOMPurify.sanitize(html, { RETURN_DOM_FRAGMENT: true, FORBID_ATTR: ['style'], FORBID_TAGS: ['style', 'img', 'form', 'input', 'button', 'audio', 'video'], ADD_ATTR: ['data-language'] });

/** The frame in which a table scrolls sideways. */
export function tableFrame(): { scroll: HTMLElement; table: HTMLElement } {
  const scroll = document.createElement('div');
  scroll.className = 'table';
  scroll.tabIndex = 0;
  scroll.setAttribute('role', 'group');
  scroll.setAttribute('aria-label', 'Table');
  const table = document.createElement('table');
  scroll.append(table);
  return { scroll, table };
}

/** The elements of rendered Markdown; of a list its items, of a table its head or rows. `isFinal`: it will not be rendered again. */
export function decorate(html: string, kind: 'list' | 'table' | undefined, isFinal: boolean): Node[] {
  const fragment = sanitized(html);
  for (const block of fragment.querySelectorAll<HTMLElement>('ul, ol, blockquote')) block.dir = 'auto';
  for (const link of fragment.querySelectorAll('a')) {
    link.rel = 'noopener noreferrer';
    link.target = '_blank';
  }
  for (const raw of fragment.querySelectorAll<HTMLElement>('pre.raw-code')) {
    const block = codeBlock(raw.dataset.language ?? '');
    block.text = raw.textContent ?? '';
    block.code.append(block.text);
    raw.replaceWith(block.element);
    if (isFinal || block.text.length < COLOURED_WHILE_OPEN) void colour(block);
  }
  for (const formula of fragment.querySelectorAll<HTMLElement>('.formula')) void setFormula(formula);
  if (kind === 'list') return [...fragment.firstElementChild!.childNodes].filter(({ nodeName }) => nodeName === 'LI');
  if (kind === 'table') {
    const parts = [...fragment.firstElementChild!.children];
    return parts.flatMap((part) => (part.nodeName === 'TBODY' ? [...part.children] : [part]));
  }
  for (const table of fragment.querySelectorAll('table')) {
    const frame = tableFrame();
    table.replaceWith(frame.scroll);
    frame.table.replaceWith(table);
  }
  return [...fragment.childNodes].filter((node) => node.nodeType !== 3 || node.textContent?.trim());
}
