import 'fake-indexeddb/auto';
import { beforeEach, describe, expect, it } from 'vitest';
import * as db from '../../src/lib/store/db';
import { bundlesOf, migrate, oldSettings } from '../../src/lib/store/migrate';
import { fileName, fromJson, toJson, toMarkdown } from '../../src/lib/store/transfer';
import { newId } from '../../src/lib/ids';
import type { Conversation, Message } from '../../src/lib/types';

const conversation = (id: string): Conversation => ({ id, title: 'Title', titleBy: 'question', created: 1, updated: 1, pinned: false, chosen: {}, settings: {} });
const message = (id: string, owner: string, parent = ''): Message => ({ id, parent, conversation: owner, role: 'user', content: `text of ${id}`, created: 1, state: 'done' });

describe('the database', () => {
  it('hides no change behind the stored state of an earlier one', async () => {
    const { library } = await import('../../src/lib/state/library.svelte');
    const id = newId();
    await db.putConversation(conversation(id));
    library.conversations.set(id, conversation(id));
    const shown = () => library.conversations.get(id);
    const changes = [library.patch(id, { title: 'New' }), library.patch(id, { pinned: true })];
    for (const change of changes) {
      await change;
      expect(shown()).toMatchObject({ title: 'New', pinned: true });
    }
    expect((await db.bundleOf(id))!.conversation).toMatchObject({ title: 'New', pinned: true });
  });

  it('keeps conversations, messages and files', async () => {
    const id = newId();
    await db.putConversation(conversation(id));
    await db.putMessage(message('m1', id));
    await db.putMessage(message('m2', id, 'm1'));
    await db.putFile({ id: 'f1', conversation: id, name: 'a.txt', text: 'hello' });
    const bundle = (await db.bundleOf(id))!;
    expect(bundle.messages.map((one) => one.id)).toEqual(['m1', 'm2']);
    expect(bundle.files[0]?.text).toBe('hello');
  });

  it('changes fields of a conversation side by side', async () => {
    const id = newId();
    await db.putConversation(conversation(id));
    // As two tabs do it: each knows only its own change.
    await Promise.all([
      db.patchConversation(id, () => ({ title: 'Renamed', titleBy: 'user' })),
      db.patchConversation(id, (old) => ({ chosen: { ...old.chosen, a: 'b' } })),
      db.patchConversation(id, (old) => (old.titleBy === 'question' ? { title: 'By the model' } : undefined)),
      db.patchConversation(id, (old) => ({ chosen: { ...old.chosen, c: 'd' } })),
    ]);
    expect(await db.get('conversations', id)).toMatchObject({ title: 'Renamed', chosen: { a: 'b', c: 'd' } });
  });

  it('deletes a conversation whole, and can bring it back', async () => {
    const id = newId();
    await db.putConversation(conversation(id));
    await db.putMessage(message('x1', id));
    const bundle = (await db.deleteConversation(id))!;
    expect(await db.messagesOf(id)).toEqual([]);
    // An answer that is still written to a deleted conversation is not stored.
    expect(await db.putMessage(message('x2', id))).toBe(false);
    await db.putBundles([bundle]);
    expect((await db.messagesOf(id)).map((one) => one.id)).toEqual(['x1']);
  });
});

describe('export and import', () => {
  it('gives the same conversation under new ids', async () => {
    const old = { ...conversation('c1'), chosen: { '': 'm1', m1: 'm2' }, summary: { until: 'm1', text: 'short' } };
    const bundle = {
      conversation: old,
      messages: [{ ...message('m1', 'c1'), files: [{ id: 'f1', name: 'p.png', kind: 'picture' as const }] }, message('m2', 'c1', 'm1')],
      files: [{ id: 'f1', conversation: 'c1', name: 'p.png', blob: new Blob([new Uint8Array([1, 2, 250])], { type: 'image/png' }) }],
    };
    const [read] = fromJson(await toJson([bundle]));
    expect(read!.conversation.id).not.toBe('c1');
    expect(read!.messages.map(({ content }) => content)).toEqual(['text of m1', 'text of m2']);
    expect(read!.messages[1]!.parent).toBe(read!.messages[0]!.id);
    expect(read!.conversation.chosen).toEqual({ '': read!.messages[0]!.id, [read!.messages[0]!.id]: read!.messages[1]!.id });
    expect(read!.conversation.summary?.until).toBe(read!.messages[0]!.id);
    expect(read!.messages[0]!.files?.[0]?.id).toBe(read!.files[0]!.id);
    expect([...new Uint8Array(await read!.files[0]!.blob!.arrayBuffer())]).toEqual([1, 2, 250]);
  });

  it('refuses other files', () => {
    expect(() => fromJson('no')).toThrow('no JSON');
    expect(() => fromJson('{"a":1}')).toThrow('no conversations');
    expect(() => fromJson('{"format":"metal-attention-conversations","conversations":[{"conversation":{"title":"x"},"messages":[{}]}]}')).toThrow('damaged');
  });

  it('writes Markdown of the shown path', () => {
    const text = toMarkdown({ conversation: conversation('c'), messages: [message('a', 'c'), { ...message('b', 'c', 'a'), role: 'assistant', model: 'M' }], files: [] });
    expect(text).toBe('# Title\n\n## Question\n\ntext of a\n\n## M\n\ntext of b\n');
  });

  it('names files by titles', () => {
    expect(fileName('Rain: a gauge?', 'md')).toBe('rain-a-gauge.md');
    expect(fileName('???', 'md')).toBe('conversation.md');
  });
});

describe('the migration of the earlier page', () => {
  const key = (c: string, m: string) => `chat/${c.padEnd(14, '0')}/${m.padEnd(14, '0')}`;
  const values = new Map<string, string>();
  beforeEach(() => {
    values.clear();
    const storage = { getItem: (k: string) => values.get(k) ?? null, setItem: (k: string, v: string) => values.set(k, v), removeItem: (k: string) => values.delete(k) };
    const proxy = new Proxy(storage, { ownKeys: () => [...values.keys()], getOwnPropertyDescriptor: () => ({ enumerable: true, configurable: true }) });
    Object.defineProperty(globalThis, 'localStorage', { value: proxy, configurable: true });
  });

  it('reads messages in their order, with steps, thoughts and pictures', () => {
    const entries: [string, string][] = [
      [key('c1', '0b'), JSON.stringify({ role: 'assistant', content: 'A', reasoning_content: 'hm', cut: 'Stopped before its end.', steps: [{ content: 's', calls: [{ id: '1', name: 'f', arguments: '{}', result: 'r' }, { id: 2 }] }] })],
      [key('c1', '0a'), JSON.stringify({ role: 'user', content: 'Q\nmore', pictures: [{ id: 'p', name: 'p.png' }] })],
      [key('c2', '0a'), 'broken'],
      ['settings', '{}'],
    ];
    const bundles = bundlesOf(entries, {});
    expect(bundles).toHaveLength(1);
    const [{ conversation: found, messages }] = bundles as [(typeof bundles)[0]];
    expect(found.title).toBe('Q');
    expect(messages.map(({ role }) => role)).toEqual(['user', 'assistant']);
    expect(messages[1]).toMatchObject({ parent: messages[0]!.id, thoughts: 'hm', state: 'cut', steps: [{ content: 's', calls: [{ id: '1', result: 'r' }] }] });
    expect(messages[0]!.files).toEqual([{ id: 'p', name: 'p.png', kind: 'picture' }]);
  });

  it('takes over settings that were chosen', () => {
    expect(oldSettings('{"system":"Be brief","temperature":"0.8","topP":"0.5","maxTokens":"","servers":["files"]}')).toEqual({ system: 'Be brief', sampling: { top_p: 0.5 }, servers: ['files'] });
    expect(oldSettings(null)).toEqual({ sampling: {} });
  });

  it('stores everything, pictures too, before it removes it', async () => {
    values.set(key('zz', '0a'), JSON.stringify({ role: 'user', content: 'Q', pictures: [{ id: 'pic', name: 'p.png' }] }));
    values.set('chat/unreadable', 'x');
    values.set(key('zy', '0b'), 'broken');
    await new Promise<void>((resolve) => {
      const request = indexedDB.open('pictures', 1);
      request.onupgradeneeded = () => request.result.createObjectStore('pictures');
      request.onsuccess = () => {
        const tx = request.result.transaction('pictures', 'readwrite');
        tx.objectStore('pictures').put(new Blob(['png']), 'pic');
        tx.oncomplete = () => {
          request.result.close();
          resolve();
        };
      };
    });
    expect(await migrate()).toBe(1);
    const bundle = (await db.bundleOf('zz'.padEnd(14, '0')))!;
    expect(bundle.messages[0]!.content).toBe('Q');
    expect(bundle.files).toHaveLength(1);
    expect([...values.keys()].sort()).toEqual(['chat/unreadable', key('zy', '0b')].sort());
    expect(await migrate()).toBe(0);
  });
});
