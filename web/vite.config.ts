import { createHash } from 'node:crypto';
import { svelte } from '@sveltejs/vite-plugin-svelte';
import { defineConfig, transformWithOxc, type Plugin } from 'vite';
import { readFileSync } from 'node:fs';

/** The server that the development server passes API requests to. */
const API = process.env.MA_SERVER ?? 'http://127.0.0.1:8123';

/** KaTeX's styles name each font in three formats. Every browser that runs this page reads WOFF2. */
function onlyWoff2(): Plugin {
  return {
    name: 'only-woff2',
    enforce: 'pre',
    transform(code, id) {
      if (!id.includes('katex') || !id.endsWith('.css')) return null;
      return code.replace(/,\s*url\([^)]*\.(?:woff|ttf)\)\s*format\([^)]*\)/g, '');
    },
  };
}

/** Writes `sw.js`: the service worker with the list of built files. Its version is a hash of their names and contents. */
function serviceWorker(): Plugin {
  return {
    name: 'service-worker',
    apply: 'build',
    async generateBundle(_, bundle) {
      const publicFiles = ['icon.svg', 'icon-192.png', 'icon-512.png', 'manifest.webmanifest'];
      const hash = createHash('sha256');
      const built = Object.keys(bundle).filter((name) => name.startsWith('assets/')).sort();
      for (const name of Object.keys(bundle).sort()) {
        const file = bundle[name]!;
        hash.update(name).update(file.type === 'chunk' ? file.code : file.source);
      }
      for (const name of publicFiles) hash.update(readFileSync(`public/${name}`));
      const source = readFileSync('src/sw.ts', 'utf8');
      const { code } = await transformWithOxc(source, 'sw.ts');
      const head = `const VERSION = ${JSON.stringify(hash.digest('hex').slice(0, 16))};\nconst FILES = ${JSON.stringify([...built, ...publicFiles])};\n`;
      this.emitFile({ type: 'asset', fileName: 'sw.js', source: head + code });
    },
  };
}

const api = ['v1', 'api', 'mcp', 'props', 'tokenize', 'health', 'ready', 'metrics', 'slots'];

export default defineConfig({
  base: './',
  plugins: [svelte(), onlyWoff2(), serviceWorker()],
  build: {
    outDir: '../crates/metal-attention-server/page',
    emptyOutDir: true,
    license: { fileName: 'licenses.md' },
    target: 'es2022',
    modulePreload: { polyfill: false },
    assetsInlineLimit: 0,
    chunkSizeWarningLimit: 1200,
    reportCompressedSize: false,
  },
  server: { port: 5173, proxy: Object.fromEntries(api.map((path) => [`/${path}`, { target: API, changeOrigin: true }])) },
  test: { environment: 'node', include: ['tests/unit/**/*.test.ts'], testTimeout: 600_000 },
} as Parameters<typeof defineConfig>[0]);
