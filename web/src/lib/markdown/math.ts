// Formulas: KaTeX, which is loaded with its fonts when an answer has the first formula. It builds elements, so that their styles pass
// the page's policy.
import katex from 'katex';
import 'katex/dist/katex.min.css';

export function render(source: string, element: HTMLElement): void {
  try {
    katex.render(source, element, { displayMode: element.classList.contains('display'), throwOnError: true, trust: false, strict: false, maxSize: 50, maxExpand: 1000 });
  } catch {
    // What is no formula yet, or never, stays as it was written.
    element.textContent = source;
    element.classList.add('source');
  }
}
