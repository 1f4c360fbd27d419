// The icons: lines on a ground of 20 by 20.

export const ICONS = {
  'plus': '<path d="M10 4v12M4 10h12"/>',
  'find': '<circle cx="8.75" cy="8.75" r="5"/><path d="m12.5 12.5 4 4"/>',
  'pin': '<path d="M7 3h6M8 3v5l-2.5 3.5h9L12 8V3M10 11.5V17"/>',
  'pen': '<path d="m4 16 .8-3.4L13 4.4l2.6 2.6-8.2 8.2zM11.2 6.2l2.6 2.6"/>',
  'bin': '<path d="M4 6h12M8 6V4h4v2M5.5 6l.7 10h7.6l.7-10"/>',
  'copy': '<rect x="7" y="7" width="9.5" height="9.5" rx="2"/><path d="M13 7V5.5a2 2 0 0 0-2-2H5.5a2 2 0 0 0-2 2V11a2 2 0 0 0 2 2H7"/>',
  'again': '<path d="M15.7 8.5A6 6 0 1 0 16 11M16 4.5v4h-4"/>',
  'on': '<path d="M4 10h8M9 6.5l3.5 3.5L9 13.5M16 5v10"/>',
  'left': '<path d="m12 5-5 5 5 5"/>',
  'right': '<path d="m8 5 5 5-5 5"/>',
  'down': '<path d="m5 8 5 5 5-5"/>',
  'arrow-down': '<path d="M10 4v11.5M5 11l5 5 5-5"/>',
  'up': '<path d="M10 16V4.5M5 9l5-5 5 5"/>',
  'stop': '<rect x="5.5" y="5.5" width="9" height="9" rx="1.5" fill="currentColor"/>',
  'pause': '<path d="M7.5 5v10M12.5 5v10"/>',
  'clip': '<path d="m15.5 9.5-5.8 5.8a3.4 3.4 0 0 1-4.8-4.8L11 4.4a2.3 2.3 0 0 1 3.2 3.2l-5.9 5.9a1.1 1.1 0 0 1-1.6-1.6L12 6.7"/>',
  'get': '<path d="M10 3.5V13M6 9.5l4 4 4-4M4 16.5h12"/>',
  'page': '<path d="M5 3h6.5L15 6.5V17H5zM11.5 3v3.5H15M7.5 10.5h5M7.5 13.5h5"/>',
  'eye': '<path d="M2.5 10S5.5 5 10 5s7.5 5 7.5 5-3 5-7.5 5-7.5-5-7.5-5z"/><circle cx="10" cy="10" r="2.25"/>',
  'tool': '<path d="M11.5 8.5a3.7 3.7 0 0 1 4.7-4.7L14 6l.3 1.7L16 8l2-2.2a3.7 3.7 0 0 1-4.9 4.5l-6.3 6.3a1.7 1.7 0 0 1-2.4-2.4z" transform="translate(-1 0)"/>',
  'dials': '<path d="M3 6.5h7M14 6.5h3M3 13.5h3M10 13.5h7"/><circle cx="12" cy="6.5" r="2"/><circle cx="8" cy="13.5" r="2"/>',
  'side': '<rect x="3" y="4" width="14" height="12" rx="2.5"/><path d="M8 4v12"/>',
  'menu': '<path d="M3.5 6.5h13M3.5 13.5h9"/>',
  'x': '<path d="m5 5 10 10M15 5 5 15"/>',
  'alert': '<circle cx="10" cy="10" r="7"/><path d="M10 6.5v4.2M10 13.4v.1"/>',
  'ok': '<path d="m4.5 10.5 3.7 3.7 7.3-8"/>',
  'bulb': '<path d="M7.5 14.5C7.5 12 5 11 5 8a5 5 0 0 1 10 0c0 3-2.5 4-2.5 6.5zM8 17h4"/>',
  'fn': '<path d="m7 6-4 4 4 4M13 6l4 4-4 4"/>',
  'moon': '<path d="M16 12A6.5 6.5 0 0 1 8 4a6.5 6.5 0 1 0 8 8z"/>',
  'sun': '<circle cx="10" cy="10" r="3.5"/><path d="M10 2.5v2M10 15.5v2M2.5 10h2M15.5 10h2M4.7 4.7l1.4 1.4M13.9 13.9l1.4 1.4M15.3 4.7l-1.4 1.4M6.1 13.9l-1.4 1.4"/>',
  'auto': '<circle cx="10" cy="10" r="6.5"/><path d="M10 3.5a6.5 6.5 0 0 1 0 13z" fill="currentColor"/>',
  'dots': '<path d="M4.5 10h.01M10 10h.01M15.5 10h.01" stroke-width="2.4"/>',
  'key': '<circle cx="7" cy="13" r="3"/><path d="m9.2 10.8 6.3-6.3M13 7l2 2"/>',
  'gear': '<circle cx="10" cy="10" r="2.5"/><path d="M10 3v2M10 15v2M3 10h2M15 10h2M5.050 5.050l1.400 1.400M13.550 13.550l1.400 1.400M14.950 5.050l-1.400 1.400M6.450 13.550l-1.400 1.400"/>',
  'share': '<path d="M10 12.500V3.500M6.500 6.500 10 3l3.500 3.500M4 10.500V16h12v-5.500"/>',
} as const;

export type IconName = keyof typeof ICONS;

/** The element of an icon, for elements that are made without components. */
export function svgIcon(name: string, isSmall = false): SVGSVGElement {
  const text = ICONS[name as IconName];
  const parsed = new DOMParser().parseFromString(`<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 20 20">${text}</svg>`, 'image/svg+xml');
  const svg = document.importNode(parsed.documentElement, true) as unknown as SVGSVGElement;
  svg.setAttribute('class', isSmall ? 'i i-s' : 'i');
  svg.setAttribute('aria-hidden', 'true');
  return svg;
}
