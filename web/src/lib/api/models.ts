// The models of the server: names, sizes, capabilities, load states; loading, unloading and downloads.
import { getJson, postJson, send } from './client';
import { Lines } from './lines';

export interface Model {
  name: string;
  /** Bytes of its files; 0 if unknown. */
  size: number;
  quantization: string;
  parameters: string;
  family: string;
  loaded: boolean;
  /** Bytes of memory of a loaded model, and those of them on other devices than the CPU. */
  memory: number;
  deviceMemory: number;
  context: number;
  /** The context that the model was trained with; 0 if unknown. */
  trainedContext: number;
  /** Undefined: unknown yet. */
  vision?: boolean;
  thinking?: boolean;
  tools?: boolean;
  /** The share that is loaded, where the server says it. */
  progress?: number;
  loading?: boolean;
}

/** The answer of `v1/models`, as far as the page reads it. */
interface V1Models {
  data?: V1Model[];
  /** Bytes of the device that models are loaded on. */
  memory?: { total?: number; free?: number };
}
interface V1Model {
  id: string;
  /** Null: not loaded. */
  meta?: { n_ctx?: number; n_ctx_train?: number; size?: number; vision?: boolean } | null;
  /** `value`: loaded, loading or unloaded. `progress`: the share that is loaded, from 0 to 1. */
  status?: { value?: string; progress?: number };
}
interface Tag {
  name: string;
  size?: number;
  details?: { parameter_size?: string; quantization_level?: string; family?: string };
}
interface Process extends Tag {
  size_vram?: number;
  context_length?: number;
}

const plain = (name: string) => name.replace(/:latest$/, '');

/** Memory of the device that models are loaded on, in bytes, where the server says it. */
export interface Memory {
  total: number;
  free: number;
}

export interface ModelList {
  models: Model[];
  memory?: Memory;
}

const isAmount = (value: unknown): value is number => typeof value === 'number' && Number.isFinite(value) && value >= 0;
const amount = (...values: unknown[]): number => values.find((value): value is number => isAmount(value) && value > 0) ?? 0;

/** The memory that an answer names; undefined where a field is missing or makes no sense. */
export function memoryOf({ memory }: V1Models): Memory | undefined {
  const { total, free } = memory ?? {};
  return isAmount(total) && isAmount(free) && total > 0 ? { total, free: Math.min(free, total) } : undefined;
}

/** A model of `v1/models` with what ollama's lists say of it. A field that no list has is 0, empty or undefined, and is not shown. */
export function modelOf({ id, meta, status }: V1Model, tag: Tag | undefined, process: Process | undefined): Model {
  const progress = status?.progress;
  return {
    name: id,
    size: amount(tag?.size, meta?.size),
    quantization: tag?.details?.quantization_level ?? '',
    parameters: tag?.details?.parameter_size ?? '',
    family: tag?.details?.family ?? '',
    loaded: status?.value === undefined ? Boolean(meta) : status.value === 'loaded',
    memory: amount(process?.size),
    deviceMemory: amount(process?.size_vram),
    context: amount(meta?.n_ctx, process?.context_length),
    trainedContext: amount(meta?.n_ctx_train),
    ...(typeof meta?.vision === 'boolean' ? { vision: meta.vision } : {}),
    loading: status?.value === 'loading',
    ...(status?.value === 'loading' && isAmount(progress) ? { progress: Math.min(1, progress) } : {}),
  };
}

/** The bytes of a model on the device that `Memory` describes. */
export const bytesOnDevice = ({ deviceMemory, memory, size }: Model): number => deviceMemory || memory || size;

/** All models, loaded or not. */
export async function listModels(signal?: AbortSignal): Promise<ModelList> {
  const listed = <T>(path: string) => getJson<{ models?: T[] }>(path, signal).then(({ models }) => models ?? [], () => []);
  const [list, tags, processes] = await Promise.all([getJson<V1Models>('v1/models', signal), listed<Tag>('api/tags'), listed<Process>('api/ps')]);
  const tagOf = new Map(tags.map((tag) => [plain(tag.name), tag]));
  const processOf = new Map(processes.map((process) => [plain(process.name), process]));
  const models = (list.data ?? []).map((model) => modelOf(model, tagOf.get(plain(model.id)), processOf.get(plain(model.id))));
  return { models, memory: memoryOf(list) };
}

export interface Capabilities {
  vision: boolean;
  thinking: boolean;
  tools: boolean;
}

export async function capabilitiesOf(model: string): Promise<Capabilities> {
  const { capabilities = [] } = await postJson<{ capabilities?: string[] }>('api/show', { model });
  const can = (name: string) => capabilities.includes(name);
  return { vision: can('vision'), thinking: can('thinking'), tools: can('tools') };
}

/** The sampling options that a loaded model has by itself. */
export async function defaultsOf(model: string): Promise<Record<string, number>> {
  const props = await getJson<{ default_generation_settings?: { params?: Record<string, unknown> } }>(`props?model=${encodeURIComponent(model)}`);
  const numbers = Object.entries(props.default_generation_settings?.params ?? {}).filter(([, value]) => typeof value === 'number');
  return Object.fromEntries(numbers) as Record<string, number>;
}

/** Loads a model; resolves when it is in memory. */
export const loadModel = (model: string, signal?: AbortSignal): Promise<unknown> => postJson('api/generate', { model, stream: false }, signal);

/** Unloads a model once its requests are answered. A load that no request waits for ends. */
export const unloadModel = (model: string): Promise<unknown> => postJson('api/generate', { model, keep_alive: 0, stream: false });

export interface PullProgress {
  status: string;
  total?: number;
  completed?: number;
}

/** Downloads a model from the hub. */
export async function pullModel(model: string, signal: AbortSignal, report: (progress: PullProgress) => void): Promise<void> {
  const response = await send('api/pull', { method: 'POST', body: JSON.stringify({ model, stream: true }), signal });
  const reader = response.body!.getReader();
  const lines = new Lines();
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    for (const line of lines.add(value)) {
      if (!line.trim()) continue;
      const progress = JSON.parse(line) as PullProgress & { error?: string };
      if (progress.error) throw new Error(progress.error);
      report(progress);
    }
  }
}

/** The number of tokens of a text, by the tokenizer of a loaded model. */
export async function countTokens(model: string, content: string): Promise<number> {
  const { tokens } = await postJson<{ tokens: number[] }>('tokenize', { model, content });
  return tokens.length;
}
