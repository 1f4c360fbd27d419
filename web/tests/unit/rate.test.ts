import { describe, expect, it } from 'vitest';
import { BARS, Counter, gaugeOf, noStats, rateOf } from '../../src/lib/rate';

describe('the gauge', () => {
  it('adds the answer to its prompt', () => {
    const gauge = gaugeOf({ ...noStats(), prompt: 12_000, last: 400, cached: 9800 }, 0, 32_768);
    expect(gauge).toMatchObject({ used: 12_400, reused: 9800, total: 32_768, isGuess: false, level: 'free' });
  });

  it('guesses by characters where no answer has said', () => {
    expect(gaugeOf(undefined, 100, 1000)).toMatchObject({ used: 100, isGuess: true });
    expect(gaugeOf(undefined, 0, 1000)).toMatchObject({ used: 0, isGuess: false });
  });

  it('warns from 85 percent', () => {
    const level = (prompt: number) => gaugeOf({ ...noStats(), prompt, last: 0 }, 0, 1000).level;
    expect([849, 850, 984, 985].map(level)).toEqual(['free', 'high', 'high', 'full']);
  });

  it('knows no level without a total', () => {
    expect(gaugeOf({ ...noStats(), prompt: 10 }, 0, 0).level).toBe('free');
  });
});

describe('the rate', () => {
  it('counts tokens after the first one', () => {
    const counter = new Counter(0);
    for (let i = 0; i < 101; i++) counter.add(200 + 10 * i);
    const stats = counter.addTo(noStats(), { prompt_tokens: 50, completion_tokens: 101, prompt_tokens_details: { cached_tokens: 32 } });
    expect(stats).toMatchObject({ first: 200, tokens: 101, seconds: 1, prompt: 50, cached: 32, last: 101 });
    expect(rateOf(stats)).toBeCloseTo(100);
    expect(counter.rate(1200)).toBeCloseTo(101, -1);
  });

  it('adds the requests of an answer with tools', () => {
    const first = new Counter(0);
    [100, 200].forEach((at) => first.add(at));
    const second = new Counter(1000);
    [1500, 1600, 1700].forEach((at) => second.add(at));
    const stats = second.addTo(first.addTo(noStats(), { prompt_tokens: 5, completion_tokens: 2 }), { prompt_tokens: 9, completion_tokens: 3 });
    expect(stats).toMatchObject({ first: 100, tokens: 5, requests: 2, prompt: 9, last: 3 });
    expect(stats.seconds).toBeCloseTo(0.3);
  });

  it('keeps no more bars than there are', () => {
    const counter = new Counter(0);
    for (let i = 0; i < 1000; i++) counter.add(100 * i);
    expect(counter.addTo(noStats(), undefined).trace).toHaveLength(BARS);
  });

  it('is unknown for a single token', () => {
    const counter = new Counter(0);
    counter.add(10);
    expect(rateOf(counter.addTo(noStats(), undefined))).toBeUndefined();
  });
});
