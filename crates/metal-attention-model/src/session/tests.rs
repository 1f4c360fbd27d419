//! Sessions over an executor that computes hashes: results do not depend on how tokens are divided into batches, on decode
//! steps that ran ahead, on prefixes that are shared, or on batches that failed.

use super::*;
use crate::{ModelShape, NullExecutor, PAGE, SessionOptions, Snapshot, Watch};

/// Architectures whose layers keep all positions; windows, too; recurrent states; states alone.
const ARCHITECTURES: [&str; 4] = ["llama", "gemma3", "qwen35", "mamba"];

fn session(architecture: &str, watch: Watch) -> Session<NullExecutor> {
    let spec = ModelSpec::from_metadata(&ModelShape::custom(architecture).unwrap().metadata()).unwrap();
    let options =
        SessionOptions { n_ctx: 20 * PAGE, n_seq: 3, state_cache: 1 << 20, n_ubatch: 40, ..Default::default() };
    NullExecutor::session(spec, &options, watch)
}

fn some_ids(n: u32) -> Vec<u32> {
    (0..n).map(|i| (i * 37 + 11) % 200).collect()
}

/// Tokens that continue sequence `seq`, all or only the last one with output.
fn continuing(pass: &dyn ForwardPass, seq: usize, ids: &[u32], all: bool) -> Vec<BatchToken> {
    let n_past = pass.n_past(seq);
    let token = |(i, &id)| BatchToken { id, seq, pos: n_past + i, output: all || i + 1 == ids.len() };
    ids.iter().enumerate().map(token).collect()
}

fn logits(pass: &mut dyn ForwardPass, seq: usize, ids: &[u32]) -> Vec<f32> {
    let batch = continuing(pass, seq, ids, true);
    pass.forward(&batch).unwrap().as_slice().to_vec()
}

/// Evaluates those of `ids` that sequence `seq`, which begins with them, lacks.
fn catch_up(pass: &mut dyn ForwardPass, seq: usize, ids: &[u32]) {
    let n_past = pass.n_past(seq);
    if n_past < ids.len() {
        logits(pass, seq, &ids[n_past..]);
    }
}

/// Decodes `n` tokens greedily after `id`.
fn greedy(pass: &mut dyn ForwardPass, seq: usize, mut id: u32, n: usize) -> Vec<u32> {
    let mut ids = Vec::new();
    for _ in 0..n {
        let batch = continuing(pass, seq, &[id], true);
        id = pass.forward_greedy(&batch).unwrap()[0];
        ids.push(id);
    }
    ids
}

/// Fails if logits differ, without printing them.
fn same(found: &[f32], want: &[f32], what: &str) {
    assert_eq!(found.len(), want.len(), "{what}");
    let differs = found.iter().zip(want).position(|(a, b)| a != b);
    assert!(differs.is_none(), "{what}: element {differs:?}");
}

#[test]
fn any_division_into_batches_gives_the_same_results() {
    for architecture in ARCHITECTURES {
        let ids = some_ids(300);
        let n_vocab = session(architecture, Watch::default()).spec().n_vocab;
        let mut single = session(architecture, Watch::default());
        let want: Vec<f32> = ids.iter().flat_map(|&id| logits(&mut single, 0, &[id])).collect();
        for step in [7, 64, 300] {
            let mut pass = session(architecture, Watch::default());
            let found: Vec<f32> = ids.chunks(step).flat_map(|chunk| logits(&mut pass, 1, chunk)).collect();
            same(&found, &want, &format!("{architecture}, {step} at once"));
        }
        // Two sequences whose tokens alternate, with output of their last tokens.
        let mut pass = session(architecture, Watch::default());
        let of = |seq: usize| continuing(&pass, seq, &ids[..20 + seq], false);
        let (first, second) = (of(0), of(2));
        let mut batch: Vec<_> = first.chunks(3).zip(second.chunks(3)).flat_map(|(a, b)| [a, b].concat()).collect();
        batch.extend(second.chunks(3).skip(first.len().div_ceil(3)).flatten());
        let rows = pass.forward(&batch).unwrap();
        assert_eq!(rows.n_rows(), 2, "{architecture}");
        same(rows.row(0), &want[19 * n_vocab..20 * n_vocab], architecture);
        same(rows.row(1), &want[21 * n_vocab..22 * n_vocab], architecture);
        let lists = pass.forward_top_k(&continuing(&pass, 2, &ids[22..60], true), 5).unwrap();
        for (i, list) in lists.iter().enumerate() {
            assert_eq!(*list, highest(&want[(22 + i) * n_vocab..][..n_vocab], 5), "{architecture}");
        }
        assert_eq!(pass.forward_top_k(&continuing(&pass, 2, &ids[60..61], true), 20).unwrap()[0].len(), 20);
        assert_eq!(pass.forward_hidden(&continuing(&pass, 1, &ids[..50], false)).unwrap().len(), pass.spec().n_embd);
    }
}

#[test]
fn steps_that_run_ahead_give_the_tokens_of_single_steps() {
    for architecture in ARCHITECTURES {
        let mut single = session(architecture, Watch::default());
        let mut want = vec![17];
        for _ in 0..200 {
            let row = logits(&mut single, 0, &want[want.len() - 1..]);
            want.push(argmax(&row));
        }
        let mut pass = session(architecture, Watch::default());
        assert_eq!(greedy(&mut pass, 0, 17, 150), want[1..151], "{architecture}");
        assert!(pass.n_steps() > 150, "{architecture}: {} steps", pass.n_steps());
        // A prefix is shared while steps are in flight, and both sequences go on.
        let n = pass.share_prefix(0, 1, 140).unwrap();
        assert!((140 - PAGE..=140).contains(&n), "{architecture}: {n}");
        catch_up(&mut pass, 1, &want[..140]);
        assert_eq!(greedy(&mut pass, 1, want[140], 30), want[141..171], "{architecture}");
        assert_eq!(greedy(&mut pass, 0, want[150], 30), want[151..181], "{architecture}");
        // Cut back, and continued otherwise than steps in flight.
        pass.rewind(0, 170);
        catch_up(&mut pass, 0, &want[..170]);
        let other = greedy(&mut pass, 0, want[170] ^ 1, 3);
        pass.rewind(0, 170);
        catch_up(&mut pass, 0, &want[..170]);
        assert_eq!(greedy(&mut pass, 0, want[170], 3), want[171..174], "{architecture}");
        assert_ne!(other, want[171..174], "{architecture}");
        // Several sequences in one step.
        let mut ids = [want[173], want[170]];
        for i in 0..20 {
            let batch = [0, 1].map(|seq| BatchToken { id: ids[seq], seq, pos: pass.n_past(seq), output: true });
            let chosen = pass.forward_greedy(&batch).unwrap();
            ids = [chosen[0], chosen[1]];
            assert_eq!(ids, [want[174 + i], want[171 + i]], "{architecture}, step {i}");
        }
    }
}

#[test]
fn failed_batches_change_nothing() {
    for architecture in ARCHITECTURES {
        let watch = Watch::default();
        let mut pass = session(architecture, watch.clone());
        let ids = some_ids(250);
        let want = logits(&mut session(architecture, Watch::default()), 0, &ids);
        let n_vocab = pass.spec().n_vocab;
        logits(&mut pass, 0, &ids[..100]);
        let refused = [
            continuing(&pass, 3, &ids[..1], true),
            continuing(&pass, 0, &[u32::MAX], true),
            vec![BatchToken { id: 0, seq: 0, pos: 99, output: true }],
            Vec::new(),
        ];
        for batch in refused {
            assert!(pass.forward(&batch).is_err() && pass.forward_greedy(&batch).is_err(), "{architecture}: {batch:?}");
            assert_eq!(pass.n_past(0), 100, "{architecture}");
        }
        // Cancelled before the batch, and in its second micro-batch.
        for n_before in [0, 1] {
            let batch = continuing(&pass, 0, &ids[100..200], true);
            let mut n_traced = 0;
            let mut cancel = |layer: usize, _: &[f32]| {
                n_traced += usize::from(layer == 0);
                if n_traced > n_before {
                    watch.cancel();
                }
            };
            if n_before == 0 {
                watch.cancel();
            }
            assert_eq!(pass.forward_traced(&batch, Some(&mut cancel)).unwrap_err(), ForwardError::Cancelled);
            watch.resume();
            let n_past = pass.n_past(0);
            assert!(n_past == 100 || architecture == "gemma3" && n_past < 100, "{architecture}: {n_past}");
            catch_up(&mut pass, 0, &ids[..100]);
        }
        same(&logits(&mut pass, 0, &ids[100..]), &want[100 * n_vocab..], architecture);
        // A decode step with others in flight.
        let mut id = greedy(&mut pass, 1, 5, 4)[3];
        watch.cancel();
        let batch = continuing(&pass, 1, &[id], true);
        assert_eq!(pass.forward_greedy(&batch), Err(ForwardError::Cancelled));
        watch.resume();
        assert_eq!(pass.n_past(1), 4, "{architecture}");
        let again = greedy(&mut session(architecture, Watch::default()), 1, 5, 10);
        for want in &again[4..] {
            id = greedy(&mut pass, 1, id, 1)[0];
            assert_eq!(id, *want, "{architecture}");
        }
    }
}

#[test]
fn snapshots_continue_in_another_session() {
    for architecture in ARCHITECTURES {
        let ids = some_ids(200);
        let want = logits(&mut session(architecture, Watch::default()), 0, &ids);
        let (mut from, mut to) = (session(architecture, Watch::default()), session(architecture, Watch::default()));
        let n_vocab = from.spec().n_vocab;
        logits(&mut from, 0, &ids[..150]);
        let mut bytes = Vec::new();
        let snapshot = Snapshot::of_sequence(from.cache(), 0).unwrap();
        snapshot.write_header(&mut bytes).unwrap();
        snapshot.write_blocks(from.cache(), 0, &mut bytes).unwrap();
        logits(&mut to, 0, &ids[50..90]);
        let mut bytes = &bytes[..];
        let snapshot = Snapshot::read_header(&mut bytes, to.n_ctx()).unwrap();
        snapshot.restore(to.cache(), 2, &mut bytes).unwrap();
        assert_eq!(to.n_past(2), 150, "{architecture}");
        same(&logits(&mut to, 2, &ids[150..]), &want[150 * n_vocab..], architecture);
    }
}

#[test]
fn profiles_count_steps_and_traces_see_every_layer() {
    let mut pass = session("llama", Watch::default());
    pass.start_profile().unwrap();
    let ids = some_ids(100);
    let mut layers = Vec::new();
    let batch = continuing(&pass, 0, &ids, false);
    let n_embd = pass.spec().n_embd;
    pass.forward_traced(&batch, Some(&mut |layer, x| layers.push((layer, x.len() / n_embd)))).unwrap();
    let n_layer = pass.spec().n_layer();
    let want = [40, 40, 20].iter().flat_map(|&n| (0..n_layer).map(move |layer| (layer, n)));
    assert_eq!(layers, want.collect::<Vec<_>>());
    assert_eq!(pass.take_profile().unwrap().steps.len(), 3);
    assert!(pass.take_profile().is_none());
}

#[test]
fn hidden_rows_come_with_each_kind_of_result() {
    for architecture in ARCHITECTURES {
        let mut pass = session(architecture, Watch::default());
        let (n_layer, n_embd) = (pass.spec().n_layer(), pass.spec().n_embd);
        let ids = some_ids(100);
        let mut batch = continuing(&pass, 0, &ids, true);
        for token in &mut batch {
            token.output = token.pos % 3 == 0;
        }
        let mut traced = vec![Vec::new(); n_layer];
        pass.forward_traced(&batch, Some(&mut |layer, x| traced[layer].extend_from_slice(x))).unwrap();
        let rows = |layer: usize| -> Vec<f32> {
            let rows = traced[layer].chunks(n_embd).zip(&batch).filter(|(_, token)| token.output);
            rows.flat_map(|(row, _)| row).copied().collect()
        };
        pass.reset();
        let plain = pass.forward(&batch).unwrap();
        let (n_outputs, plain) = (plain.n_rows(), plain.as_slice().to_vec());
        assert_eq!(n_outputs, 34);
        let choices: Vec<_> = plain.chunks(plain.len() / n_outputs).map(argmax).collect();
        let before = [n_layer, 1, n_layer];
        for kind in [OutputKind::Logits, OutputKind::Ids, OutputKind::TopK(1), OutputKind::TopK(20), OutputKind::Hidden]
        {
            pass.reset();
            let n_steps = pass.n_steps();
            let (outputs, hidden) = pass.forward_outputs((&batch[..]).into(), kind, &before).unwrap();
            match outputs {
                Outputs::Logits(found) => same(found.as_slice(), &plain, architecture),
                Outputs::Ids(found) => assert_eq!(found, choices, "{architecture}"),
                Outputs::TopK(found) => {
                    assert_eq!(found.iter().map(|list| list[0].0).collect::<Vec<_>>(), choices, "{architecture}");
                }
                Outputs::Hidden(found) => assert_eq!(found.len(), n_outputs * n_embd, "{architecture}"),
            }
            for (i, &layer) in before.iter().enumerate() {
                same(hidden.of_layer(i), &rows(layer - 1), &format!("{architecture}, before layer {layer}"));
            }
            assert_eq!(pass.n_steps() - n_steps, 3, "{architecture}: hidden rows take no steps of their own");
        }
        pass.reset();
        let error = pass.forward_outputs((&batch[..]).into(), OutputKind::Ids, &[0, n_layer + 2]).unwrap_err();
        assert_eq!(error, ForwardError::LayerOutOfRange { layer: n_layer + 2, n_layer });
        assert_eq!(pass.n_past(0), 0, "{architecture}");
    }
}

/// Whether a window has pages of its own depends on the size of micro-batches; results do not.
#[test]
fn windows_with_and_without_pages_of_their_own_give_the_same_results() {
    let metadata = || {
        let mut metadata = ModelShape::custom("llama").unwrap().metadata();
        metadata.set("llama.attention.sliding_window", 40_u32);
        metadata
    };
    let ids = some_ids(250);
    let logits_of = |n_ubatch| {
        let spec = ModelSpec::from_metadata(&metadata()).unwrap();
        let options = SessionOptions { n_ctx: 4 * PAGE, n_ubatch, ..Default::default() };
        let mut pass = NullExecutor::session(spec, &options, Watch::default());
        let n_groups = pass.cache_groups().groups().len();
        (n_groups, ids.chunks(100).flat_map(|chunk| logits(&mut pass, 0, chunk)).collect::<Vec<_>>())
    };
    let ((all, want), (windows, found)) = (logits_of(512), logits_of(16));
    assert_eq!((all, windows), (1, 2));
    same(&found, &want, "micro-batches of 16");
}

#[test]
fn encoders_evaluate_each_sequence_in_one_step() {
    // `NullExecutor` returns the logits of 16 output tokens in a step.
    let mut pass = session("llama-embed", Watch::default());
    let token = |seq, pos| BatchToken { id: 7, seq, pos, output: true };
    let divided = [token(0, 0), token(0, 1), token(1, 0), token(0, 2)];
    assert_eq!(pass.forward(&divided).unwrap_err(), ForwardError::NotFromStart { seq: 0, n_past: 2 });
    let gap = [token(0, 0), token(1, 3)];
    assert_eq!(pass.forward(&gap).unwrap_err(), ForwardError::PositionGap { seq: 1, pos: 3, expected: 0 });
    let too_many: Vec<_> = [token(1, 0)].into_iter().chain((0..17).map(|pos| token(0, pos))).collect();
    let refused = ForwardError::TooManySequenceOutputs { seq: 0, n_outputs: 17, max_outputs: 16 };
    assert_eq!(pass.forward(&too_many).unwrap_err(), refused);
    assert_eq!((pass.n_past(0), pass.n_past(1), pass.n_steps()), (0, 0, 0));
    // Sequences are not divided, but steps are, between them.
    let two: Vec<_> = (0..2).flat_map(|seq| (0..10).map(move |pos| token(seq, pos))).collect();
    assert_eq!(pass.forward(&two).map(|logits| logits.n_rows()), Ok(20));
    assert_eq!(pass.n_steps(), 2);
    // Hidden states do not have that limit.
    pass.reset();
    assert_eq!(pass.forward_hidden(&too_many).map(|rows| rows.len()), Ok(18 * pass.spec().n_embd));
}

#[test]
fn sequences_of_encoders_are_neither_saved_nor_restored() {
    let mut pass = session("bert", Watch::default());
    // There is nothing to save of an empty sequence.
    let empty = Snapshot::of_sequence(&mut pass, 0).unwrap();
    assert_eq!(empty.n_tokens(), 0);
    let tokens = continuing(&pass, 0, &some_ids(70), true);
    pass.forward_hidden(&tokens).unwrap();
    let refused = Snapshot::of_sequence(&mut pass, 0).unwrap_err();
    assert!(matches!(refused, SnapshotError::NotCausal), "{refused}");
    assert!(refused.to_string().contains("evaluate the text again"), "{refused}");
    let kept = SequenceExtent { n_tokens: 70, n_dropped: vec![0], ..Default::default() };
    assert!(matches!(pass.allocate(1, &kept), Err(SnapshotError::NotCausal)));
    assert_eq!((pass.n_past(0), pass.n_past(1)), (70, 0));
    // A sequence that was cut back, or that shares another's tokens, cannot go on; from its start it can.
    assert_eq!((pass.rewind(0, 30), pass.share_prefix(0, 1, 20)), (30, Ok(20)));
    for (seq, n_past) in [(0, 30), (1, 20)] {
        let more = continuing(&pass, seq, &[1], true);
        assert_eq!(pass.forward_hidden(&more), Err(ForwardError::NotFromStart { seq, n_past }));
        assert_eq!(pass.rewind(seq, 0), 0);
    }
    pass.forward_hidden(&tokens).unwrap();
}

/// A session with a prediction head, which reads a state beside each token.
fn head_session() -> Session<NullExecutor> {
    let mut metadata = ModelShape::custom("qwen35").unwrap().metadata();
    metadata.set("qwen35.nextn_predict_layers", 1_u32);
    let head = ModelSpec::heads_from_metadata(&metadata).unwrap().remove(0);
    let options = SessionOptions { n_ctx: 4 * PAGE, n_seq: 2, n_ubatch: 40, ..Default::default() };
    NullExecutor::session(head, &options, Watch::default())
}

#[test]
fn states_belong_to_the_tokens_of_each_step() {
    let mut pass = head_session();
    let n_embd = pass.spec().n_embd;
    let ids = some_ids(90);
    let states: Vec<f32> = (0..ids.len() * n_embd).map(|i| i as f32).collect();
    let before = [pass.spec().n_layer() + 1];
    let mut evaluate = |sizes: &[usize], states: &[f32]| {
        pass.reset();
        let mut rows = Vec::new();
        let mut first = 0;
        for &n in sizes {
            let tokens = continuing(&pass, 0, &ids[first..first + n], false);
            let states = &states[first * n_embd..(first + n) * n_embd];
            let batch = Batch { states, ..Batch::from(&tokens[..]) };
            let request = HiddenRequest { before: &before, tokens: TracedTokens::All };
            let (_, hidden) = pass.forward_with_hidden(batch, OutputKind::Ids, request).unwrap();
            rows.extend_from_slice(hidden.of_layer(0));
            first += n;
        }
        rows
    };
    let want = evaluate(&[90], &states);
    assert_eq!(want.len(), states.len());
    for sizes in [&[1, 39, 41, 9][..], &[50, 40]] {
        same(&evaluate(sizes, &states), &want, "a division");
    }
    // Another state changes the rows from its token on, and no others.
    let mut other = states.clone();
    other[55 * n_embd] += 1.0;
    let found = evaluate(&[90], &other);
    same(&found[..55 * n_embd], &want[..55 * n_embd], "before the state");
    assert!(found[55 * n_embd..].iter().zip(&want[55 * n_embd..]).all(|(a, b)| a != b));
}

#[test]
fn states_are_required_where_they_are_read_and_refused_elsewhere() {
    let mut pass = head_session();
    let n_embd = pass.spec().n_embd;
    let tokens = continuing(&pass, 0, &some_ids(3), true);
    let states = vec![0.0; 3 * n_embd];
    let n_steps = pass.n_steps();
    for n in [0, n_embd, 3 * n_embd - 1] {
        let batch = Batch { states: &states[..n], ..Batch::from(&tokens[..]) };
        let error = pass.forward_outputs(batch, OutputKind::Logits, &[]).unwrap_err();
        assert_eq!(error, ForwardError::WrongStates { found: n, expected: 3 * n_embd });
    }
    // No step without states is submitted ahead either.
    let error = pass.forward_greedy(&tokens[..1]).unwrap_err();
    assert_eq!(error, ForwardError::WrongStates { found: 0, expected: n_embd });
    let mut plain = session("llama", Watch::default());
    let batch = Batch { states: &states, ..Batch::from(&tokens[..]) };
    let error = plain.forward_outputs(batch, OutputKind::Logits, &[]).unwrap_err();
    assert_eq!(error, ForwardError::WrongStates { found: states.len(), expected: 0 });
    assert_eq!((pass.n_past(0), plain.n_past(0), pass.n_steps() - n_steps, plain.n_steps()), (0, 0, 0, 0));
}
