import { describe, expect, it } from 'vitest';
import { childrenOf, choosing, pathOf, subtreeOf, versionsOf } from '../../src/lib/tree';
import type { Message } from '../../src/lib/types';

const message = (id: string, parent: string, role: 'user' | 'assistant' = 'user'): Message => ({ id, parent, role, conversation: 'c', content: id, created: 0, state: 'done' });
// q1 has the answers a1 and a2; after a1 come q2 and its edited version q3.
const messages = [message('q1', ''), message('a1', 'q1', 'assistant'), message('a2', 'q1', 'assistant'), message('q2', 'a1'), message('q3', 'a1')];
const byId = new Map(messages.map((one) => [one.id, one]));
const ids = (list: Message[]) => list.map(({ id }) => id);

describe('the tree of messages', () => {
  const children = childrenOf(messages);

  it('shows the newest versions where none is chosen', () => {
    expect(ids(pathOf(children, {}))).toEqual(['q1', 'a2']);
  });

  it('shows what is chosen', () => {
    expect(ids(pathOf(children, { q1: 'a1' }))).toEqual(['q1', 'a1', 'q3']);
    expect(ids(pathOf(children, { q1: 'a1', a1: 'q2' }))).toEqual(['q1', 'a1', 'q2']);
  });

  it('ignores choices of messages that are gone', () => {
    expect(ids(pathOf(children, { '': 'gone', q1: 'gone' }))).toEqual(['q1', 'a2']);
  });

  it('counts versions', () => {
    const { list, index } = versionsOf(children, byId.get('q3')!);
    expect([ids(list), index]).toEqual([['q2', 'q3'], 1]);
  });

  it('finds what follows a message on all branches', () => {
    expect(subtreeOf(children, 'a1').sort()).toEqual(['a1', 'q2', 'q3']);
  });

  it('puts any message on the path', () => {
    for (const { id } of messages) expect(ids(pathOf(children, choosing(byId, { q1: 'a2' }, id)))).toContain(id);
  });

  it('begins with messages whose parents are lost, and ends in circles', () => {
    expect(ids(pathOf(childrenOf([message('x', 'lost')]), {}))).toEqual(['x']);
    expect(pathOf(childrenOf([message('x', 'y'), message('y', 'x')]), {})).toEqual([]);
  });
});
