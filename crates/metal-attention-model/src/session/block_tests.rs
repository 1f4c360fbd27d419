//! Sessions of block drafters, whose sequences have context rows and blocks, over the executor that computes hashes.

use super::*;
use crate::attention::Mask;
use crate::{ModelShape, NullExecutor, PAGE, SessionOptions, Watch};

/// Context rows of a sequence.
const N: usize = 3 * PAGE + 7;

/// Inputs of a block.
const BLOCK: usize = 6;

/// A block drafter; with `window` each layer but the first has a window.
fn spec(window: Option<usize>) -> ModelSpec {
    let mut spec = ModelSpec::from_metadata(&ModelShape::custom("llama").unwrap().metadata()).unwrap();
    spec.takes_context = true;
    for layer in spec.layers.iter_mut().skip(1) {
        if let (crate::Mixer::Attention(attention), Some(window)) = (&mut layer.mixer, window) {
            attention.mask = Mask::Window(window);
        }
    }
    spec
}

fn session(window: Option<usize>, n_ubatch: usize) -> Session<NullExecutor> {
    let options = SessionOptions { n_ctx: 20 * PAGE, n_seq: 3, n_ubatch, ..Default::default() };
    NullExecutor::session(spec(window), &options, Watch::default())
}

/// The context row at a position of a sequence.
fn row(pass: &dyn ForwardPass, seq: usize, pos: usize) -> Vec<f32> {
    (0..pass.spec().n_embd).map(|i| (seq * 1000 + pos * 31 + i * 7) as f32).collect()
}

/// Stores the context rows of sequence `seq` up to position `end`.
fn store(pass: &mut dyn ForwardPass, seq: usize, end: usize) {
    let tokens: Vec<_> = (pass.n_past(seq)..end).map(|pos| BatchToken { id: 0, seq, pos, output: false }).collect();
    let context: Vec<f32> = tokens.iter().flat_map(|token| row(pass, seq, token.pos)).collect();
    let batch = Batch { context: &context, ..Batch::from(&tokens[..]) };
    pass.forward_outputs(batch, OutputKind::Hidden, &[]).unwrap();
}

fn block(pass: &dyn ForwardPass, seq: usize) -> Vec<BatchToken> {
    let start = pass.n_past(seq);
    (0..BLOCK).map(|i| BatchToken { id: i as u32, seq, pos: start + i, output: i > 0 }).collect()
}

/// The logits of a block of each of `seqs`, which are cut back.
fn propose(pass: &mut dyn ForwardPass, seqs: &[usize]) -> Vec<f32> {
    let tokens: Vec<_> = seqs.iter().flat_map(|&seq| block(pass, seq)).collect();
    let logits = pass.forward(&tokens).unwrap().as_slice().to_vec();
    for token in tokens.iter().filter(|token| token.id == 0) {
        assert_eq!(pass.rewind(token.seq, token.pos), token.pos);
    }
    logits
}

#[test]
fn blocks_see_the_context_however_it_is_divided_and_are_cut_back() {
    for window in [None, Some(BLOCK - 2), Some(PAGE + 5)] {
        let mut whole = session(window, 512);
        store(&mut whole, 0, N);
        let want = propose(&mut whole, &[0]);
        assert_eq!(want, propose(&mut whole, &[0]), "nothing is left of a block");
        // Small steps, with blocks in between, beside another sequence.
        let mut pass = session(window, 10);
        store(&mut pass, 1, 20);
        for end in [1, 5, PAGE - 1, PAGE, 2 * PAGE + 3, N] {
            store(&mut pass, 0, end);
            propose(&mut pass, &[1, 0]);
        }
        let n = want.len();
        assert_eq!(propose(&mut pass, &[1, 0])[n..], want, "window {window:?}");
        // Blocks of several sequences are divided between sequences alone.
        store(&mut pass, 2, 3);
        assert_eq!(propose(&mut pass, &[2, 0, 1])[n..2 * n], want);
    }
}

#[test]
fn all_inputs_of_a_block_matter_to_each() {
    let mut pass = session(Some(BLOCK - 2), 512);
    store(&mut pass, 0, 9);
    let want = propose(&mut pass, &[0]);
    let n_vocab = pass.spec().n_vocab;
    for changed in 0..BLOCK {
        let mut tokens = block(&pass, 0);
        tokens[changed].id += 40;
        let found = pass.forward(&tokens).unwrap().as_slice().to_vec();
        pass.rewind(0, 9);
        assert!(found.chunks(n_vocab).zip(want.chunks(n_vocab)).all(|(found, want)| found != want));
    }
}

#[test]
fn batches_of_other_kinds_are_refused() {
    let mut pass = session(None, 8);
    let n_embd = pass.spec().n_embd;
    let tokens: Vec<_> = (0..4).map(|pos| BatchToken { id: 0, seq: 0, pos, output: false }).collect();
    let rows = vec![0.0; 4 * n_embd];
    let mut refused = |batch: Batch<'_>| pass.forward_outputs(batch, OutputKind::Logits, &[]).unwrap_err();
    let batch = Batch { context: &rows, ..Batch::from(&tokens[..]) };
    let few = Batch { context: &rows[1..], ..batch };
    assert_eq!(refused(few), ForwardError::WrongContext { found: 4 * n_embd - 1, expected: 4 * n_embd });
    let outputs: Vec<_> = tokens.iter().map(|token| BatchToken { output: true, ..*token }).collect();
    let with_outputs = Batch { tokens: &outputs, ..batch };
    assert!(matches!(refused(with_outputs), ForwardError::BadBlock { .. }));
    let long: Vec<_> = (0..9).map(|pos| BatchToken { id: 0, seq: 0, pos, output: true }).collect();
    assert!(matches!(refused(Batch::from(&long[..])), ForwardError::BadBlock { .. }), "longer than a step");
    let parts = [(0, 0), (1, 0), (0, 1)].map(|(seq, pos)| BatchToken { id: 0, seq, pos, output: true });
    assert!(matches!(refused(Batch::from(&parts[..])), ForwardError::BadBlock { .. }), "a block in two parts");
    let mut plain = ModelSpec::clone(pass.spec());
    plain.takes_context = false;
    let mut plain =
        NullExecutor::session(plain, &SessionOptions { n_ctx: PAGE, ..Default::default() }, Watch::default());
    let error = plain.forward_outputs(batch, OutputKind::Logits, &[]).unwrap_err();
    assert_eq!(error, ForwardError::WrongContext { found: 4 * n_embd, expected: 0 });
    assert_eq!((pass.n_past(0), plain.n_past(0)), (0, 0));
}
