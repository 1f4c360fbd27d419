// The runner of the scenarios: each one gets a server and a profile of its own.
import { type MockServer, startMock } from '../mock-server';
import { type Browser, chromium, firefox } from './driver';
import { Chat } from './page';
import { type Scenario, scenarios } from './scenarios';
import { shoot } from './screenshots';

function option(args: string[], name: string, other: string): string {
  const at = args.indexOf(`--${name}`);
  return at < 0 ? other : (args[at + 1] ?? other);
}

async function run(browser: Browser, scenario: Scenario): Promise<void> {
  const mock = await startMock();
  const profile = await browser.profile(scenario.view ?? { width: 1280, height: 800 });
  const tabs: Chat[] = [];
  const another = async () => {
    const chat = new Chat(await profile.tab(), mock.url);
    tabs.push(chat);
    return chat;
  };
  try {
    const chat = await another();
    await chat.open();
    await scenario.run({ mock, profile, chat, another });
    const errors = tabs.flatMap(({ tab }) => tab.errors);
    if (errors.length) throw new Error(`errors of the page: ${errors.join('; ')}`);
  } catch (error) {
    const path = process.env.SHOTS && `${process.env.SHOTS}/${scenario.name.replace(/\W+/g, '-')}.png`;
    if (path) await tabs.at(-1)?.tab.screenshot(path).catch(() => {});
    throw error;
  } finally {
    await profile.close().catch(() => {});
    await (mock as MockServer).close();
  }
}

/** Against a real server: whatever its model writes, an answer comes, stays after a reload, and has its numbers. */
async function runAgainst(browser: Browser, url: string): Promise<void> {
  const profile = await browser.profile({ width: 1280, height: 800 });
  const chat = new Chat(await profile.tab(), url);
  await chat.open();
  await chat.seeText('Ready', 30_000);
  await chat.ask('Tell me a story.');
  await chat.idle(120_000);
  const answer = await chat.lastAnswer();
  if (!answer) throw new Error('there is no answer');
  await chat.reload('.turn.a');
  await chat.seeText('first token');
  if (chat.tab.errors.length) throw new Error(chat.tab.errors.join('; '));
  await profile.close();
}

export async function main(args: string[]): Promise<number> {
  // The drivers end their browser at these signals, but not this process: the scenarios would go on, and fail for want of a target.
  for (const signal of ['SIGTERM', 'SIGHUP'] as const) process.once(signal, () => process.exit(1));
  const name = option(args, 'browser', 'chromium');
  const server = option(args, 'server', 'mock');
  const only = option(args, 'only', '');
  const browser = await (name === 'firefox' ? firefox() : chromium());
  let nFailed = 0;
  const test = async (title: string, action: () => Promise<void>) => {
    const begun = Date.now();
    try {
      // On a busy machine a browser may stand still for longer than a scenario waits: with --retry it gets a second try.
      await action().catch((error) => {
        if (!args.includes('--retry')) throw error;
        console.log(`retry ${title}: ${error instanceof Error ? error.message : String(error)}`);
        return action();
      });
      console.log(`ok    ${title} (${((Date.now() - begun) / 1000).toFixed(1)} s)`);
    } catch (error) {
      nFailed++;
      console.log(`FAIL  ${title}: ${error instanceof Error ? error.message : String(error)}`);
    }
  };
  if (args.includes('--shots')) await test('screenshots', () => shoot(browser, args.includes('--update'), only));
  else if (server !== 'mock') await test(`a conversation with ${server}`, () => runAgainst(browser, server));
  else {
    for (const scenario of scenarios) {
      if (!new RegExp(only).test(scenario.name)) continue;
      const reason = scenario.not?.[browser.name];
      if (reason) console.log(`skip  ${scenario.name}: ${reason}`);
      else await test(scenario.name, () => run(browser, scenario));
    }
  }
  await browser.close();
  console.log(nFailed ? `${nFailed} failed` : 'all passed');
  return nFailed ? 1 : 0;
}
