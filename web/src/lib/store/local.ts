// Small values in localStorage, which is written at once: what is being typed survives a killed browser.

export function read(key: string): string | null {
  try {
    return localStorage.getItem(key);
  } catch {
    return null;
  }
}

/** Writes a value; null removes it. Returns whether it is stored: storage may be full or disabled. */
export function write(key: string, value: string | null): boolean {
  try {
    if (value === null) localStorage.removeItem(key);
    else localStorage.setItem(key, value);
    return true;
  } catch {
    return false;
  }
}

export function readJson<T>(key: string): T | undefined {
  try {
    return JSON.parse(read(key) ?? 'null') ?? undefined;
  } catch {
    return undefined;
  }
}

export const writeJson = (key: string, value: unknown): boolean => write(key, JSON.stringify(value));

export const draftOf = (conversation: string): string => read(`draft/${conversation}`) ?? '';
export const keepDraft = (conversation: string, text: string): boolean => write(`draft/${conversation}`, text || null);
