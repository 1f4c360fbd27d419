//! Spans of embedding rows: a model that is given its own embeddings computes the bits that it computes from the token ids.

use metal_attention_cpu::CpuForwardPass;
use metal_attention_gguf::GgufFile;
use metal_attention_model::{
    Batch, BatchToken, ForwardPass, LoadedModel, OutputKind, Outputs, Position, SessionOptions, Span,
};
use metal_attention_testing::models::{architectures, more_architectures};

use crate::support::{bits, start};

/// Tokens before the span, in it, and behind it.
const N: [usize; 3] = [3, 9, 4];

fn options() -> SessionOptions {
    SessionOptions { n_ctx: 64, n_seq: 2, n_ubatch: 10, ..Default::default() }
}

fn tokens(model: &CpuForwardPass, n: usize) -> Vec<BatchToken> {
    let n_vocab = model.spec().n_vocab as u32;
    (0..n).map(|pos| BatchToken { id: (pos as u32 * 37 + 5) % n_vocab, seq: 0, pos, output: true }).collect()
}

/// The embeddings of the tokens of the span, times the factor of the model.
fn own_rows(model: &LoadedModel, tokens: &[BatchToken]) -> Vec<f32> {
    let table = &model.weights().token_embd.as_ref().unwrap().weight;
    let mut rows = Vec::new();
    for token in &tokens[N[0]..N[0] + N[1]] {
        let mut row = vec![0.0; model.spec().n_embd];
        table.ty().dequantize(table.row(token.id as usize), &mut row);
        rows.extend(row.iter().map(|x| x * model.spec().embedding.scale));
    }
    rows
}

fn logits(pass: &mut CpuForwardPass, tokens: &[BatchToken], spans: &[Span<'_>]) -> Vec<f32> {
    let (outputs, _) = pass
        .forward_outputs(Batch { spans, ..Batch::from(tokens) }, OutputKind::Logits, &[])
        .expect("a batch that runs");
    let Outputs::Logits(logits) = outputs else { panic!("logits") };
    logits.as_slice().to_vec()
}

#[test]
fn own_embeddings_give_the_bits_of_the_tokens() {
    let mut n_models = 0;
    for (name, bytes) in architectures().iter().chain(more_architectures()) {
        let file = GgufFile::from_bytes(bytes).expect("a file");
        let model = LoadedModel::load(&file).expect("a model");
        if !model.spec().generates_text() {
            continue;
        }
        n_models += 1;
        let mut pass = start(&file, &options());
        let tokens = tokens(&pass, N.iter().sum());
        let rows = own_rows(&model, &tokens);
        let want = logits(&mut pass, &tokens, &[]);
        let span = Span { first: N[0], rows: &rows, deepstack: &[], positions: &[], bidirectional_in: &[] };
        let positions: Vec<_> = (0..N[1] as u32).map(|i| Position([i; 3])).collect();
        for span in [span, Span { positions: &positions, ..span }] {
            pass.rewind(0, 0);
            // Wrong ids in the place of the rows, if the layers read none.
            let mut tokens = tokens.clone();
            if model.spec().embedding.per_layer.is_none() {
                tokens[N[0]..N[0] + N[1]].iter_mut().for_each(|token| token.id = 0);
            }
            assert!(bits(&logits(&mut pass, &tokens, &[span])) == bits(&want), "{name}: {span:?}");
        }
    }
    assert!(n_models > 50, "{n_models} models");
}

#[test]
fn positions_deepstack_and_bidirectional_attention_have_an_effect() {
    let file = GgufFile::from_bytes(&architectures()["llama-mha.gguf"]).expect("a file");
    let model = LoadedModel::load(&file).expect("a model");
    let mut pass = start(&file, &options());
    let (n_embd, n_layer) = (model.spec().n_embd, model.spec().n_layer());
    let tokens = tokens(&pass, N.iter().sum());
    let rows = own_rows(&model, &tokens);
    let span = Span { first: N[0], rows: &rows, deepstack: &[], positions: &[], bidirectional_in: &[] };
    let want = logits(&mut pass, &tokens, &[span]);
    let row = |logits: &[f32], i: usize| bits(&logits[i * model.spec().n_vocab..][..model.spec().n_vocab]);
    // Which rows of logits change: of the span's first input, of its last one, and of the text behind it.
    let mut changed = |span: Span<'_>| {
        pass.rewind(0, 0);
        let found = logits(&mut pass, &tokens, &[span]);
        assert_eq!(row(&found, N[0] - 1), row(&want, N[0] - 1), "what is before the span");
        [N[0], N[0] + N[1] - 1, N[0] + N[1]].map(|i| row(&found, i) != row(&want, i))
    };
    let more: Vec<f32> = (0..N[1] * n_embd).map(|i| (i % 7) as f32 / 7.0).collect();
    assert_eq!(changed(Span { deepstack: &[&more], ..span }), [true; 3]);
    assert_eq!(changed(Span { deepstack: &[&vec![0.0; more.len()]], ..span }), [false; 3]);
    // All rows at one position: the first one is where it was, and the text continues at the next.
    assert_eq!(changed(Span { positions: &[Position::default(); N[1]], ..span }), [false, true, true]);
    // Bidirectional in the last layer: the first input attends to the others, too; the last one always did.
    let mut last_layer = vec![false; n_layer];
    last_layer[n_layer - 1] = true;
    assert_eq!(changed(Span { bidirectional_in: &last_layer, ..span }), [true, false, false]);
    assert_eq!(changed(Span { bidirectional_in: &vec![true; n_layer], ..span }), [true; 3]);
}
