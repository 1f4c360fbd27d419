// The service worker: keeps the page for when its server is away. A new version is offered, not forced.
import { ui } from './state/ui.svelte';

export function registerWorker(): void {
  if (import.meta.env.DEV || !('serviceWorker' in navigator) || !isSecureContext) return;
  addEventListener('load', () => void register(), { once: true });
  if (document.readyState === 'complete') void register();
}

let isRegistered = false;

async function register(): Promise<void> {
  if (isRegistered) return;
  isRegistered = true;
  try {
    const registration = await navigator.serviceWorker.register('sw.js', { updateViaCache: 'none' });
    const offer = (worker: ServiceWorker | null) => {
      if (!worker || !navigator.serviceWorker.controller) return;
      ui.toast('A new version of the page is ready.', {
        label: 'Use it',
        run: () => {
          navigator.serviceWorker.addEventListener('controllerchange', () => location.reload(), { once: true });
          worker.postMessage('activate');
        },
      });
    };
    offer(registration.waiting);
    registration.addEventListener('updatefound', () => {
      const worker = registration.installing;
      worker?.addEventListener('statechange', () => worker.state === 'installed' && offer(worker));
    });
  } catch {
    // The page works without it.
  }
}
