// What a batch does with recurrent states. `segments[0].x` is the number of runs: the tokens of one sequence in the batch. Each
// has a vector then (index of its first segment, segments, first token, tokens), and each segment one behind them (first
// token, tokens, slot of the state before, slot of the state after).
// Bounds: runs are compared with `n_runs`; `segment_words` counts what it writes, `GpuStates::write` refuses slots that do
// not exist and more words than there is room for. Tokens of runs are tokens of the batch.
struct Run { first: u32, n_segments: u32, first_token: u32, n_tokens: u32 }
struct Segment { first_token: u32, n_tokens: u32, before: u32, after: u32 }
@group(0) @binding({{ segments_binding }}) var<storage, read> segments: array<vec4<u32>>;
fn n_runs() -> u32 { return segments[0].x; }
fn run(i: u32) -> Run { let v = segments[1u + i]; return Run(v.x, v.y, v.z, v.w); }
fn segment(i: u32) -> Segment { let v = segments[i]; return Segment(v.x, v.y, v.z, v.w); }
