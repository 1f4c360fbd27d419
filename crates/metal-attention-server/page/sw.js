const VERSION = "5b5d468d8e3505bc";
const FILES = ["assets/KaTeX_AMS-Regular-BQhdFMY1.woff2","assets/KaTeX_Caligraphic-Bold-Dq_IR9rO.woff2","assets/KaTeX_Caligraphic-Regular-Di6jR-x-.woff2","assets/KaTeX_Fraktur-Bold-CL6g_b3V.woff2","assets/KaTeX_Fraktur-Regular-CTYiF6lA.woff2","assets/KaTeX_Main-Bold-Cx986IdX.woff2","assets/KaTeX_Main-BoldItalic-DxDJ3AOS.woff2","assets/KaTeX_Main-Italic-NWA7e6Wa.woff2","assets/KaTeX_Main-Regular-B22Nviop.woff2","assets/KaTeX_Math-BoldItalic-CZnvNsCZ.woff2","assets/KaTeX_Math-Italic-t53AETM-.woff2","assets/KaTeX_SansSerif-Bold-D1sUS0GD.woff2","assets/KaTeX_SansSerif-Italic-C3H0VqGB.woff2","assets/KaTeX_SansSerif-Regular-DDBCnlJ7.woff2","assets/KaTeX_Script-Regular-D3wIWfF6.woff2","assets/KaTeX_Size1-Regular-mCD8mA8B.woff2","assets/KaTeX_Size2-Regular-Dy4dx90m.woff2","assets/KaTeX_Size3-Regular-gV2CO0n9.woff2","assets/KaTeX_Size4-Regular-Dl5lxZxV.woff2","assets/KaTeX_Typewriter-Regular-CO6r4hn1.woff2","assets/highlight-DIA8xNzs.js","assets/index-D2JLk7fl.js","assets/index-NMassx73.css","assets/math-C_YHg-_h.js","assets/math-DlTo7qYZ.css","assets/pdf-BjFW35ZB.js","assets/pdf.worker.min-FHbmGBN0.mjs","icon.svg","icon-192.png","icon-512.png","manifest.webmanifest"];
const CACHE = `page-${VERSION}`;
const worker = self;
const scope = new URL("./", worker.location.href).href;
/** The page's address answers clients that ask for HTML. */
const pageRequest = () => new Request(scope, {
	headers: { Accept: "text/html" },
	cache: "no-cache"
});
worker.addEventListener("install", (event) => {
	event.waitUntil((async () => {
		const cache = await caches.open(CACHE);
		await cache.put(scope, await checked(await fetch(pageRequest())));
		await cache.addAll(FILES.map((name) => new Request(new URL(name, scope).href, { cache: "no-cache" })));
	})());
});
async function checked(response) {
	if (!response.ok || !(response.headers.get("content-type") ?? "").includes("text/html")) throw new Error("no page");
	return response;
}
worker.addEventListener("activate", (event) => {
	event.waitUntil((async () => {
		for (const name of await caches.keys()) if (name.startsWith("page-") && name !== CACHE) await caches.delete(name);
		await worker.clients.claim();
	})());
});
worker.addEventListener("message", (event) => {
	if (event.data === "activate") void worker.skipWaiting();
});
worker.addEventListener("fetch", (event) => {
	const { request } = event;
	if (request.method !== "GET") return;
	const url = new URL(request.url);
	const isPage = request.mode === "navigate" && url.href.split(/[?#]/)[0] === scope;
	const isFile = url.href.startsWith(scope) && FILES.includes(url.href.slice(scope.length));
	if (!isPage && !isFile) return;
	event.respondWith((async () => {
		const kept = await (await caches.open(CACHE)).match(isPage ? scope : request.url);
		return kept ?? fetch(request);
	})());
});
