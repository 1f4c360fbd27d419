// The stored objects: conversations, their messages, and the files of messages.

/** How the answers of a conversation are generated. What is undefined is left to the model. */
export interface ChatSettings {
  model?: string;
  system?: string;
  /** The name of the preset that `system` comes from. */
  preset?: string;
  think?: boolean;
  effort?: Effort;
  sampling?: Sampling;
  /** Answers follow `schema`, a JSON schema; an empty one means any JSON object. */
  json?: boolean;
  schema?: string;
  /** The MCP servers whose tools the model may call. */
  servers?: string[];
  /** Tools that run without a question in this conversation, as SERVER/TOOL. */
  allowed?: string[];
}

export type Effort = 'low' | 'medium' | 'high';

export interface Sampling {
  temperature?: number;
  top_k?: number;
  top_p?: number;
  min_p?: number;
  repeat_penalty?: number;
  presence_penalty?: number;
  frequency_penalty?: number;
  seed?: number;
  max_tokens?: number;
  stop?: string[];
}

export interface Conversation {
  id: string;
  title: string;
  /** Who chose the title. A model's title replaces only the start of the question. */
  titleBy: 'question' | 'model' | 'user';
  created: number;
  updated: number;
  pinned: boolean;
  /** By the id of a message ('' for the beginning): the id of the answer to it that is on the shown path. */
  chosen: Record<string, string>;
  settings: ChatSettings;
  /** What requests have in place of the messages up to and including `until`; an empty text: nothing. */
  summary?: { until: string; text: string };
}

export interface ToolCall {
  id: string;
  name: string;
  /** The arguments exactly as the model wrote them. */
  arguments: string;
  server?: string;
  tool?: string;
  result?: string;
  isError?: boolean;
  seconds?: number;
}

/** A part of an answer that ended in tool calls. */
export interface Step {
  content: string;
  thoughts?: string;
  thoughtSeconds?: number;
  calls: ToolCall[];
}

export interface FileRef {
  id: string;
  name: string;
  kind: 'picture' | 'text' | 'pdf';
  pages?: number;
  tokens?: number;
}

export interface Stats {
  /** Milliseconds from the request to the first token. */
  first?: number;
  /** Generated tokens of all requests of the answer, and the seconds they took after the first of each. */
  tokens: number;
  seconds: number;
  requests: number;
  /** Tokens of the last prompt, and those of them that were reused. */
  prompt?: number;
  cached?: number;
  /** Tokens of the last request's answer. */
  last?: number;
  /** Rates over the time of the answer. */
  trace: number[];
}

/** Where a resumable stream continues: its id and the bytes of its body that are part of the message. */
export interface StreamPosition {
  id: string;
  bytes: number;
}

export type MessageState = 'done' | 'writing' | 'stopped' | 'cut' | 'length' | 'full' | 'failed';

export interface Message {
  id: string;
  conversation: string;
  parent: string;
  role: 'user' | 'assistant';
  content: string;
  created: number;
  state: MessageState;
  thoughts?: string;
  thoughtSeconds?: number;
  steps?: Step[];
  /** Calls that are being streamed. */
  calls?: ToolCall[];
  files?: FileRef[];
  model?: string;
  /** Why it is not whole, for `cut` and `failed`. */
  error?: { code: string; message: string };
  stats?: Stats;
  stream?: StreamPosition;
}

/** A stored file. `text` is what the model gets of a file that is no picture. */
export interface StoredFile {
  id: string;
  conversation: string;
  name: string;
  blob?: Blob;
  text?: string;
}

export interface Preset {
  name: string;
  text: string;
}
