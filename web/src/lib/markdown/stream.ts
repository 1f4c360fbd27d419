// Renders a text while it grows. What cannot change any more is rendered once; only the open part at the end is rendered again. So
// the time for an update depends on that part, not on the whole text. A whole text is rendered by the same steps.
import { appendCode, codeBlock, decorate, tableFrame, type CodeBlock } from './decorate';
import { type Env, type Token, md } from './parser';
import { type Unit, unitsOf } from './units';

const DEFINITION = /^ {0,3}\[[^\]\n]+\]:/m;
const FENCE = /^( {0,3})(`{3,}|~{3,})([^\n]*)\n/;

/** The list or the table that units are being added to. */
interface OpenContainer {
  kind: 'list' | 'table';
  element: HTMLElement;
  /** Of a table: the lines of its head, without which its rows cannot be parsed. */
  head: string;
}

/** A block of code without its end so far. Its lines are appended without parsing. */
interface OpenFence {
  closing: RegExp;
  /** Up to where the text is in the block. */
  at: number;
  block: CodeBlock;
}

export class StreamRenderer {
  #root: HTMLElement;
  #text = '';
  /** Where the open part begins. */
  #start = 0;
  #env: Env = {};
  #container: OpenContainer | null = null;
  #fence: OpenFence | null = null;
  /** Up to where the whole lines have been looked at for units that are finished. */
  #checked = -1;
  #isWhole = false;
  /** The elements of the open part. */
  #tail: Node[] = [];

  constructor(root: HTMLElement) {
    this.#root = root;
  }

  /** The length of the part that is rendered again by each update. */
  get openLength(): number {
    return this.#text.length - this.#start;
  }

  /** Shows `text`. A text that does not continue the one before is rendered from its beginning. */
  update(text: string, isWhole: boolean): void {
    // A text that was whole goes on within its last block.
    if (!this.#continues(text) || (this.#isWhole && text.length > this.#text.length)) this.#reset();
    // Definitions of links may come after their uses: such a text is rendered once more at its end.
    if (isWhole && !this.#isWhole && this.#start > 0 && DEFINITION.test(text)) this.#reset();
    this.#isWhole = isWhole;
    this.#text = text;
    if (this.#fence && this.#extendFence(isWhole)) return;
    this.#commit(isWhole);
    if (isWhole) return;
    if (this.#beginFence()) return;
    const units = this.#units(this.#text.slice(this.#start), { ...this.#env, references: { ...this.#env.references } });
    this.#clearTail();
    const container = this.#container;
    this.#tail = this.#add(units, true);
    this.#container = container;
  }

  /** Compares only the end of the text before: texts grow at their ends. */
  #continues(text: string): boolean {
    const n = this.#text.length;
    return text.length >= n && text.slice(Math.max(0, n - 64), n) === this.#text.slice(-64);
  }

  #reset(): void {
    this.#root.replaceChildren();
    this.#start = 0;
    this.#checked = -1;
    this.#env = {};
    this.#container = this.#fence = null;
    this.#tail = [];
  }

  #clearTail(): void {
    for (const node of this.#tail) {
      const parent = node.parentNode;
      parent?.removeChild(node);
      if (parent?.nodeName === 'TBODY' && !parent.hasChildNodes()) parent.parentNode?.removeChild(parent);
    }
    this.#tail = [];
  }

  /** Parses the open part. Units of the open table come without its head. */
  #units(text: string, env: Env): Unit[] {
    const head = this.#container?.kind === 'table' ? this.#container.head : '';
    const nHead = head ? head.split('\n').length - 1 : 0;
    const units = unitsOf(md.parse(head + text, env));
    if (!head) return units;
    return units.filter(({ container, line }) => !(container?.index === 0 && line < nHead)).map((unit) => ({ ...unit, line: unit.line - nHead }));
  }

  /** Renders what cannot change any more: all but the last unit of the whole lines. */
  #commit(isWhole: boolean): void {
    const open = this.#text.slice(this.#start);
    const lines = isWhole ? open : open.slice(0, open.lastIndexOf('\n') + 1);
    if (!lines || (!isWhole && this.#start + lines.length === this.#checked)) return;
    this.#checked = this.#start + lines.length;
    const units = this.#units(lines, isWhole ? this.#env : { ...this.#env, references: { ...this.#env.references } });
    const last = units.at(-1);
    const finished = isWhole ? units : units.slice(0, -1);
    if (!isWhole && (!last || !finished.length)) return;
    this.#clearTail();
    if (isWhole) {
      this.#add(finished, false);
      this.#start = this.#text.length;
      this.#container = null;
      return;
    }
    const startOf = offsets(lines);
    const end = startOf[last!.line] ?? lines.length;
    // The definitions of the finished part are kept.
    if (lines.includes(']:')) md.parse(lines.slice(0, end), this.#env);
    const { container } = last!;
    const nextKind = container && finished.at(-1)!.container?.index === container.index ? container.kind : null;
    this.#add(finished, false);
    if (nextKind === null) this.#container = null;
    else if (nextKind === 'table' && this.#container && !this.#container.head) {
      const [from, to] = container!.open.map!;
      this.#container.head = lines.slice(startOf[from], startOf[Math.min(to, from + 2)]);
    }
    this.#start += end;
  }

  /** Adds the elements of units. Items and rows go on with the open list or table if they are the first units. Returns the
   * outermost nodes that were added. */
  #add(units: Unit[], isTail: boolean): Node[] {
    const added: Node[] = [];
    const created = new Set<OpenContainer>();
    let current = -1;
    for (const [index, { container, tokens }] of units.entries()) {
      const nodes = decorate(render(tokens, this.#env, container?.kind), container?.kind, !isTail);
      if (!container) {
        this.#container = null;
        current = -1;
        this.#root.append(...nodes);
        added.push(...nodes);
        continue;
      }
      const goesOn = container.index === current || (index === 0 && this.#container?.kind === container.kind);
      if (!goesOn) {
        this.#container = openContainer(container.open, this.#root);
        created.add(this.#container);
        added.push(this.#root.lastChild!);
      }
      current = container.index;
      if (!created.has(this.#container!)) added.push(...nodes);
      insert(this.#container!, nodes);
    }
    return added;
  }

  /** Begins to append lines of code if the open part is a fence without its end. */
  #beginFence(): boolean {
    const match = FENCE.exec(this.#text.slice(this.#start, this.#start + 400));
    if (!match || this.#container) return false;
    const [line, , mark, info] = match as unknown as [string, string, string, string];
    if (mark.startsWith('`') && info.includes('`')) return false;
    this.#clearTail();
    const block = codeBlock(md.utils.unescapeAll(info).trim().split(/\s+/)[0] ?? '');
    this.#root.append(block.element);
    this.#fence = { closing: new RegExp(`^ {0,3}\\${mark[0]}{${mark.length},}[ \\t]*$`), at: this.#start + line.length, block };
    this.#tail = [block.element];
    return this.#extendFence(false);
  }

  /** Appends the new lines of code. Returns false if the fence has ended, so that the rest has to be parsed. */
  #extendFence(isWhole: boolean): boolean {
    const fence = this.#fence!;
    const end = this.#text.lastIndexOf('\n') + 1;
    const indent = /^ {0,3}/.exec(this.#text.slice(this.#start))![0].length;
    const lines = end > fence.at ? this.#text.slice(fence.at, end).split('\n').slice(0, -1) : [];
    const isEnded = lines.some((line) => fence.closing.test(line));
    if (isEnded || isWhole) {
      // The end is parsed like everything else: once.
      this.#fence = null;
      this.#clearTail();
      return false;
    }
    fence.at = Math.max(fence.at, end);
    const unindented = (line: string) => (indent ? line.replace(new RegExp(`^ {0,${indent}}`), '') : line);
    const rest = this.#text.slice(fence.at);
    // A line that may become the closing one is not shown yet.
    const shown = /^ {0,3}[`~]*$/.test(rest) ? '' : unindented(rest);
    appendCode(fence.block, lines.map((line) => `${unindented(line)}\n`).join(''), shown);
    return true;
  }
}

function offsets(text: string): number[] {
  const starts = [0];
  for (let at = text.indexOf('\n'); at >= 0; at = text.indexOf('\n', at + 1)) starts.push(at + 1);
  return starts;
}

/** Adds the element of a list or of a table to `root`. */
function openContainer(open: Token, root: HTMLElement): OpenContainer {
  if (open.type === 'table_open') {
    const { scroll, table } = tableFrame();
    root.append(scroll);
    return { kind: 'table', element: table, head: '' };
  }
  const list = document.createElement(open.tag);
  // Marks stand where its lines begin, also in languages that are written from the right.
  list.dir = 'auto';
  const start = open.attrGet('start');
  if (start !== null) list.setAttribute('start', String(start));
  root.append(list);
  return { kind: 'list', element: list, head: '' };
}

/** The HTML of a unit. Items and rows are put into a container, without which a sanitizer drops them. */
function render(tokens: Token[], env: Env, kind?: 'list' | 'table'): string {
  const html = md.renderer.render(tokens, md.options, env);
  if (kind === 'list') return `<ul>${html}</ul>`;
  if (kind === 'table') return html.startsWith('<thead') ? `<table>${html}</table>` : `<table><tbody>${html}</tbody></table>`;
  return html;
}

function insert({ kind, element }: OpenContainer, nodes: Node[]): void {
  for (const node of nodes) {
    if (kind === 'list' || node.nodeName === 'THEAD') element.append(node);
    else (element.querySelector('tbody') ?? element.appendChild(document.createElement('tbody'))).append(node);
  }
}
