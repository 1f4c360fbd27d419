// The MCP servers. They are started when a conversation uses them, or when the user looks at them.
import type { FunctionTool } from '../api/chat';
import { type ServerTool, type ToolServer, listServers } from '../api/tools';

class Tools {
  servers = $state.raw<ToolServer[] | null>(null);
  problem = $state('');
  #listing: Promise<void> | undefined;

  list(): Promise<void> {
    this.#listing ??= (async () => {
      try {
        this.servers = await listServers();
        this.problem = '';
      } catch (error) {
        this.problem = error instanceof Error ? error.message : 'The servers are not listed.';
      } finally {
        this.#listing = undefined;
      }
    })();
    return this.#listing;
  }

  /** The tools of `servers`. */
  async of(servers: string[], signal: AbortSignal): Promise<ServerTool[]> {
    if (!this.servers) {
      const aborted = new Promise<never>((_, reject) => signal.addEventListener('abort', () => reject(signal.reason as Error), { once: true }));
      await Promise.race([this.list(), aborted]);
    }
    return (this.servers ?? []).filter(({ name }) => servers.includes(name)).flatMap((server) => server.tools);
  }

  async functionsOf(servers: string[], signal: AbortSignal): Promise<FunctionTool[]> {
    return (await this.of(servers, signal)).map((tool) => tool.function);
  }
}

export const tools = new Tools();
