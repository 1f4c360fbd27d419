// The server as this page knows it: whether it answers, its models, and what they can do.
import { ConnectionError, ServerError, getJson } from '../api/client';
import { type Capabilities, type Memory, type Model, capabilitiesOf, defaultsOf, listModels, loadModel, pullModel, unloadModel } from '../api/models';
import { read, write } from '../store/local';
import { ui } from './ui.svelte';

export interface Pull {
  name: string;
  status: string;
  completed: number;
  total: number;
  /** Bytes per second. */
  rate: number;
  error?: string;
  cancel: () => void;
}

interface Loading {
  begun: number;
  cancel: () => void;
}

const WAITS = [1, 2, 4, 8, 15];

class Engine {
  models = $state.raw<Model[]>([]);
  memory = $state.raw<Memory | undefined>(undefined);
  /** False until the first answer. */
  isKnown = $state(false);
  isAway = $state(false);
  tries = $state(0);
  /** Seconds until the next try. */
  nextTry = $state(0);
  loading = $state<Record<string, Loading>>({});
  pulls = $state<Record<string, Pull>>({});
  problems = $state<Record<string, string>>({});
  /** The sampling options of the loaded models. */
  defaults = $state.raw<Record<string, Record<string, number>>>({});
  #capabilities = new Map<string, Capabilities>();
  #waiting: (() => void)[] = [];
  #countdown: ReturnType<typeof setInterval> | undefined;
  #refreshing: Promise<void> | undefined;

  start(): void {
    void this.refresh();
    setInterval(() => {
      const isBusy = ui.models || Object.keys(this.loading).length > 0 || this.models.some((model) => model.loading) || !this.models.some((model) => model.loaded);
      if (document.visibilityState === 'visible' && !this.isAway && (isBusy || Date.now() % 30_000 < 2000)) void this.refresh();
    }, 2000);
    document.addEventListener('visibilitychange', () => {
      if (document.visibilityState === 'visible') void this.refresh();
    });
    addEventListener('online', () => this.tryNow());
  }

  refresh(): Promise<void> {
    this.#refreshing ??= this.#refresh().finally(() => (this.#refreshing = undefined));
    return this.#refreshing;
  }

  async #refresh(): Promise<void> {
    try {
      const { models, memory } = await listModels();
      this.models = models.map((model) => this.#withCapabilities(model));
      this.memory = memory;
      this.isKnown = true;
      this.#isBack();
      await this.#learn(models);
    } catch (error) {
      if (error instanceof ConnectionError) this.lost();
      // A server that wants a key, or that refuses for the moment, is there.
      else if (error instanceof ServerError) this.#isBack();
    }
  }

  #withCapabilities(model: Model): Model {
    const known = this.#capabilities.get(model.name);
    return known ? { ...model, ...known, vision: model.vision ?? known.vision } : model;
  }

  /** Asks what models can do, and for the options of loaded ones, where that is not known yet. */
  async #learn(models: Model[]): Promise<void> {
    const unknown = models.filter(({ name }) => !this.#capabilities.has(name));
    await Promise.all(
      unknown.map(async ({ name }) => {
        const capabilities = await capabilitiesOf(name).catch(() => undefined);
        if (capabilities) this.#capabilities.set(name, capabilities);
      }),
    );
    if (unknown.length) this.models = models.map((model) => this.#withCapabilities(model));
    for (const { name } of models.filter((model) => model.loaded && !this.defaults[model.name])) {
      const defaults = await defaultsOf(name).catch(() => undefined);
      if (defaults) this.defaults = { ...this.defaults, [name]: defaults };
    }
  }

  model(name: string | undefined): Model | undefined {
    return this.models.find((model) => model.name === name) ?? this.models.find((model) => model.loaded) ?? this.models[0];
  }

  /** The connection was lost, or not made: tries again with a count-down. */
  lost(): void {
    if (this.#countdown) return;
    this.isAway = true;
    this.tries++;
    this.nextTry = WAITS[Math.min(this.tries, WAITS.length) - 1]!;
    if (this.tries === 1) ui.announce('The engine does not answer. What you write stays here.');
    this.#countdown = setInterval(() => {
      this.nextTry--;
      if (this.nextTry <= 0) this.tryNow();
    }, 1000);
  }

  tryNow(): void {
    clearInterval(this.#countdown);
    this.#countdown = undefined;
    this.nextTry = 0;
    void this.refresh();
  }

  #isBack(): void {
    clearInterval(this.#countdown);
    this.#countdown = undefined;
    if (this.isAway) ui.announce('The engine answers again.');
    this.isAway = false;
    this.tries = 0;
    for (const resolve of this.#waiting.splice(0)) resolve();
  }

  /** Waits until the server answers. */
  async back(signal: AbortSignal): Promise<void> {
    this.lost();
    await new Promise<void>((resolve, reject) => {
      this.#waiting.push(resolve);
      signal.addEventListener('abort', () => reject(signal.reason as Error), { once: true });
    });
  }

  async isReady(): Promise<boolean> {
    return getJson('health').then(() => true, () => false);
  }

  /** The seconds that the last load of a model took; 0 if unknown. */
  lastLoad(name: string): number {
    return Number(read(`load/${name}`)) || 0;
  }

  noteLoad(name: string, seconds: number): void {
    write(`load/${name}`, seconds.toFixed(1));
  }

  /** Loads a model. Fails silently: the problem stands at the model. A load that is stopped here ends at the server, unless other
   * requests wait for it. */
  async load(name: string): Promise<void> {
    if (this.loading[name]) return;
    const abort = new AbortController();
    const begun = Date.now();
    this.loading[name] = { begun, cancel: () => abort.abort() };
    delete this.problems[name];
    try {
      await loadModel(name, abort.signal);
      this.noteLoad(name, (Date.now() - begun) / 1000);
      ui.announce(`${name} is loaded.`);
    } catch (error) {
      if (abort.signal.aborted) await unloadModel(name).catch(() => undefined);
      else this.problems[name] = error instanceof Error ? error.message : 'It was not loaded.';
    }
    delete this.loading[name];
    await this.refresh();
  }

  async unload(name: string): Promise<void> {
    delete this.problems[name];
    try {
      await unloadModel(name);
      ui.toast(`${name} is unloaded.`, { label: 'Load again', run: () => void this.load(name) });
    } catch (error) {
      this.problems[name] = error instanceof Error ? error.message : 'It was not unloaded.';
    }
    await this.refresh();
  }

  async pull(name: string): Promise<void> {
    if (this.pulls[name] && !this.pulls[name].error) return;
    const abort = new AbortController();
    this.pulls[name] = { name, status: 'asking the hub', completed: 0, total: 0, rate: 0, cancel: () => abort.abort() };
    let [at, from] = [performance.now(), -1];
    try {
      await pullModel(name, abort.signal, ({ status, completed = 0, total = 0 }) => {
        const pull = this.pulls[name];
        if (!pull) return;
        const now = performance.now();
        if (from < 0) from = completed;
        if (now - at > 1000) {
          pull.rate = (1000 * (completed - from)) / (now - at);
          [at, from] = [now, completed];
        }
        Object.assign(pull, { status, completed, total });
      });
      delete this.pulls[name];
      ui.toast(`${name} is on disk.`, { label: 'Load', run: () => void this.load(name) });
    } catch (error) {
      if (abort.signal.aborted) {
        delete this.pulls[name];
        ui.toast(`The download of ${name} is stopped. What is there stays.`, { label: 'Go on', run: () => void this.pull(name) });
      } else if (this.pulls[name]) this.pulls[name].error = error instanceof Error ? error.message : 'The download failed.';
    }
    await this.refresh();
  }
}

export const engine = new Engine();
