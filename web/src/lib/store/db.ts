// The database: conversations, messages and files in IndexedDB. Each message is a record of its own, which only the tab that writes
// the answer changes; a conversation is changed field by field within one transaction. So several tabs never overwrite each other.
import type { Conversation, Message, StoredFile } from '../types';

const NAME = 'metal-attention';
const VERSION = 1;

export type Table = 'conversations' | 'messages' | 'files' | 'values';
let opened: Promise<IDBDatabase> | undefined;

export function openDatabase(): Promise<IDBDatabase> {
  opened ??= new Promise((resolve, reject) => {
    const request = indexedDB.open(NAME, VERSION);
    request.onupgradeneeded = () => {
      const db = request.result;
      db.createObjectStore('conversations', { keyPath: 'id' });
      db.createObjectStore('messages', { keyPath: 'id' }).createIndex('conversation', 'conversation');
      db.createObjectStore('files', { keyPath: 'id' }).createIndex('conversation', 'conversation');
      db.createObjectStore('values');
    };
    request.onsuccess = () => {
      // Another tab with a newer version of the page may change the tables.
      request.result.onversionchange = () => request.result.close();
      resolve(request.result);
    };
    request.onerror = () => reject(request.error ?? new Error('no database'));
    request.onblocked = () => reject(new Error('the database is blocked'));
  });
  return opened;
}

const result = <T>(request: IDBRequest<T>): Promise<T> =>
  new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });

/** Runs `action` in a transaction, and returns its result after the transaction's end. */
export async function within<T>(tables: Table[], mode: IDBTransactionMode, action: (tx: IDBTransaction) => Promise<T> | T): Promise<T> {
  const tx = (await openDatabase()).transaction(tables, mode);
  const done = new Promise<void>((resolve, reject) => {
    tx.oncomplete = () => resolve();
    tx.onabort = () => reject(tx.error ?? new Error('the transaction was aborted'));
  });
  const [value] = await Promise.all([action(tx), done]);
  return value;
}

export const getAll = <T>(table: Table): Promise<T[]> => within([table], 'readonly', (tx) => result(tx.objectStore(table).getAll() as IDBRequest<T[]>));

export const get = <T>(table: Table, key: string): Promise<T | undefined> =>
  within([table], 'readonly', (tx) => result(tx.objectStore(table).get(key) as IDBRequest<T | undefined>));

export const messagesOf = (conversation: string): Promise<Message[]> =>
  within(['messages'], 'readonly', (tx) => result(tx.objectStore('messages').index('conversation').getAll(conversation) as IDBRequest<Message[]>));

export const filesOf = (conversation: string): Promise<StoredFile[]> =>
  within(['files'], 'readonly', (tx) => result(tx.objectStore('files').index('conversation').getAll(conversation) as IDBRequest<StoredFile[]>));

/** Stores a message. Nothing is stored if its conversation was deleted meanwhile. Returns whether it is stored. */
export const putMessage = (message: Message): Promise<boolean> =>
  within(['conversations', 'messages'], 'readwrite', async (tx) => {
    const owner = await result(tx.objectStore('conversations').getKey(message.conversation));
    if (owner === undefined) return false;
    tx.objectStore('messages').put(message);
    return true;
  });

export const putFile = (file: StoredFile): Promise<void> =>
  within(['files'], 'readwrite', (tx) => {
    tx.objectStore('files').put(file);
  });

export const putConversation = (conversation: Conversation): Promise<void> =>
  within(['conversations'], 'readwrite', (tx) => {
    tx.objectStore('conversations').put(conversation);
  });

/** Changes a stored conversation by what `change` returns for its present state; undefined: no change. Returns the new state;
 * undefined if the conversation does not exist. */
export const patchConversation = (
  id: string,
  change: (conversation: Conversation) => Partial<Conversation> | undefined,
): Promise<Conversation | undefined> =>
  within(['conversations'], 'readwrite', async (tx) => {
    const table = tx.objectStore('conversations');
    const old = (await result(table.get(id))) as Conversation | undefined;
    const patch = old && change(old);
    if (!old || !patch) return old;
    const changed = { ...old, ...patch };
    table.put(changed);
    return changed;
  });

/** Everything that belongs to a conversation. */
export interface Bundle {
  conversation: Conversation;
  messages: Message[];
  files: StoredFile[];
}

export async function bundleOf(id: string): Promise<Bundle | undefined> {
  const conversation = await get<Conversation>('conversations', id);
  return conversation && { conversation, messages: await messagesOf(id), files: await filesOf(id) };
}

/** Stores whole conversations: imported ones, migrated ones, and those whose deletion is undone. */
export const putBundles = (bundles: Bundle[]): Promise<void> =>
  within(['conversations', 'messages', 'files'], 'readwrite', (tx) => {
    for (const { conversation, messages, files } of bundles) {
      tx.objectStore('conversations').put(conversation);
      for (const message of messages) tx.objectStore('messages').put(message);
      for (const file of files) tx.objectStore('files').put(file);
    }
  });

/** Deletes a conversation, and returns what it was. */
export async function deleteConversation(id: string): Promise<Bundle | undefined> {
  const bundle = await bundleOf(id);
  await within(['conversations', 'messages', 'files'], 'readwrite', async (tx) => {
    tx.objectStore('conversations').delete(id);
    for (const table of ['messages', 'files'] as const) {
      const keys = await result(tx.objectStore(table).index('conversation').getAllKeys(id));
      for (const key of keys) tx.objectStore(table).delete(key);
    }
  });
  return bundle;
}

export const deleteMessages = (ids: string[]): Promise<void> =>
  within(['messages'], 'readwrite', (tx) => {
    for (const id of ids) tx.objectStore('messages').delete(id);
  });

export const getValue = <T>(key: string): Promise<T | undefined> => get<T>('values', key);

export const putValue = (key: string, value: unknown): Promise<void> =>
  within(['values'], 'readwrite', (tx) => {
    tx.objectStore('values').put(value, key);
  });
