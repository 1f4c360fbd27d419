// Runs the browser tests: `node tests/run.js --browser chromium|firefox [--server mock|URL] [--only NAME] [--update]`.
import { fileURLToPath } from 'node:url';
import { runnerImport } from 'vite';

const entry = fileURLToPath(new URL('./browser/main.ts', import.meta.url));
const { module } = await runnerImport(entry, { configFile: false, logLevel: 'error' });
process.exit(await module.main(process.argv.slice(2)));
