// Which tokens of a batch take a recurrent state from one slot to another. `segments[0]` is (number of runs, 0, 0, 0); then comes
// a vector for each run: (index in this array of its first segment, number of segments, first token's row in the batch, number of
// tokens); then those of the segments: (first token's row in the batch, number of tokens, slot of the state before, slot of the
// state after). A run is the tokens of one sequence.
// Bounds: `segment_words` writes only existing runs and segments, of tokens that the batch has and slots that the states have; no
// run and no segment is empty.
struct Run { first: u32, n_segments: u32, token: u32, n_tokens: u32 }
struct Segment { token: u32, n_tokens: u32, from_slot: u32, to_slot: u32 }
fn n_runs() -> u32 { return segments[0].x; }
fn run_of(i: u32) -> Run {
    let run = segments[1u + i];
    return Run(run.x, run.y, run.z, run.w);
}
fn segment_of(i: u32) -> Segment {
    let segment = segments[i];
    return Segment(segment.x, segment.y, segment.z, segment.w);
}
