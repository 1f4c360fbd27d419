import { describe, expect, it } from 'vitest';
import { Lines, dataOf } from '../../src/lib/api/lines';

const BODY = 'data: {"a":"ä€😀"}\n\ndata: {"b":2}\r\n\n: note\ndata: [DONE]\n\n';
const bytes = new TextEncoder().encode(BODY);

/** The data of a body that arrives in pieces, with the count of bytes after each. */
function read(cuts: number[], start = 0): [string, number][] {
  const lines = new Lines(start);
  const found: [string, number][] = [];
  let from = start;
  for (const cut of [...cuts.filter((at) => at > start), bytes.length]) {
    for (const line of lines.add(bytes.subarray(from, cut))) {
      const data = dataOf(line);
      if (data) found.push([data, lines.end]);
    }
    from = cut;
  }
  return found;
}

describe('lines of a stream', () => {
  const whole = read([]);

  it('are the same however the bytes are cut', () => {
    expect(whole.map(([data]) => data)).toEqual(['{"a":"ä€😀"}', '{"b":2}', '[DONE]']);
    for (let a = 0; a < bytes.length; a++) for (let b = a; b < bytes.length; b += 7) expect(read([a, b])).toEqual(whole);
  });

  it('count bytes from which a stream can be continued', () => {
    whole.forEach(([, end], index) => expect(read([], end).map(([data]) => data)).toEqual(whole.slice(index + 1).map(([data]) => data)));
  });

  it('have a limit', () => {
    const lines = new Lines();
    const add = () => {
      for (let i = 0; i < 40; i++) for (const _ of lines.add(new Uint8Array(1 << 20).fill(97))) void _;
    };
    expect(add).toThrow('without an end');
  });
});
