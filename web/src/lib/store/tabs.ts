// Messages between the tabs of this page, and the locks that say which tab writes an answer.

export type Note =
  | { kind: 'message'; conversation: string; id: string }
  | { kind: 'messages-deleted'; conversation: string; ids: string[] }
  | { kind: 'conversation'; id: string }
  | { kind: 'conversation-deleted'; id: string }
  | { kind: 'all' };

const channel = typeof BroadcastChannel === 'undefined' ? undefined : new BroadcastChannel('metal-attention');

export const tell = (note: Note): void => channel?.postMessage(note);

export function listen(action: (note: Note) => void): void {
  channel?.addEventListener('message', ({ data }) => action(data as Note));
}

/** Holds the lock of an answer while `action` runs. Returns undefined, without running it, if another tab writes the answer. */
export async function asWriter<T>(message: string, action: () => Promise<T>): Promise<T | undefined> {
  if (!navigator.locks) return action();
  return navigator.locks.request(`answer/${message}`, { ifAvailable: true }, (lock) => (lock ? action() : undefined));
}

/** Waits until no tab writes an answer any more. */
export async function whenFree(message: string): Promise<void> {
  await navigator.locks?.request(`answer/${message}`, () => {});
}
