import { describe, expect, it } from 'vitest';
import { oldestTurns, textOf, turnsOf } from '../../src/lib/context';
import type { Message } from '../../src/lib/types';

let n = 0;
const message = (role: 'user' | 'assistant', length: number, more: Partial<Message> = {}): Message => ({ id: String(++n), parent: '', conversation: 'c', role, content: 'x'.repeat(length), created: 0, state: 'done', ...more });
const turn = (length: number): Message[] => [message('user', length / 2), message('assistant', length / 2)];

describe('the oldest turns', () => {
  it('are as few as leave a quarter of the context free', () => {
    const path = [...turn(4400), ...turn(3600), ...turn(8000), ...turn(400)];
    expect(oldestTurns(path, 4100, 0.25)).toEqual({ until: path[1]!.id, nTurns: 1, tokens: 1100 });
    expect(oldestTurns(path, 2048, 0.25)).toEqual({ until: path[5]!.id, nTurns: 3, tokens: 4000 });
  });

  it('are some even where the guess says that all fits', () => {
    const path = [...turn(400), ...turn(400), ...turn(400)];
    expect(oldestTurns(path, 400, 0.25)).toMatchObject({ nTurns: 1, tokens: 100 });
    expect(oldestTurns(path, 0, 0.25)).toMatchObject({ nTurns: 1 });
  });

  it('are never the last one', () => {
    expect(oldestTurns(turn(4000), 100, 0.25)).toBeUndefined();
    expect(oldestTurns([...turn(4), ...turn(4000)], 100, 0.25)).toMatchObject({ nTurns: 1 });
  });

  it('count files and what tools said', () => {
    const calls = [{ id: '1', name: 'f', arguments: '{}', result: 'r'.repeat(97) }];
    const first = message('assistant', 0, { steps: [{ content: '', calls }] });
    expect(textOf(first)).toHaveLength(103);
    const question = message('user', 0, { files: [{ id: 'a', name: 'a', kind: 'text', tokens: 30 }, { id: 'b', name: 'b', kind: 'picture' }] });
    expect(oldestTurns([question, first, ...turn(40)], 8, 0.25)?.tokens).toBe(556);
  });
});

it('turns begin with questions', () => {
  const path = [message('assistant', 1), ...turn(2), message('assistant', 1), message('user', 1)];
  expect(turnsOf(path).map((one) => one.length)).toEqual([1, 3, 1]);
});
