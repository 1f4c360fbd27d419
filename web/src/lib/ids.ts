// Ids of conversations and messages: 14 characters, 9 for the time and 5 random, so that they sort by time.

let newest = 0;

/** A new id. It sorts after all ids that this page has created. */
export function newId(): string {
  newest = Math.max(Date.now(), newest + 1);
  const random = Math.floor(Math.random() * 36 ** 5);
  return newest.toString(36).padStart(9, '0') + random.toString(36).padStart(5, '0');
}

export const timeOfId = (id: string): number => parseInt(id.slice(0, 9), 36);
