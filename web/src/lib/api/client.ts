// Requests to the server: paths relative to the page, the key, and errors in OpenAI's, ollama's and llama.cpp's forms.
import { read, write } from '../store/local';

/** An answer of the server that is no success. */
export class ServerError extends Error {
  constructor(
    message: string,
    readonly status: number,
    readonly code: string,
  ) {
    super(message);
  }
}

/** The server was not reached, or the connection ended. */
export class ConnectionError extends Error {}

export const apiKey = (): string => read('key') ?? '';
export const keepApiKey = (key: string): boolean => write('key', key.trim() || null);

/** Called when the server wants another key. */
export const hooks = { keyWanted: () => {} };

export function headers(): Record<string, string> {
  const key = apiKey();
  return { 'Content-Type': 'application/json', ...(key ? { Authorization: `Bearer ${key}` } : {}) };
}

/** The error that an answer's body describes. */
export function errorOf(body: unknown, status: number): ServerError {
  const { error } = (body ?? {}) as { error?: string | { message?: string; code?: string | number } };
  const message = typeof error === 'string' ? error : error?.message;
  const code = typeof error === 'object' && typeof error.code === 'string' ? error.code : '';
  return new ServerError(message || `The server answered with status ${status}, and did not say why.`, status, code);
}

/** Sends a request. Fails with a ServerError where the answer is no success, with a ConnectionError where there is none. */
export async function send(path: string, options: RequestInit = {}): Promise<Response> {
  let response: Response;
  const key = apiKey();
  try {
    response = await fetch(path, { ...options, headers: { ...headers(), ...(options.headers as Record<string, string>) } });
  } catch (error) {
    if (options.signal?.aborted) throw error;
    throw new ConnectionError('The server cannot be reached.');
  }
  if (response.ok) return response;
  // A key that was entered meanwhile has not been tried.
  if (response.status === 401 && key === apiKey()) hooks.keyWanted();
  const text = await response.text().catch(() => '');
  let body: unknown;
  try {
    body = JSON.parse(text);
  } catch {
    // A proxy in front of a server that is away answers with a page of its own.
    if ([502, 504].includes(response.status)) throw new ConnectionError('The server cannot be reached.');
  }
  throw errorOf(body, response.status);
}

export const getJson = async <T>(path: string, signal?: AbortSignal): Promise<T> => (await send(path, { signal })).json() as Promise<T>;

export const postJson = async <T>(path: string, body: unknown, signal?: AbortSignal): Promise<T> =>
  (await send(path, { method: 'POST', body: JSON.stringify(body), signal })).json() as Promise<T>;
