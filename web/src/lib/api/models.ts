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
  /** Undefined: unknown yet. */
  vision?: boolean;
  thinking?: boolean;
  tools?: boolean;
  /** The share that is loaded, where the server says it. */
  progress?: number;
  loading?: boolean;
}

interface V1Model {
  id: string;
  meta: { n_ctx: number; size: number; vision: boolean } | null;
  status?: { value?: string; progress?: number };
}
interface Tag {
  name: string;
  size: number;
  details: { parameter_size: string; quantization_level: string; family: string };
}
interface Process extends Tag {
  size_vram: number;
  context_length: number;
}

const plain = (name: string) => name.replace(/:latest$/, '');

/** Memory of the machine in bytes, where the server says it. */
export interface Memory {
  total: number;
  free: number;
}

export interface ModelList {
  models: Model[];
  memory?: Memory;
}

/** All models, loaded or not. */
export async function listModels(signal?: AbortSignal): Promise<ModelList> {
  const none = { models: [] };
  const [list, tags, processes] = await Promise.all([
    getJson<{ data: V1Model[]; memory?: Memory }>('v1/models', signal),
    getJson<{ models: Tag[] }>('api/tags', signal).catch(() => none as { models: Tag[] }),
    getJson<{ models: Process[] }>('api/ps', signal).catch(() => none as { models: Process[] }),
  ]);
  const tagOf = new Map(tags.models.map((tag) => [plain(tag.name), tag]));
  const processOf = new Map(processes.models.map((process) => [plain(process.name), process]));
  const models = list.data.map(({ id, meta, status }): Model => {
    const [tag, process] = [tagOf.get(plain(id)), processOf.get(plain(id))];
    return {
      name: id,
      size: tag?.size ?? meta?.size ?? 0,
      quantization: tag?.details.quantization_level ?? '',
      parameters: tag?.details.parameter_size ?? '',
      family: tag?.details.family ?? '',
      loaded: meta !== null,
      memory: process?.size ?? 0,
      deviceMemory: process?.size_vram ?? 0,
      context: meta?.n_ctx ?? process?.context_length ?? 0,
      ...(meta ? { vision: meta.vision } : {}),
      loading: status?.value === 'loading',
      progress: status?.progress,
    };
  });
  return { models, memory: list.memory };
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
  const props = await getJson<{ default_generation_settings: { params: Record<string, unknown> } }>(`props?model=${encodeURIComponent(model)}`);
  const numbers = Object.entries(props.default_generation_settings.params).filter(([, value]) => typeof value === 'number');
  return Object.fromEntries(numbers) as Record<string, number>;
}

/** Loads a model; resolves when it is in memory. */
export const loadModel = (model: string, signal?: AbortSignal): Promise<unknown> => postJson('api/generate', { model, stream: false }, signal);

/** Unloads a model once its requests are answered. */
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
