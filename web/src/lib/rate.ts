// The numbers of an answer: its rate while it is written, the trace of rates, and what is left of them at the end.
import type { Usage } from './api/chat';
import type { Stats } from './types';

/** Bars of a trace. */
export const BARS = 24;
/** Milliseconds of a bar while the answer is written. */
const SLICE = 250;
/** Milliseconds over which the live rate is measured. */
const WINDOW = 1500;

export const noStats = (): Stats => ({ tokens: 0, seconds: 0, requests: 0, trace: [] });

/** Counts the tokens of one request while they arrive. */
export class Counter {
  readonly #begun: number;
  #times: number[] = [];
  #slices: number[] = [];
  #sliceStart = 0;
  first: number | undefined;
  last = 0;
  tokens = 0;

  constructor(now: number) {
    this.#begun = now;
  }

  /** A piece of the answer, which is one token as a rule. */
  add(now: number): void {
    if (this.first === undefined) {
      this.first = now;
      this.#sliceStart = now;
    }
    this.last = now;
    this.tokens++;
    this.#times.push(now);
    if (this.#times.length > 4096) this.#times.splice(0, 2048);
    while (now - this.#sliceStart >= SLICE) {
      this.#slices.push(0);
      this.#sliceStart += SLICE;
    }
    if (!this.#slices.length) this.#slices.push(0);
    this.#slices[this.#slices.length - 1]!++;
  }

  /** Tokens a second over the last moments. */
  rate(now: number): number {
    let low = 0;
    let high = this.#times.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this.#times[middle]! < now - WINDOW) low = middle + 1;
      else high = middle;
    }
    const n = this.#times.length - low;
    const span = Math.min(WINDOW, now - (this.first ?? now));
    return n > 1 && span > 0 ? (1000 * n) / Math.max(span, 100) : 0;
  }

  /** The last rates, one for each bar. */
  get trace(): number[] {
    return this.#slices.slice(-BARS);
  }

  get waited(): number | undefined {
    return this.first === undefined ? undefined : this.first - this.#begun;
  }

  /** The stats of an answer with this request added. */
  addTo(stats: Stats, usage: Usage | undefined): Stats {
    const generated = usage?.completion_tokens ?? this.tokens;
    return {
      first: stats.first ?? this.waited,
      tokens: stats.tokens + generated,
      seconds: stats.seconds + (this.first === undefined ? 0 : (this.last - this.first) / 1000),
      requests: stats.requests + (this.first === undefined ? 0 : 1),
      prompt: usage?.prompt_tokens ?? stats.prompt,
      cached: usage ? (usage.prompt_tokens_details?.cached_tokens ?? 0) : stats.cached,
      last: generated,
      trace: shrunk([...stats.trace, ...this.#slices]),
    };
  }
}

/** At most as many rates as there are bars: neighbours become their mean. */
function shrunk(rates: number[]): number[] {
  if (rates.length <= BARS) return rates;
  return Array.from({ length: BARS }, (_, i) => {
    const part = rates.slice(Math.floor((i * rates.length) / BARS), Math.max(Math.floor((i * rates.length) / BARS) + 1, Math.floor(((i + 1) * rates.length) / BARS)));
    return part.reduce((sum, rate) => sum + rate, 0) / part.length;
  });
}

/** Tokens a second after the first ones; undefined where it was too short to say. */
export function rateOf({ tokens, requests, seconds }: Stats): number | undefined {
  return tokens > requests && seconds > 0 ? (tokens - requests) / seconds : undefined;
}

export interface Gauge {
  used: number;
  /** Of those, the tokens that were reused at the last request. */
  reused: number;
  total: number;
  /** Whether `used` is a guess. */
  isGuess: boolean;
  level: 'free' | 'high' | 'full';
}

/** The context after an answer with these stats. `guessed`: the tokens of the conversation by a guess, where no stats are known. */
export function gaugeOf(stats: Stats | undefined, guessed: number, total: number): Gauge {
  const isGuess = stats?.prompt === undefined && guessed > 0;
  const used = stats?.prompt === undefined ? guessed : stats.prompt + (stats.last ?? 0);
  const reused = Math.min(stats?.cached ?? 0, used);
  const share = total ? used / total : 0;
  return { used, reused, total, isGuess, level: share >= 0.985 ? 'full' : share >= 0.85 ? 'high' : 'free' };
}
