// @vitest-environment jsdom
import { beforeAll, describe, expect, it } from 'vitest';
import { codeFileName } from '../../src/lib/markdown/decorate';
import { StreamRenderer } from '../../src/lib/markdown/stream';
import { RAIN, longText } from '../answers';

const TEXTS = [
  RAIN,
  longText(900),
  '# a\n#b\n\ntext\nx | y\n--|--x\n\nx | y\n--|--\n1 | 2\n3 | 4\nno row\n\nend',
  '- a\n- b\n\n  more of b\n\n- c\n  - d\n    1. e\n    2. f\n\n* other\n* list\n\n---\n7. seven\n8. eight\n\n   ```js\n   code\n   ```\n9. nine\n',
  '> quote\nlazy\n> > deep\n\n    indented code\n\n    more\n\ntext\n===\n',
  '```\nno language\n``\n```\n\n````md\n```js\nx\n```\n````\n~~~py\na\n~~~\nend ```',
  'Costs $5 and $6, but $x^2$ and \\(y\\) and\n\n\\[\nz\n\\]\n\n$$ a $$\n\n$$\nunfinished\n\n$$',
  '[a]: https://example.org "t"\n\nSee [a] and [b].\n\n[b]: https://example.com\n\nAgain [b]. <b>html</b> <script>x()</script> ![pic](https://example.org/p.png)',
  '**bold *and italic*** `code` ~~gone~~ https://example.org/x_y [l](javascript:alert(1)) &amp; \\* \n\n1. a\n1. b\n\n\n1. c',
  '```rust\nfn main() {\n    println!("{}", 1);\n}',
  '- [ ] task\n- item with `code`\n- https://example.org\n\npara\n- list after para\n+ plus\n',
  '| a | b |\n|---|:-:|\n| 1 | 2 |\n\n| c |\n|---|\n| `x|y` |\ntail\n\n- x\n\n| d | e |\n|--|--|\n',
];

/** The HTML of a root, with neighbouring texts joined. */
function htmlOf(root: HTMLElement): string {
  root.normalize();
  return root.innerHTML;
}
function render(text: string, cuts: number[]): string {
  const root = document.createElement('div');
  const renderer = new StreamRenderer(root);
  for (const cut of cuts) renderer.update(text.slice(0, cut), false);
  renderer.update(text, true);
  return htmlOf(root);
}
/** Pseudo-random numbers, the same in every run. */
function* randoms(seed: number): Generator<number> {
  for (;;) yield (seed = (seed * 48271) % 0x7fffffff) / 0x7fffffff;
}

beforeAll(async () => {
  // Loaded before, so that colours and formulas come at once and at the same time in all renderings.
  await Promise.all([import('../../src/lib/markdown/highlight'), import('../../src/lib/markdown/math')]);
});
const settled = () => new Promise((resolve) => setTimeout(resolve, 20));

describe('a growing text', () => {
  it('is at its end what the whole text is', () => {
    for (const [index, text] of TEXTS.entries()) {
      const whole = render(text, []);
      const random = randoms(index + 1);
      for (let round = 0; round < 3; round++) {
        const cuts: number[] = [];
        for (let at = 0; at < text.length; at += 1 + Math.floor(random.next().value! * (round % 2 ? 12 : 60))) cuts.push(at);
        expect(render(text, cuts), `text ${index}, cuts ${cuts.join()}`).toBe(whole);
      }
      if (text.length < 200) expect(render(text, Array.from(text, (_, at) => at))).toBe(whole);
    }
  });

  it('goes on after it was whole', () => {
    const text = 'First.\n\n- a sentence that ends here';
    const root = document.createElement('div');
    const renderer = new StreamRenderer(root);
    renderer.update(text, true);
    renderer.update(`${text} and goes`, false);
    renderer.update(`${text} and goes on`, true);
    expect(htmlOf(root)).toBe(render(`${text} and goes on`, []));
  });

  it('never touches finished blocks again', () => {
    const text = longText(2500);
    const root = document.createElement('div');
    const renderer = new StreamRenderer(root);
    const seen = new Map<number, string>();
    let first: Element | undefined;
    for (let at = 0; at < text.length; at += 11) {
      renderer.update(text.slice(0, at), false);
      const finished = [...root.children].slice(0, -2);
      if (first) expect(root.firstElementChild).toBe(first);
      else if (finished.length) first = finished[0];
      finished.forEach((element, index) => {
        const html = element.textContent ?? '';
        if (seen.has(index)) expect(html).toBe(seen.get(index));
        else seen.set(index, html);
      });
    }
  });

  it('renders only an open part that does not grow with the text', () => {
    const text = longText(20_000);
    const renderer = new StreamRenderer(document.createElement('div'));
    let longest = 0;
    for (let at = 0; at < text.length; at += 199) {
      renderer.update(text.slice(0, at), false);
      longest = Math.max(longest, renderer.openLength);
    }
    expect(longest).toBeLessThan(600);
  });

  it('keeps lists, tables and code in parts, too', () => {
    const long: [string, string][] = [
      ['list', Array.from({ length: 150 }, (_, i) => `${i + 1}. item number ${i}\n`).join('')],
      ['table', `| a | b |\n|---|---|\n${Array.from({ length: 150 }, (_, i) => `| ${i} | value |\n`).join('')}`],
    ];
    for (const [name, text] of long) {
      const renderer = new StreamRenderer(document.createElement('div'));
      let longest = 0;
      for (let at = 0; at < text.length; at += 50) {
        renderer.update(text.slice(0, at), false);
        longest = Math.max(longest, renderer.openLength);
      }
      expect(longest, name).toBeLessThan(200);
    }
  });
});

describe('a rendered text', () => {
  it('has nothing dangerous in it', () => {
    const html = render(TEXTS[7]! + TEXTS[8]!, []);
    expect(html).not.toMatch(/<script|<b>|<img|href="javascript:|style=/);
    expect(html).toContain('rel="noopener noreferrer"');
  });

  it('has formulas, and amounts of money stay text', async () => {
    const root = document.createElement('div');
    new StreamRenderer(root).update(TEXTS[6]!, true);
    await settled();
    expect(root.textContent).toContain('Costs $5 and $6');
    expect(root.querySelectorAll('.katex').length).toBeGreaterThanOrEqual(4);
  });

  it('has coloured code with a language', async () => {
    const root = document.createElement('div');
    new StreamRenderer(root).update('```python\nx = 1\n```', true);
    await settled();
    expect(root.querySelector('.code header span')?.textContent).toBe('Python');
    expect(root.querySelector('.hljs-number')?.textContent).toBe('1');
  });

  it('numbers lists by their first number', () => {
    expect(render('7. a\n8. b\n', [])).toContain('<ol dir="auto" start="7">');
  });
});

describe('a file of code', () => {
  it('is named by what it mentions, by what it defines, or by its language', () => {
    expect(codeFileName('python', '# tools/rain.py\n')).toBe('code.py');
    expect(codeFileName('python', '# rain.py\nx = 1')).toBe('rain.py');
    expect(codeFileName('rust', 'fn main() {}')).toBe('main.rs');
    expect(codeFileName('bash', 'ls')).toBe('code.sh');
    expect(codeFileName('', 'text')).toBe('code.txt');
  });
});
