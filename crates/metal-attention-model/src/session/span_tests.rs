//! Sessions whose sequences have spans of embedding rows, over the executor that computes hashes.

use super::*;
use crate::{ModelShape, NullExecutor, PAGE, Position, SessionOptions, Snapshot, Span, Watch};

/// Architectures whose layers keep all positions; windows, too; recurrent states.
const ARCHITECTURES: [&str; 3] = ["llama", "gemma3", "qwen35"];

/// Text before the span, its rows, and text behind it.
const N: [usize; 3] = [30, 35, 40];

fn session(architecture: &str, n_ubatch: usize) -> Session<NullExecutor> {
    let spec = ModelSpec::from_metadata(&ModelShape::custom(architecture).unwrap().metadata()).unwrap();
    let options = SessionOptions { n_ctx: 20 * PAGE, n_seq: 3, state_cache: 1 << 20, n_ubatch, ..Default::default() };
    NullExecutor::session(spec, &options, Watch::default())
}

fn tokens(pass: &dyn ForwardPass, seq: usize, n: usize) -> Vec<BatchToken> {
    let start = pass.n_past(seq);
    let token = |pos: usize| BatchToken {
        id: (pos * 37 % 200) as u32,
        seq,
        pos,
        output: pos.is_multiple_of(7) || pos + 1 == start + n,
    };
    (start..start + n).map(token).collect()
}

/// What a test puts in the middle of a sequence.
struct Picture {
    rows: Vec<f32>,
    positions: Vec<Position>,
    bidirectional_in: Vec<bool>,
}

impl Picture {
    /// A grid of 5 x 7 patches, with bidirectional attention in all layers or in none.
    fn new(pass: &dyn ForwardPass, is_bidirectional: bool) -> Self {
        let rows = (0..N[1] * pass.spec().n_embd).map(|i| (i * 13 % 101) as f32 / 50.0 - 1.0).collect();
        let positions = (0..N[1] as u32).map(|i| Position([0, i / 7, i % 7])).collect();
        Self { rows, positions, bidirectional_in: vec![is_bidirectional; pass.spec().n_layer()] }
    }

    fn span(&self, first: usize) -> Span<'_> {
        Span {
            first,
            rows: &self.rows,
            deepstack: &[],
            positions: &self.positions,
            bidirectional_in: &self.bidirectional_in,
        }
    }
}

/// Evaluates text, the picture and text in one batch. Returns the logits.
fn all_at_once(pass: &mut dyn ForwardPass, seq: usize, picture: &Picture) -> Vec<f32> {
    let tokens = tokens(pass, seq, N.iter().sum());
    let batch = Batch { tokens: &tokens, spans: &[picture.span(N[0])], states: &[] };
    let (Outputs::Logits(logits), _) = pass.forward_outputs(batch, OutputKind::Logits, &[]).unwrap() else {
        panic!("logits")
    };
    logits.as_slice().to_vec()
}

fn decode(pass: &mut dyn ForwardPass, seq: usize, mut id: u32, n: usize) -> Vec<u32> {
    let mut ids = Vec::new();
    for _ in 0..n {
        id = pass.forward_greedy(&[BatchToken { id, seq, pos: pass.n_past(seq), output: true }]).unwrap()[0];
        ids.push(id);
    }
    ids
}

#[test]
fn spans_give_the_same_results_in_any_steps() {
    for architecture in ARCHITECTURES {
        for is_bidirectional in [false, true] {
            let mut pass = session(architecture, 200);
            let picture = Picture::new(&pass, is_bidirectional);
            let want = all_at_once(&mut pass, 0, &picture);
            let other = Picture {
                rows: picture.rows.iter().map(|x| x + 0.5).collect(),
                ..Picture::new(&pass, is_bidirectional)
            };
            assert_ne!(all_at_once(&mut pass, 1, &other), want, "{architecture}: the rows have an effect");
            let other = Picture { positions: Vec::new(), ..Picture::new(&pass, is_bidirectional) };
            assert_ne!(all_at_once(&mut pass, 2, &other), want, "{architecture}: the positions have an effect");
            // Text continues behind the largest component, 6.
            let last = BatchToken { id: 0, seq: 0, pos: N.iter().sum::<usize>() - 1, output: true };
            assert_eq!(pass.page_table().text_position(&last), Position::of_text((N[0] + 7 + N[2] - 1) as u32));
            for n_ubatch in [36, 40, 64] {
                let mut pass = session(architecture, n_ubatch);
                assert!(
                    all_at_once(&mut pass, 1, &picture) == want,
                    "{architecture}, {n_ubatch}, bidirectional: {is_bidirectional}"
                );
            }
        }
        let logits = [false, true].map(|is_bidirectional| {
            let mut pass = session(architecture, 200);
            let picture = Picture::new(&pass, is_bidirectional);
            all_at_once(&mut pass, 0, &picture)
        });
        assert_ne!(logits[0], logits[1], "{architecture}: the inputs of a bidirectional span attend to more");
    }
}

#[test]
fn sequences_continue_behind_spans() {
    for architecture in ARCHITECTURES {
        let mut pass = session(architecture, 40);
        let picture = Picture::new(&pass, true);
        let n: usize = N.iter().sum();
        all_at_once(&mut pass, 0, &picture);
        let want = decode(&mut pass, 0, 5, 20);
        // Cut back within the text behind the span, and within the span, which is not cut.
        for (to, reached) in [(n, n), (N[0] + N[1] + 3, N[0] + N[1] + 3), (N[0] + 9, N[0])] {
            let found = pass.rewind(0, to);
            assert!(found <= reached, "{architecture}: {found} {reached}");
            assert!(found <= N[0] || found >= N[0] + N[1], "{architecture}: {found} is within the span");
            let rest = tokens(&pass, 0, n - found);
            let span = [picture.span(N[0] - found.min(N[0]))];
            let spans = if found <= N[0] { &span[..] } else { &[] };
            if !rest.is_empty() {
                pass.forward_outputs(Batch { tokens: &rest, spans, states: &[] }, OutputKind::Ids, &[]).unwrap();
            }
            assert_eq!(decode(&mut pass, 0, 5, 20), want, "{architecture}, cut to {to}");
        }
        // Shared, and restored from a snapshot.
        if pass.rewind(0, n) == n && pass.share_prefix(0, 1, n).unwrap() == n {
            assert_eq!(decode(&mut pass, 1, 5, 20), want, "{architecture}, shared");
        }
        let mut bytes = Vec::new();
        let mut source = session(architecture, 40);
        all_at_once(&mut source, 0, &picture);
        let snapshot = Snapshot::of_sequence(source.cache(), 0).unwrap();
        snapshot.write_header(&mut bytes).unwrap();
        snapshot.write_blocks(source.cache(), 0, &mut bytes).unwrap();
        let mut bytes = &bytes[..];
        let snapshot = Snapshot::read_header(&mut bytes, pass.n_ctx()).unwrap();
        snapshot.restore(pass.cache(), 2, &mut bytes).unwrap();
        assert_eq!(decode(&mut pass, 2, 5, 20), want, "{architecture}, restored");
    }
}

#[test]
fn bad_spans_are_refused() {
    let mut pass = session("llama", 34);
    let (n_embd, n_layer) = (pass.spec().n_embd, pass.spec().n_layer());
    let picture = Picture::new(&pass, false);
    let good = picture.span(3);
    let (rows, many) = (&picture.rows[..], vec![&picture.rows[..]; n_layer + 1]);
    let far = [Position([0, u32::MAX, 0]); N[1]];
    let bad = [
        (Span { rows: &rows[1..], ..good }, "the length of its rows"),
        (Span { rows: &[], ..good }, "no rows"),
        (Span { first: usize::MAX, ..good }, "beyond the batch"),
        (Span { first: 6, ..good }, "beyond the batch"),
        (Span { positions: &picture.positions[1..], ..good }, "the number of its positions"),
        (Span { deepstack: &many, ..good }, "for more layers than the model has"),
        (Span { deepstack: &[&rows[n_embd..]], ..good }, "its deepstack rows of a layer"),
        (Span { bidirectional_in: &picture.bidirectional_in[1..], ..good }, "the number of flags in bidirectional_in"),
    ];
    let text = tokens(&pass, 0, 40);
    let mut refused = |tokens: &[BatchToken], spans: &[Span<'_>]| {
        let error = pass.forward_outputs(Batch { tokens, spans, states: &[] }, OutputKind::Ids, &[]).unwrap_err();
        assert_eq!(pass.n_past(0), 0);
        assert!(pass.page_table().spans(0).as_slice().is_empty());
        error
    };
    for (span, reason) in bad {
        let ForwardError::BadSpan { why } = refused(&text, &[span]) else { panic!("{reason}") };
        assert!(why.contains(reason), "{why}: {reason}");
    }
    assert!(matches!(refused(&text, &[good, good]), ForwardError::BadSpan { .. }));
    let all_layers = vec![true; n_layer];
    let n = N[1];
    assert_eq!(
        refused(&text, &[Span { bidirectional_in: &all_layers, ..good }]),
        ForwardError::SpanTooLong { n, n_ubatch: 34 }
    );
    assert!(matches!(refused(&text, &[Span { positions: &far, ..good }]), ForwardError::PositionOutOfRange { .. }));
    let mut two = text;
    two.iter_mut().skip(10).enumerate().for_each(|(pos, token)| (token.seq, token.pos) = (1, pos));
    assert!(matches!(refused(&two, &[good]), ForwardError::BadSpan { .. }));
    // A step of 16 output tokens cannot hold a span of 35 that must not be divided, unless the results need no logits.
    let text: Vec<_> = tokens(&pass, 0, 40).into_iter().map(|token| BatchToken { output: true, ..token }).collect();
    let spans = [Span { bidirectional_in: &all_layers, ..good }];
    let batch = Batch { tokens: &text, spans: &spans, states: &[] };
    let mut wide = session("llama", 40);
    let error = wide.forward_outputs(batch, OutputKind::Logits, &[]).unwrap_err();
    assert_eq!(error, ForwardError::TooManySpanOutputs { n_outputs: n, max_outputs: 16 });
    wide.forward_outputs(batch, OutputKind::Hidden, &[]).unwrap();
    // The text behind a span may leave the context, too.
    let end = [Position([0, (pass.n_ctx() - 4) as u32, 0]); N[1]];
    let tokens = tokens(&pass, 0, 45);
    let batch = Batch { tokens: &tokens, spans: &[Span { positions: &end, ..good }], states: &[] };
    let error = pass.forward_outputs(batch, OutputKind::Ids, &[]).unwrap_err();
    assert!(matches!(error, ForwardError::PositionOutOfRange { .. }), "{error}");
}

#[test]
fn rows_have_their_own_positions_behind_a_far_one() {
    let mut pass = session("llama", 200);
    let n_embd = pass.spec().n_embd;
    // The first span moves the text on by all but a few positions; all rows of the second one are at one position.
    let far = [Position([(pass.n_ctx() - 5) as u32; 3])];
    let rows = vec![0.5; 60 * n_embd];
    let one = Span { first: 1, rows: &rows[..n_embd], deepstack: &[], positions: &far, bidirectional_in: &[] };
    let others =
        Span { first: 2, rows: &rows, deepstack: &[], positions: &[Position::default(); 60], bidirectional_in: &[] };
    let tokens = tokens(&pass, 0, 1 + 1 + 60 + 1);
    let batch = Batch { tokens: &tokens, spans: &[one, others], states: &[] };
    pass.forward_outputs(batch, OutputKind::Hidden, &[]).unwrap();
    assert_eq!(pass.page_table().text_position(&tokens[62]), Position::of_text((pass.n_ctx() - 2) as u32));
}

/// Keeps the steps that it sees.
#[derive(Default)]
struct Recorder(Vec<Step>);

impl Hooks for Recorder {
    fn before_step(&mut self, step: &Step) -> Result<(), ForwardError> {
        self.0.push(step.clone());
        Ok(())
    }
}

/// The lists of the last inputs that inputs attend to, and the list of each layer, of the last step of `tokens` with `spans`.
fn last_seen(architecture: &str, tokens: &[BatchToken], spans: &[Span<'_>]) -> (Vec<Vec<u32>>, Vec<usize>) {
    let spec = ModelSpec::from_metadata(&ModelShape::custom(architecture).unwrap().metadata()).unwrap();
    let options = SessionOptions { n_ctx: 20 * PAGE, n_seq: 3, ..Default::default() };
    let inner = NullExecutor::new(spec.clone(), &options, Watch::default());
    let mut pass = Session::new(HookedExecutor::new(inner, Recorder::default()));
    pass.forward_outputs(Batch { tokens, spans, states: &[] }, OutputKind::Hidden, &[]).unwrap();
    let seen = pass.executor.hooks.0.last().unwrap().last_seen(&spec);
    assert!(
        (0..spec.n_layer()).all(|i| seen.looks_ahead(i, tokens) != (seen.lists[seen.list_of(i)] == indices(tokens)))
    );
    let of_layer = (0..spec.n_layer()).map(|i| seen.list_of(i)).collect();
    (seen.lists, of_layer)
}

fn indices(tokens: &[BatchToken]) -> Vec<u32> {
    tokens.iter().map(|token| token.pos as u32).collect()
}

#[test]
fn inputs_attend_up_to_themselves_their_span_or_their_sequence() {
    let token = |(seq, pos): (usize, usize)| BatchToken { id: 1, seq, pos, output: true };
    let tokens: Vec<_> = [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (0, 3)].map(token).to_vec();
    let all_zero = |n| vec![0; n];
    let (lists, of_layer) = last_seen("llama", &tokens, &[]);
    assert_eq!((lists, of_layer.iter().all(|&list| list == 0)), (vec![indices(&tokens)], true));
    // The whole sequence, in either direction.
    let (lists, of_layer) = last_seen("bert", &tokens[..5], &[]);
    assert_eq!((lists, of_layer.clone()), (vec![vec![2, 2, 2, 1, 1]], all_zero(of_layer.len())));
    // The first span is bidirectional in the first layer, the second one in all others.
    let spec = ModelSpec::from_metadata(&ModelShape::custom("llama").unwrap().metadata()).unwrap();
    let rows = vec![0.5; 2 * spec.n_embd];
    let first: Vec<bool> = (0..spec.n_layer()).map(|i| i == 0).collect();
    let others: Vec<bool> = first.iter().map(|is_first| !is_first).collect();
    let span = Span { first: 0, rows: &rows, deepstack: &[], positions: &[], bidirectional_in: &first };
    let spans = [Span { first: 1, ..span }, Span { first: 3, bidirectional_in: &others, ..span }];
    let (lists, of_layer) = last_seen("llama", &tokens, &spans);
    assert_eq!(lists, [[0, 2, 2, 0, 1, 3], [0, 1, 2, 1, 1, 3]]);
    assert_eq!(of_layer, (0..spec.n_layer()).map(|i| usize::from(i > 0)).collect::<Vec<_>>());
}
