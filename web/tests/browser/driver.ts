// What scenarios need of a browser, so that they are written once for Chromium (Playwright) and Firefox (Puppeteer with WebDriver BiDi).
import { mkdtempSync, rmSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { chromium as playwright } from 'playwright-core';
import puppeteer from 'puppeteer-core';

export interface View {
  width: number;
  height: number;
  isDark?: boolean;
  isPhone?: boolean;
  /** With the service worker, which reads all files of the page. */
  hasWorker?: boolean;
  /** The moment that the page's clock shows, in UTC; only in Chromium. */
  now?: number;
}

/** Makes `Date` stand still. Timers go on. */
function stopClock(now: number): void {
  const Real = Date;
  const Fixed = function (...values: []) {
    return new.target ? new Real(...(values.length ? values : ([now] as unknown as []))) : new Real(now).toString();
  } as unknown as DateConstructor;
  Object.setPrototypeOf(Fixed, Real);
  Object.defineProperty(Fixed, 'prototype', { value: Real.prototype });
  Fixed.now = () => now;
  globalThis.Date = Fixed;
}

export interface Tab {
  goto(url: string): Promise<void>;
  reload(): Promise<void>;
  click(selector: string): Promise<void>;
  /** Types into the focused element. */
  type(text: string): Promise<void>;
  /** A key, with the names of modifiers before it: Control+K. */
  press(key: string): Promise<void>;
  hover(selector: string): Promise<void>;
  /** Moves the pointer to the corner, where nothing is. */
  rest(): Promise<void>;
  files(selector: string, paths: string[]): Promise<void>;
  eval<T, A = undefined>(action: (argument: A) => T | Promise<T>, argument?: A): Promise<T>;
  screenshot(path?: string): Promise<Uint8Array>;
  /** Errors of scripts and of the page's policy since the start. */
  errors: string[];
  close(): Promise<void>;
}

export interface Profile {
  tab(): Promise<Tab>;
  close(): Promise<void>;
}

export interface Browser {
  name: string;
  /** A new profile without any data. */
  profile(view: View): Promise<Profile>;
  close(): Promise<void>;
}

export async function chromium(): Promise<Browser> {
  const browser = await playwright.launch({ executablePath: process.env.CHROMIUM ?? '/usr/bin/chromium', args: ['--no-sandbox', '--disable-gpu', '--font-render-hinting=none', '--disable-lcd-text', '--force-color-profile=srgb'] });
  return {
    name: 'chromium',
    async profile({ width, height, isDark, isPhone, hasWorker, now }) {
      const context = await browser.newContext({
        viewport: { width, height },
        colorScheme: isDark ? 'dark' : 'light',
        reducedMotion: 'reduce',
        serviceWorkers: hasWorker ? 'allow' : 'block',
        hasTouch: Boolean(isPhone),
        isMobile: Boolean(isPhone),
        permissions: ['clipboard-read', 'clipboard-write'],
        ...(now === undefined ? {} : { timezoneId: 'UTC', locale: 'en-GB' }),
      });
      if (now !== undefined) await context.addInitScript(stopClock, now);
      return {
        async tab() {
          const page = await context.newPage();
          const errors: string[] = [];
          page.on('pageerror', (error) => errors.push(error.message));
          page.on('console', (message) => {
            if (message.type() === 'error' && /Content Security Policy|Refused to/.test(message.text())) errors.push(message.text());
          });
          return {
            errors,
            goto: async (url) => void (await page.goto(url, { timeout: 90_000 })),
            reload: async () => void (await page.reload()),
            click: (selector) => page.click(selector, { timeout: 30_000 }),
            type: (text) => page.keyboard.insertText(text),
            press: (key) => page.keyboard.press(key),
            hover: (selector) => page.hover(selector),
            rest: () => page.mouse.move(1, 1),
            files: (selector, paths) => page.setInputFiles(selector, paths),
            eval: (action, argument) => page.evaluate(action as never, argument as never),
            screenshot: (path) => page.screenshot({ path }),
            close: () => page.close(),
          };
        },
        close: () => context.close(),
      };
    },
    close: () => browser.close(),
  };
}

export async function firefox(): Promise<Browser> {
  return {
    name: 'firefox',
    async profile({ width, height, isDark, isPhone, hasWorker }) {
      const folder = mkdtempSync(join(tmpdir(), 'page-test-'));
      const browser = await puppeteer.launch({
        browser: 'firefox',
        executablePath: process.env.FIREFOX ?? '/usr/bin/firefox-esr',
        headless: true,
        defaultViewport: null,
        userDataDir: folder,
        args: [`--width=${width}`, `--height=${height}`],
        extraPrefsFirefox: {
          'dom.serviceWorkers.enabled': Boolean(hasWorker),
          'ui.systemUsesDarkTheme': isDark ? 1 : 0,
          'layout.css.prefers-color-scheme.content-override': isDark ? 0 : 1,
          'ui.prefersReducedMotion': 1,
          'dom.events.testing.asyncClipboard': true,
          // Machines without a mouse, as those of CI, would be (hover: none) otherwise: 1 is coarse, 2 fine, 4 can hover.
          'ui.primaryPointerCapabilities': isPhone ? 1 : 6,
          'ui.allPointerCapabilities': isPhone ? 1 : 6,
        },
      });
      // Whatever runs then fails as if its target were closed.
      let isClosing = false;
      browser.process()?.once('exit', (code, signal) => {
        if (!isClosing) console.log(`    Firefox ended by itself: ${signal ?? `exit status ${code}`}`);
      });
      return {
        async tab() {
          const page = await browser.newPage();
          // Firefox ESR knows this in part only: its window has the size already.
          await page.setViewport({ width, height }).catch(() => {});
          const errors: string[] = [];
          page.on('pageerror', (error) => errors.push(String((error as Error).message ?? error)));
          page.on('console', (message) => {
            if (message.type() === 'error' && /Content.Security.Policy/.test(message.text())) errors.push(message.text());
          });
          const found = async (selector: string) => {
            const element = await page.waitForSelector(selector, { visible: true, timeout: 30_000 });
            if (!element) throw new Error(`nothing is at ${selector}`);
            // What lies over it would take the click, and says so.
            const end = Date.now() + 30_000;
            for (;;) {
              const over = await element.evaluate((node) => {
                node.scrollIntoView({ block: 'nearest' });
                const { left, top, width, height } = node.getBoundingClientRect();
                const hit = document.elementFromPoint(left + width / 2, top + height / 2);
                return hit && (node.contains(hit) || hit.contains(node)) ? '' : (hit?.outerHTML.slice(0, 100) ?? 'nothing');
              });
              if (!over) return element;
              if (Date.now() > end) throw new Error(`over ${selector} lies ${over}`);
              await new Promise((resolve) => setTimeout(resolve, 50));
            }
          };
          return {
            errors,
            goto: async (url) => void (await page.goto(url, { timeout: 90_000 })),
            reload: async () => void (await page.reload()),
            click: async (selector) => (await found(selector)).click(),
            type: (text) => page.keyboard.type(text),
            press: async (key) => {
              const keys = key.split('+');
              const last = keys.pop()!;
              for (const modifier of keys) await page.keyboard.down(modifier as 'Control');
              await page.keyboard.press(last as 'Enter');
              for (const modifier of keys.reverse()) await page.keyboard.up(modifier as 'Control');
            },
            hover: async (selector) => (await found(selector)).hover(),
            rest: () => page.mouse.move(1, 1),
            files: async (selector, paths) => {
              const input = await page.$(selector);
              await (input as unknown as { uploadFile: (...files: string[]) => Promise<void> }).uploadFile(...paths);
            },
            eval: (action, argument) => page.evaluate(action as never, argument as never),
            screenshot: (path) => page.screenshot({ path: path as `${string}.png` }),
            close: () => page.close(),
          };
        },
        close: async () => {
          isClosing = true;
          await browser.close();
          rmSync(folder, { recursive: true, force: true, maxRetries: 5 });
        },
      };
    },
    close: () => Promise.resolve(),
  };
}
