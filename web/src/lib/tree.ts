// The messages of a conversation are a tree: an edited question and a repeated answer are siblings of the ones before. Of each message
// one answer is chosen; the chosen ones are the path that is shown and sent.
import type { Message } from './types';

export type Chosen = Record<string, string>;
/** By the id of a message ('' for the beginning): the messages after it, the oldest first. */
export type Children = Map<string, Message[]>;

export function childrenOf(messages: Iterable<Message>): Children {
  const all = [...messages].sort((a, b) => (a.id < b.id ? -1 : 1));
  const ids = new Set(all.map(({ id }) => id));
  const children: Children = new Map();
  for (const message of all) {
    // A message whose parent is lost begins the conversation.
    const parent = ids.has(message.parent) ? message.parent : '';
    const list = children.get(parent);
    if (list) list.push(message);
    else children.set(parent, [message]);
  }
  return children;
}

/** The chosen message after `parent`; the newest where none is chosen. */
function next(children: Children, chosen: Chosen, parent: string): Message | undefined {
  const list = children.get(parent);
  return list?.find(({ id }) => id === chosen[parent]) ?? list?.at(-1);
}

/** The path that is shown, the first message first. */
export function pathOf(children: Children, chosen: Chosen): Message[] {
  const path: Message[] = [];
  const seen = new Set<string>();
  for (let message = next(children, chosen, ''); message && !seen.has(message.id); message = next(children, chosen, message.id)) {
    seen.add(message.id);
    path.push(message);
  }
  return path;
}

/** The versions of a message, itself included, and its index among them. */
export function versionsOf(children: Children, message: Message): { list: Message[]; index: number } {
  const list = [...children.values()].find((siblings) => siblings.some(({ id }) => id === message.id)) ?? [message];
  return { list, index: list.findIndex(({ id }) => id === message.id) };
}

/** A message and everything after it, on all branches. */
export function subtreeOf(children: Children, id: string): string[] {
  const ids = [id];
  for (let i = 0; i < ids.length; i++) for (const child of children.get(ids[i]!) ?? []) ids.push(child.id);
  return ids;
}

/** The choices that put `id` on the path. */
export function choosing(messages: Map<string, Message>, chosen: Chosen, id: string): Chosen {
  const changed = { ...chosen };
  const seen = new Set<string>();
  for (let message = messages.get(id); message && !seen.has(message.id); message = messages.get(message.parent)) {
    seen.add(message.id);
    changed[messages.has(message.parent) ? message.parent : ''] = message.id;
  }
  return changed;
}
