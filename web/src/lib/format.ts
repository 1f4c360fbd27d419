// Numbers, sizes and times as the page writes them.

export const bytes = (n: number): string => {
  const units = ['B', 'kB', 'MB', 'GB', 'TB'];
  let [value, unit] = [n, 0];
  while (value >= 999.5 && unit < units.length - 1) [value, unit] = [value / 1000, unit + 1];
  return `${unit < 2 ? Math.round(value) : value.toFixed(value < 99.95 ? 1 : 0)} ${units[unit]}`;
};

/** A count of tokens: 148, 6.1k, 32k, 131k. */
export const tokens = (n: number, isTotal = false): string => {
  if (n < 1000) return String(n);
  const k = isTotal && n % 1024 === 0 ? n / 1024 : n / 1000;
  return `${k >= 100 || isTotal || Number.isInteger(k) ? Math.round(k) : k.toFixed(1)}k`;
};

export const seconds = (s: number): string => (s < 10 ? `${s.toFixed(s < 1 ? 2 : 1)} s` : s < 90 ? `${Math.round(s)} s` : `${Math.floor(s / 60)} min ${Math.round(s % 60)} s`);

export const rate = (r: number): string => (r >= 1000 ? Math.round(r).toLocaleString('en') : r.toFixed(1));

export const time = (at: number): string => new Date(at).toLocaleTimeString(undefined, { hour: '2-digit', minute: '2-digit', hour12: false });

const dayOf = (at: number) => {
  const date = new Date(at);
  return new Date(date.getFullYear(), date.getMonth(), date.getDate()).getTime();
};

/** The heading under which a conversation stands: Today, Yesterday, Last 7 days, a month. */
export function dayGroup(at: number, now: number): string {
  const days = Math.round((dayOf(now) - dayOf(at)) / 86_400_000);
  if (days <= 0) return 'Today';
  if (days === 1) return 'Yesterday';
  if (days < 7) return 'Last 7 days';
  const date = new Date(at);
  const isThisYear = date.getFullYear() === new Date(now).getFullYear();
  return date.toLocaleDateString('en-GB', { month: 'long', ...(isThisYear ? {} : { year: 'numeric' }) });
}

/** When something was, in short: a time today, a day, a date. */
export function when(at: number, now: number): string {
  const group = dayGroup(at, now);
  if (group === 'Today') return time(at);
  if (group === 'Yesterday') return group;
  return new Date(at).toLocaleDateString('en-GB', { day: 'numeric', month: 'long' });
}

/** A name of a model as people say it: without folders, file endings and hyphens between words. */
export const modelName = (name: string): string => name.split('/').at(-1)!.replace(/\.gguf$/i, '').replace(/:latest$/, '');

const ORDINALS = ['first', 'second', 'third', 'fourth', 'fifth'];
export const ordinal = (n: number): string => ORDINALS[n - 1] ?? `${n}th`;
