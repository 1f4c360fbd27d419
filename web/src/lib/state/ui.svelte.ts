// What is open, the theme, short notes at the lower edge, and announcements for screen readers.
import { read, readJson, write, writeJson } from '../store/local';

export type Theme = 'system' | 'light' | 'dark';
export type Dialog = 'search' | 'keys' | 'shortcuts' | 'settings' | 'picture' | null;

export interface Toast {
  id: number;
  text: string;
  action?: { label: string; run: () => void };
}

class Ui {
  theme = $state<Theme>('system');
  /** The sidebar on wide screens. */
  sidebar = $state(read('sidebar') !== 'closed');
  /** The sidebar on phones. */
  drawer = $state(false);
  panel = $state(false);
  models = $state(false);
  dialog = $state<Dialog>(null);
  picture = $state<{ url: string; name: string } | null>(null);
  toasts = $state<Toast[]>([]);
  announcement = $state('');
  /** Titles are made by the model. */
  titles = $state(read('titles') !== 'off');
  /** What is written cannot be kept. */
  unkept = $state(false);
  #nToasts = 0;

  constructor() {
    // The page before this one kept "light" or "dark" as JSON.
    const theme = readJson<string>('theme');
    this.setTheme(theme === 'light' || theme === 'dark' ? theme : 'system');
  }

  setTheme(theme: Theme): void {
    this.theme = theme;
    if (typeof document === 'undefined') return;
    if (theme === 'system') delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = theme;
    writeJson('theme', theme);
  }

  setSidebar(isOpen: boolean): void {
    this.sidebar = isOpen;
    write('sidebar', isOpen ? 'open' : 'closed');
  }

  setTitles(isOn: boolean): void {
    this.titles = isOn;
    write('titles', isOn ? 'on' : 'off');
  }

  /** Shows a note for some seconds; longer if it has an action. */
  toast(text: string, action?: Toast['action']): void {
    const id = ++this.#nToasts;
    this.toasts = [...this.toasts.slice(-2), { id, text, action }];
    setTimeout(() => this.dropToast(id), action ? 10_000 : 4000);
  }

  dropToast(id: number): void {
    this.toasts = this.toasts.filter((toast) => toast.id !== id);
  }

  announce(text: string): void {
    // The same text twice is announced twice.
    this.announcement = this.announcement === text ? `${text}\u00a0` : text;
  }
}

export const ui = new Ui();
