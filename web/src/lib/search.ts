// Search over the texts of all conversations: titles, questions, answers, thoughts, tool calls, and files.
import * as db from './store/db';
import type { Conversation, Message, StoredFile } from './types';

export type Scope = 'all' | 'questions' | 'answers' | 'files';

/** A text that can be found. */
export interface SearchText {
  kind: 'questions' | 'answers' | 'files';
  conversation: string;
  message: string;
  title: string;
  time: number;
  text: string;
  /** Of a PDF. */
  pages?: number;
}

export interface Hit {
  conversation: string;
  message: string;
  title: string;
  text: string;
  time: number;
  note?: string;
}

export interface Found {
  hits: Hit[];
  nPlaces: number;
  nChats: number;
  milliseconds: number;
}

const MAX_HITS = 50;

/** The texts of all conversations, the newest conversation first. */
export async function loadTexts(conversations: Conversation[]): Promise<SearchText[]> {
  const [messages, files] = await Promise.all([db.getAll<Message>('messages'), db.getAll<StoredFile>('files')]);
  const owner = new Map(conversations.map((conversation) => [conversation.id, conversation]));
  const fileOf = new Map(files.map((file) => [file.id, file]));
  const texts: SearchText[] = [];
  for (const message of messages) {
    const conversation = owner.get(message.conversation);
    if (!conversation) continue;
    const base = { conversation: conversation.id, message: message.id, title: conversation.title, time: conversation.updated };
    const steps = (message.steps ?? []).flatMap((step) => [step.content, ...step.calls.map((call) => `${call.name} ${call.arguments} ${call.result ?? ''}`)]);
    texts.push({ ...base, kind: message.role === 'user' ? 'questions' : 'answers', text: [...steps, message.content].filter(Boolean).join('\n') });
    for (const file of message.files ?? []) texts.push({ ...base, kind: 'files', title: file.name, text: fileOf.get(file.id)?.text ?? '', pages: file.pages });
  }
  return texts.sort((a, b) => b.time - a.time || (a.message < b.message ? -1 : 1));
}

const words = (query: string) => query.toLowerCase().split(/\s+/).filter(Boolean);

/** Finds texts that have all words of the query, or a title that has. One hit for each conversation, and one for each file. */
export function findIn(texts: SearchText[], query: string, scope: Scope): Found {
  const begun = performance.now();
  const wanted = words(query);
  const hits: Hit[] = [];
  const chats = new Set<string>();
  const seen = new Set<string>();
  let nPlaces = 0;
  if (!wanted.length) return { hits, nPlaces, nChats: 0, milliseconds: 0 };
  for (const { kind, text, title, pages, ...rest } of texts) {
    if (scope !== 'all' && scope !== kind) continue;
    const lower = text.toLowerCase();
    const isTitle = wanted.every((word) => title.toLowerCase().includes(word));
    if (!isTitle && !wanted.every((word) => lower.includes(word))) continue;
    nPlaces += wanted.reduce((sum, word) => sum + Math.max(0, lower.split(word).length - 1), 0) || 1;
    chats.add(rest.conversation);
    const key = kind === 'files' ? rest.message + title : rest.conversation;
    if (seen.has(key) || hits.length >= MAX_HITS) continue;
    seen.add(key);
    const position = lower.indexOf(wanted.find((word) => lower.includes(word)) ?? '');
    const page = kind === 'files' ? [...text.slice(0, position).matchAll(/^Page (\d+)$/gm)].at(-1)?.[1] : undefined;
    hits.push({ ...rest, title, text: around(text, position), ...(page ? { note: `page ${page}${pages ? ` of ${pages}` : ''}` } : {}) });
  }
  return { hits, nPlaces, nChats: chats.size, milliseconds: performance.now() - begun };
}

/** One line of text around a position. */
function around(text: string, position: number): string {
  const start = position < 60 ? 0 : text.indexOf(' ', position - 40) + 1 || position;
  const part = text.slice(start, start + 160).replace(/^Page \d+$/gm, '').replace(/^#+ |[*`]+|^[>|-]+ ?|\|/gm, '').replace(/\s+/g, ' ').trim();
  return `${start > 0 ? '… ' : ''}${part}${start + 160 < text.length ? ' …' : ''}`;
}

/** The parts of a text, with whether they are to be marked. */
export function marked(text: string, query: string): [string, boolean][] {
  const wanted = words(query).map((word) => word.replace(/[.*+?^${}()|[\]\\]/g, '\\$&'));
  if (!wanted.length) return [[text, false]];
  return text
    .split(new RegExp(`((?:${wanted.join('|')})(?:\\s+(?:${wanted.join('|')}))*)`, 'gi'))
    .map((part, index): [string, boolean] => [part, index % 2 === 1])
    .filter(([part]) => part);
}
