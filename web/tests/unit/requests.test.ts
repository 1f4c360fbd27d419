import { describe, expect, it } from 'vitest';
import { fieldsOf, messagesFor, schemaProblem } from '../../src/lib/api/chat';
import { addCalls } from '../../src/lib/api/tools';
import { dayGroup, tokens } from '../../src/lib/format';
import { findIn, marked } from '../../src/lib/search';
import type { Message, ToolCall } from '../../src/lib/types';

const message = (role: 'user' | 'assistant', content: string, more: Partial<Message> = {}): Message => ({ id: content, parent: '', conversation: 'c', role, content, created: 0, state: 'done', ...more });
const noFiles = () => Promise.resolve({ pictures: [], texts: [] });

describe('the messages of a request', () => {
  it('have tool calls between the texts', async () => {
    const calls: ToolCall[] = [{ id: '1', name: 'f', arguments: '{"a":1}', result: 'r' }];
    const list = await messagesFor([message('user', 'q'), message('assistant', 'end', { steps: [{ content: 'first', thoughts: 'hm', calls }] })], { system: 'S' }, '', noFiles);
    expect(list.map(({ role, content }) => [role, content])).toEqual([['system', 'S'], ['user', 'q'], ['assistant', 'first'], ['tool', 'r'], ['assistant', 'end']]);
    expect(list[2]).toMatchObject({ reasoning_content: 'hm', tool_calls: [{ id: '1', function: { arguments: '{"a":1}' } }] });
  });

  it('merge neighbours of one role, and leave out an empty answer at the end', async () => {
    const list = await messagesFor([message('user', 'a'), message('user', 'b'), message('assistant', '')], {}, '', noFiles);
    expect(list).toEqual([{ role: 'user', content: 'a\n\nb' }]);
  });

  it('end with the text that is continued', async () => {
    const list = await messagesFor([message('user', 'a'), message('assistant', 'so far')], {}, '', noFiles);
    expect(list.at(-1)).toEqual({ role: 'assistant', content: 'so far' });
  });

  it('have files before the question, and a summary in the system message', async () => {
    const read = () => Promise.resolve({ pictures: [{ type: 'image_url' as const, image_url: { url: 'data:' } }], texts: ['The file x'] });
    const list = await messagesFor([message('user', 'a', { files: [{ id: 'f', name: 'x', kind: 'text' }] })], {}, 'short', read);
    expect(list[0]?.content).toContain('short');
    expect(list[1]?.content).toEqual([{ type: 'image_url', image_url: { url: 'data:' } }, { type: 'text', text: 'The file x\n\na' }]);
  });
});

describe('the fields of a request', () => {
  it('are only those that were chosen', () => {
    expect(fieldsOf({}, true)).toEqual({});
    expect(fieldsOf({ sampling: { temperature: 0, top_k: undefined, stop: [] } }, false)).toEqual({ temperature: 0 });
  });

  it('switch thinking only for models that think', () => {
    expect(fieldsOf({ think: false, effort: 'high' }, true)).toEqual({ enable_thinking: false });
    expect(fieldsOf({ effort: 'high' }, true)).toEqual({ reasoning_effort: 'high' });
    expect(fieldsOf({ think: false }, false)).toEqual({});
  });

  it('have a schema that is JSON, else any object', () => {
    expect(fieldsOf({ json: true, schema: '{"type":"object"}' }, false)).toEqual({ response_format: { type: 'json_schema', json_schema: { name: 'answer', schema: { type: 'object' } } } });
    expect(fieldsOf({ json: true, schema: '{"type":' }, false)).toEqual({ response_format: { type: 'json_object' } });
    expect([schemaProblem('{}'), schemaProblem('[]')]).toEqual(['', 'A schema is a JSON object.']);
  });
});

describe('small things', () => {
  it('join the pieces of calls', () => {
    const calls: ToolCall[] = [];
    addCalls(calls, [{ index: 0, id: 'a', function: { name: 'f', arguments: '' } }]);
    addCalls(calls, [{ index: 0, function: { arguments: '{"x"' } }, { index: 1, id: 'b', function: { name: 'g', arguments: '{}' } }]);
    addCalls(calls, [{ index: 0, function: { arguments: ':1}' } }]);
    expect(calls).toEqual([{ id: 'a', name: 'f', arguments: '{"x":1}' }, { id: 'b', name: 'g', arguments: '{}' }]);
  });

  it('write counts of tokens', () => {
    expect([tokens(148), tokens(6100), tokens(12_400), tokens(32_768, true), tokens(131_072, true)]).toEqual(['148', '6.1k', '12.4k', '32k', '128k']);
  });

  it('group days', () => {
    const now = new Date(2026, 5, 10, 12).getTime();
    const at = (...args: [number, number, number]) => new Date(...args).getTime();
    expect([at(2026, 5, 10), at(2026, 5, 9), at(2026, 5, 5), at(2026, 4, 2), at(2025, 4, 2)].map((time) => dayGroup(time, now))).toEqual(['Today', 'Yesterday', 'Last 7 days', 'May', 'May 2025']);
  });

  it('find all words, in titles and texts, and mark them', () => {
    const text = (kind: 'questions' | 'answers' | 'files', title: string, body: string, conversation: string) => ({ kind, title, text: body, conversation, message: body, time: 1 });
    const texts = [text('questions', 'Rain gauge', 'how much', 'a'), text('answers', 'Tomato', 'the rain gauge shows rain', 'b'), text('files', 'manual.pdf', 'Page 4\nlevel rain gauge', 'b')];
    expect(findIn(texts, 'rain gauge', 'all')).toMatchObject({ nChats: 2, hits: [{ conversation: 'a' }, { conversation: 'b' }, { note: 'page 4' }] });
    expect(findIn(texts, 'gauge', 'files').hits).toHaveLength(1);
    expect(findIn(texts, 'snow', 'all').hits).toEqual([]);
    expect(marked('A rain gauge.', 'rain gauge')).toEqual([['A ', false], ['rain gauge', true], ['.', false]]);
    expect(marked('a.b', '.')).toEqual([['a', false], ['.', true], ['b', false]]);
  });
});
