// Export and import: conversations as JSON, which can be read again, and as Markdown.
import { newId } from '../ids';
import { childrenOf, pathOf } from '../tree';
import type { Conversation, Message, StoredFile } from '../types';
import type { Bundle } from './db';

const FORMAT = 'metal-attention-conversations';

interface ExportedFile extends Omit<StoredFile, 'blob'> {
  data?: string;
  type?: string;
}

async function base64(blob: Blob): Promise<string> {
  const bytes = new Uint8Array(await blob.arrayBuffer());
  let text = '';
  for (let i = 0; i < bytes.length; i += 0x8000) text += String.fromCharCode(...bytes.subarray(i, i + 0x8000));
  return btoa(text);
}

export async function toJson(bundles: Bundle[]): Promise<string> {
  const conversations = await Promise.all(
    bundles.map(async ({ conversation, messages, files }) => ({
      conversation,
      messages,
      files: await Promise.all(
        files.map(async ({ blob, ...file }): Promise<ExportedFile> => (blob ? { ...file, type: blob.type, data: await base64(blob) } : file)),
      ),
    })),
  );
  return JSON.stringify({ format: FORMAT, version: 1, conversations }, null, 1);
}

const isText = (value: unknown): value is string => typeof value === 'string';

function checkedMessage(value: Message): boolean {
  return Boolean(value) && [value.id, value.parent, value.content].every(isText) && ['user', 'assistant'].includes(value.role);
}

/** The conversations of an exported text, under new ids, so that they never overwrite others. */
export function fromJson(text: string): Bundle[] {
  let read: { format?: string; conversations?: { conversation: Conversation; messages: Message[]; files?: ExportedFile[] }[] };
  try {
    read = JSON.parse(text);
  } catch {
    throw new Error('The file is no JSON.');
  }
  if (read?.format !== FORMAT || !Array.isArray(read.conversations)) throw new Error('The file has no conversations of this page.');
  return read.conversations.map(({ conversation: old, messages, files = [] }) => {
    if (!isText(old?.title) || !Array.isArray(messages) || !messages.every(checkedMessage)) throw new Error('A conversation of the file is damaged.');
    const ids = new Map<string, string>();
    const id = newId();
    for (const message of [...messages].sort((a, b) => (a.id < b.id ? -1 : 1))) ids.set(message.id, newId());
    for (const file of files) ids.set(file.id, newId());
    const renamed = (key: string) => ids.get(key) ?? '';
    const chosen = Object.fromEntries(
      Object.entries(old.chosen ?? {}).flatMap(([from, to]) => (renamed(to) ? [[renamed(from), renamed(to)]] : [])),
    );
    const conversation: Conversation = {
      id,
      title: old.title,
      titleBy: 'user',
      created: Number(old.created) || Date.now(),
      updated: Number(old.updated) || Date.now(),
      pinned: Boolean(old.pinned),
      chosen,
      settings: old.settings ?? {},
      ...(old.summary && renamed(old.summary.until) ? { summary: { until: renamed(old.summary.until), text: String(old.summary.text) } } : {}),
    };
    return {
      conversation,
      messages: messages.map(({ stream: _, ...message }) => ({
        ...message,
        id: renamed(message.id),
        parent: renamed(message.parent),
        conversation: id,
        state: message.state === 'writing' ? 'cut' : (message.state ?? 'done'),
        ...(message.files ? { files: message.files.map((file) => ({ ...file, id: renamed(file.id) })) } : {}),
      })),
      files: files.map(({ data, type, ...file }) => ({
        ...file,
        id: renamed(file.id),
        conversation: id,
        ...(isText(data) ? { blob: new Blob([Uint8Array.from(atob(data), (c) => c.charCodeAt(0))], { type: type ?? '' }) } : {}),
      })),
    };
  });
}

/** The shown path of a conversation as Markdown. */
export function toMarkdown({ conversation, messages }: Bundle): string {
  const path = pathOf(childrenOf(messages), conversation.chosen);
  const parts = path.map(({ role, content, files, steps, model }) => {
    const calls = (steps ?? []).flatMap((step) => [
      step.content,
      ...step.calls.map((call) => `Called \`${call.tool ?? call.name}\` with \`${call.arguments}\``),
    ]);
    const names = (files ?? []).map(({ name }) => `*${name}*`);
    return [`## ${role === 'user' ? 'Question' : (model ?? 'Answer')}`, ...names, ...calls, content].filter(Boolean).join('\n\n');
  });
  return [`# ${conversation.title}`, ...parts].join('\n\n') + '\n';
}

/** A name for a file, made of a title. */
export const fileName = (title: string, extension: string): string =>
  `${title.replace(/[^\p{L}\p{N}]+/gu, '-').replace(/^-|-$/g, '').slice(0, 60).toLowerCase() || 'conversation'}.${extension}`;
