// The text of PDF files: pdf.js, which is loaded when the first one is added. Its worker is a file of this page.
import { GlobalWorkerOptions, getDocument } from 'pdfjs-dist';
import workerUrl from 'pdfjs-dist/build/pdf.worker.min.mjs?url';

GlobalWorkerOptions.workerSrc = workerUrl;

/** The text of all pages, each after its number. */
export async function readPdf(file: Blob): Promise<{ text: string; pages: number }> {
  const task = getDocument({ data: new Uint8Array(await file.arrayBuffer()), isEvalSupported: false, useSystemFonts: true, disableFontFace: true });
  const pdf = await task.promise;
  const parts: string[] = [];
  for (let number = 1; number <= pdf.numPages; number++) {
    const page = await pdf.getPage(number);
    const { items } = await page.getTextContent();
    const text = items.map((item) => ('str' in item ? item.str + (item.hasEOL ? '\n' : '') : '')).join('').trim();
    if (text) parts.push(`Page ${number}\n${text}`);
    page.cleanup();
  }
  const pages = pdf.numPages;
  await task.destroy();
  return { text: parts.join('\n\n'), pages };
}
