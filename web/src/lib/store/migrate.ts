// Reads the conversations of the page before this one: messages in localStorage under chat/CONVERSATION/MESSAGE, pictures in the
// IndexedDB database "pictures", settings under "settings". The old entries stay until everything is stored in the new database.
import { newId, timeOfId } from '../ids';
import type { ChatSettings, Message, Step, StoredFile } from '../types';
import { type Bundle, putBundles } from './db';

const KEY = /^chat\/([0-9a-z]{14})\/([0-9a-z]{14})$/;
const isText = (value: unknown): value is string => typeof value === 'string';

interface OldMessage {
  role: 'user' | 'assistant';
  content: string;
  reasoning_content?: string;
  cut?: string;
  steps?: { content: string; reasoning_content?: string; calls: Step['calls'] }[];
  pictures?: { id: string; name: string }[];
}

function parsed(text: string | null): unknown {
  try {
    return JSON.parse(text ?? 'null');
  } catch {
    return null;
  }
}

function isMessage(value: unknown): value is OldMessage {
  const { role, content } = (value ?? {}) as OldMessage;
  return (role === 'user' || role === 'assistant') && isText(content);
}

/** The text of a step, its thoughts and its calls, without fields of a wrong type. */
function stepOf(step: NonNullable<OldMessage['steps']>[number]): Step {
  const calls = (Array.isArray(step.calls) ? step.calls : []).filter((call) => [call?.id, call?.name, call?.arguments].every(isText));
  return {
    content: isText(step.content) ? step.content : '',
    ...(isText(step.reasoning_content) ? { thoughts: step.reasoning_content } : {}),
    calls: calls.map(({ id, name, arguments: values, server, tool, result }) => ({ id, name, arguments: values, server, tool, result })),
  };
}

function messageOf(old: OldMessage, id: string, conversation: string, parent: string): Message {
  const pictures = (old.pictures ?? []).filter((picture) => isText(picture?.id) && isText(picture.name));
  return {
    id,
    conversation,
    parent,
    role: old.role,
    content: old.content,
    created: timeOfId(id),
    state: isText(old.cut) ? 'cut' : 'done',
    ...(isText(old.cut) ? { error: { code: 'cut', message: old.cut } } : {}),
    ...(isText(old.reasoning_content) ? { thoughts: old.reasoning_content } : {}),
    ...(Array.isArray(old.steps) ? { steps: old.steps.map(stepOf) } : {}),
    ...(pictures.length ? { files: pictures.map((picture) => ({ id: picture.id, name: picture.name, kind: 'picture' as const })) } : {}),
  };
}

/** The settings of the page before, as those of a conversation. */
export function oldSettings(text: string | null): ChatSettings {
  const { system, temperature, topP, maxTokens, servers } = (parsed(text) ?? {}) as Record<string, unknown>;
  const number = (value: unknown) => (value === '' || value == null || !Number.isFinite(Number(value)) ? undefined : Number(value));
  const sampling = { temperature: number(temperature), top_p: number(topP), max_tokens: number(maxTokens) };
  // The old page always sent 0.8 and 0.95: these are no choices of the user.
  if (sampling.temperature === 0.8) delete sampling.temperature;
  if (sampling.top_p === 0.95) delete sampling.top_p;
  return {
    ...(isText(system) && system.trim() ? { system } : {}),
    sampling: JSON.parse(JSON.stringify(sampling)),
    ...(Array.isArray(servers) && servers.length ? { servers: servers.filter(isText) } : {}),
  };
}

/** The conversations of `entries`, keys and values of the old localStorage. Messages of one conversation follow each other. */
export function bundlesOf(entries: Iterable<[string, string]>, settings: ChatSettings): Bundle[] {
  const found = new Map<string, [string, OldMessage][]>();
  for (const [key, text] of entries) {
    const match = KEY.exec(key);
    const value = parsed(text);
    if (match && isMessage(value)) found.set(match[1]!, [...(found.get(match[1]!) ?? []), [match[2]!, value]]);
    if (key === 'conversation' && Array.isArray(value) && value.every(isMessage)) {
      found.set(newId(), value.map((message) => [newId(), message]));
    }
  }
  const bundles: Bundle[] = [];
  for (const [id, list] of found) {
    list.sort(([a], [b]) => (a < b ? -1 : 1));
    const messages: Message[] = [];
    for (const [key, old] of list) messages.push(messageOf(old, key, id, messages.at(-1)?.id ?? ''));
    const question = messages.find(({ role }) => role === 'user');
    const title = question?.content.trim().split('\n')[0]?.slice(0, 60) || question?.files?.[0]?.name || 'Conversation';
    const conversation = { id, title, titleBy: 'question' as const, created: timeOfId(id), updated: messages.at(-1)!.created, pinned: false, chosen: {}, settings };
    bundles.push({ conversation, messages, files: [] });
  }
  return bundles;
}

/** The old pictures by id; none if there is no such database. */
async function oldPictures(): Promise<Map<string, Blob>> {
  const known = (await indexedDB.databases?.()) ?? [{ name: 'pictures' }];
  if (!known.some(({ name }) => name === 'pictures')) return new Map();
  return new Promise((resolve) => {
    const request = indexedDB.open('pictures', 1);
    request.onupgradeneeded = () => request.transaction?.abort();
    request.onerror = () => resolve(new Map());
    request.onsuccess = () => {
      const db = request.result;
      const found = new Map<string, Blob>();
      const cursor = db.transaction('pictures').objectStore('pictures').openCursor();
      cursor.onerror = () => resolve(found);
      cursor.onsuccess = () => {
        if (!cursor.result) {
          db.close();
          resolve(found);
          return;
        }
        if (cursor.result.value instanceof Blob) found.set(String(cursor.result.key), cursor.result.value);
        cursor.result.continue();
      };
    };
  });
}

/** Stores the conversations of the page before, and removes them from where they were. Returns their number. */
export async function migrate(): Promise<number> {
  const keys = Object.keys(localStorage).filter((key) => KEY.test(key) || key === 'conversation');
  if (!keys.length) return 0;
  const settings = oldSettings(localStorage.getItem('settings'));
  const bundles = bundlesOf(keys.map((key) => [key, localStorage.getItem(key) ?? '']), settings);
  const pictures = await oldPictures();
  for (const bundle of bundles) {
    const refs = bundle.messages.flatMap(({ files }) => files ?? []);
    bundle.files = refs.flatMap(({ id, name }): StoredFile[] => {
      const blob = pictures.get(id);
      return blob ? [{ id, conversation: bundle.conversation.id, name, blob }] : [];
    });
  }
  await putBundles(bundles);
  for (const key of keys) {
    // What could not be read stays where it is.
    const wasRead = key === 'conversation' ? bundles.length > 0 : bundles.some(({ messages }) => messages.some(({ id }) => key.endsWith(id)));
    if (wasRead) localStorage.removeItem(key);
  }
  if (pictures.size) indexedDB.deleteDatabase('pictures');
  return bundles.length;
}
