// Texts of scripted answers.

export const RAIN = `## From tips to millimetres

Each tip of the bucket stands for a fixed volume. Divide the volume by the area of the funnel and you have the depth of the rain. The manual gives both:

- one tip is **5.0 ml** of water (page 4)
- the funnel is **159 mm** wide, so its area is about 198 cm²
- the log stores tips per day in \`tips\`

$$
P = \\frac{10 \\cdot n \\cdot V}{A} = \\frac{10 \\cdot n \\cdot 5.0}{198} \\approx 0.25\\, n
$$

\`\`\`python
# depth of rain in mm for a number of bucket tips
def depth_mm(tips, tip_ml=5.0, area_cm2=198.0):
    return 10 * tips * tip_ml / area_cm2

for day, tips in log.items():
    print(f"{day:<10} {depth_mm(tips):5.1f} mm")
\`\`\`

### Last week

| Day | Tips | Depth, mm | Sum, mm |
|---|--:|--:|--:|
| Monday | 12 | 3.0 | 3.0 |
| Tuesday | 0 | 0.0 | 3.0 |
| Wednesday | 47 | 11.9 | 14.9 |
| Thursday | 5 | 1.3 | 16.2 |

Wednesday brought most of it. The other three days of the week were dry.`;

const PARTS = [
  'The gauge stands in the open, at least twice as far from a wall as the wall is high, so that the wind does not carry rain over its funnel.\n\n',
  '### A note on readings\n\n',
  '1. Read the counter in the morning.\n2. Write the number down.\n3. Set it to zero.\n\n',
  '```js\nconst sum = (tips) => tips.reduce((a, b) => a + b, 0);\nconsole.log(sum([1, 2, 3]));\n```\n\n',
  'Each tip is *about* 0.25 mm, and **never** less than 0.2 mm; see [the manual](https://example.org/manual) for more.\n\n',
  '| Day | mm |\n|---|--:|\n| Monday | 3.0 |\n| Tuesday | 0.0 |\n\n',
  '> What is measured twice is measured better.\n\n',
];

/** A text of at least `n` characters, of all sorts of blocks. */
export function longText(n: number): string {
  let text = '';
  for (let i = 0; text.length < n; i++) text += PARTS[i % PARTS.length];
  return text;
}

/** Characters of the slow answer. */
export const SLOW = 700;

const columns = Array.from({ length: 30 }, (_, i) => i + 1);
/** What is hard to lay out: a wide table, formulas that are none, text from the right, words without an end. */
export const AWKWARD = `| ${columns.map((n) => `Column ${n}`).join(' | ')} |
|${'--:|'.repeat(30)}
| ${columns.map((n) => n * 1234.5).join(' | ')} |

$$
\\frac{1}{
$$

An inline \\(\\undefined{x}\\) formula, and \\(x^2\\) after it.

هذا نص من اليمين إلى اليسار مع *كلمة* و \`code\`.

- שלום עולם
- עוד שורה

${'w'.repeat(400)}

\`\`\`js
const line = '${'x'.repeat(400)}';
\`\`\``;
