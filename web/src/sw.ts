// The service worker: keeps the built files, so that the page opens without its server. The build puts VERSION and FILES before it.
// Answers of the API are never kept: only the page itself and the files of FILES are.
declare const VERSION: string;
declare const FILES: string[];

const CACHE = `page-${VERSION}`;
const worker = self as unknown as ServiceWorkerGlobalScope & typeof globalThis;
const scope = new URL('./', worker.location.href).href;
/** The page's address answers clients that ask for HTML. */
const pageRequest = () => new Request(scope, { headers: { Accept: 'text/html' }, cache: 'no-cache' });

worker.addEventListener('install', (event) => {
  event.waitUntil(
    (async () => {
      const cache = await caches.open(CACHE);
      await cache.put(scope, await checked(await fetch(pageRequest())));
      await cache.addAll(FILES.map((name) => new Request(new URL(name, scope).href, { cache: 'no-cache' })));
    })(),
  );
});

async function checked(response: Response): Promise<Response> {
  if (!response.ok || !(response.headers.get('content-type') ?? '').includes('text/html')) throw new Error('no page');
  return response;
}

worker.addEventListener('activate', (event) => {
  event.waitUntil(
    (async () => {
      for (const name of await caches.keys()) if (name.startsWith('page-') && name !== CACHE) await caches.delete(name);
      await worker.clients.claim();
    })(),
  );
});

worker.addEventListener('message', (event) => {
  if (event.data === 'activate') void worker.skipWaiting();
});

worker.addEventListener('fetch', (event) => {
  const { request } = event;
  if (request.method !== 'GET') return;
  const url = new URL(request.url);
  const isPage = request.mode === 'navigate' && url.href.split(/[?#]/)[0] === scope;
  const isFile = url.href.startsWith(scope) && FILES.includes(url.href.slice(scope.length));
  if (!isPage && !isFile) return;
  event.respondWith(
    (async () => {
      const kept = await (await caches.open(CACHE)).match(isPage ? scope : request.url);
      return kept ?? fetch(request);
    })(),
  );
});
