//! Drafts from the texts that answers are likely to repeat, and the number of drafts that a request allows. Texts depend on
//! neither.

use std::sync::Arc;
use std::time::Duration;

use metal_attention::scheduler::{Client, Request, Scheduler, SchedulerOptions, SchedulerParts, SubmitError};
use metal_attention::speculation::{DraftDepth, Drafter, NgramDrafter};
use metal_attention::{EngineOptions, Model};

use super::support::null::reference;
use super::support::{Answer, Controls, Gate, engine, greedy, read};

/// Drafts of a sequence in a step.
const MAX: usize = 8;

/// A scheduler with one slot whose time slice is zero. While the gate is closed no step ends.
fn start(drafter: Option<NgramDrafter>, n_seq: usize) -> (Model, Scheduler, Arc<Gate>) {
    let model = Model::built_in().unwrap();
    let engine = EngineOptions { n_seq, n_cache: Some(256 * n_seq), ..engine() };
    let controls = Controls::default();
    let pass = controls.null_pass(&model, &engine);
    let draft_depth = DraftDepth::Fixed(MAX);
    let options = SchedulerOptions { n_parallel: 1, time_slice: Duration::ZERO, draft_depth, ..Default::default() };
    let drafter = drafter.map(|drafter| Box::new(drafter) as Box<dyn Drafter>);
    let parts = SchedulerParts { drafter, ..Default::default() };
    let scheduler = Scheduler::start_with(pass, Arc::new(model.clone()), options, parts).unwrap();
    (model, scheduler, controls.gate)
}

/// A request for 100 tokens. Neither its prompt nor its answer repeats itself.
fn request(i: usize) -> Request {
    let prompt = (0..30).map(|at| ((at * at * 31 + at * 7 + i * 17) % 500 + 3) as u32).collect();
    Request { client: Client::Key(i), ignore_eos: true, ..greedy(prompt, 100) }
}

fn counts(answer: &Answer) -> (usize, usize) {
    (answer.usage.drafted_tokens, answer.usage.accepted_tokens)
}

#[test]
fn most_tokens_of_an_answer_come_from_its_prediction() {
    let (model, scheduler, _) = start(Some(NgramDrafter::default()), 2);
    assert_eq!(scheduler.drafter(), Some("ngram"));
    let want = reference(&model, &request(0)).0;
    let edited = [&want[..40], &[3, 4, 5], &want[43..]].concat();
    let after_others = [&[5, 6, 7, 8], &want[..]].concat();
    let much_longer = [&want[..], &vec![9; 5000]].concat();
    let other: Vec<u32> = (3..103).collect();
    // Steps with 8 drafts give 9 tokens. Where the prediction differs, the rest of a step is lost, and two tokens come without
    // drafts until they show the place where it goes on. Without the prediction's beginning two tokens show it, too.
    for (prediction, drafted, accepted) in [
        (&[][..], 0..=0, 0..=0),
        (&want, 88..=88, 88..=88),
        (&edited, 85..=110, 80..=88),
        (&after_others, 85..=110, 80..=88),
        (&much_longer, 88..=88, 88..=88),
        (&want[50..], 40..=130, 38..=44),
        (&other, 1..=200, 0..=2),
    ] {
        let answer = read(scheduler.submit(Request { prediction: prediction.into(), ..request(0) }).unwrap());
        assert_eq!(answer.ids, want);
        let counts = counts(&answer);
        assert!(drafted.contains(&counts.0) && accepted.contains(&counts.1), "{counts:?} after {prediction:?}");
    }
    let n_vocab = model.spec().n_vocab;
    let refused = scheduler.submit(Request { prediction: [1, n_vocab as u32].into(), ..request(0) }).unwrap_err();
    assert_eq!(refused, SubmitError::TokenOutOfRange { id: n_vocab as u32, n_vocab });
}

/// With one slot three sequences alternate: their tables follow them.
#[test]
fn predictions_outlive_preemptions() {
    let (model, scheduler, gate) = start(Some(NgramDrafter::default()), 3);
    let want = [0, 1, 2].map(|i| reference(&model, &request(i)).0);
    let submit = |i: usize| scheduler.submit(Request { prediction: want[i][..].into(), ..request(i) }).unwrap();
    let held = gate.close();
    let events = [0, 1, 2].map(submit);
    drop(held);
    let answers = events.map(read);
    for (answer, want) in answers.iter().zip(&want) {
        assert_eq!(&answer.ids, want);
        let (drafted, accepted) = counts(answer);
        assert!(accepted >= 80 && drafted <= 100, "{accepted} of {drafted}");
    }
    let metrics = scheduler.metrics();
    assert!(metrics.preemptions >= 8, "{metrics:?}");
    let total = answers.iter().map(|answer| answer.usage.accepted_tokens as u64).sum::<u64>();
    assert_eq!((metrics.accepted_tokens, metrics.generated_tokens), (total, 300));
}

#[test]
fn requests_bound_their_drafts() {
    let (model, scheduler, _) = start(Some(NgramDrafter::default()), 2);
    let want = reference(&model, &request(0)).0;
    // A step gives one token more than it has drafts. From the second request on the prompt is cached up to its last token, so
    // that the first step has drafts, too.
    for (max_drafts, n) in [(Some(0), 0), (Some(1), 50), (Some(2), 66), (Some(99), 88), (None, 88)] {
        let prediction = want[..].into();
        let answer = read(scheduler.submit(Request { prediction, max_drafts, ..request(0) }).unwrap());
        assert_eq!((&answer.ids, counts(&answer)), (&want, (n, n)), "{max_drafts:?}");
    }
    // A scheduler without a drafter makes none.
    let (_, scheduler, _) = start(None, 2);
    assert_eq!(scheduler.drafter(), None);
    let prediction = want[..].into();
    let answer = read(scheduler.submit(Request { prediction, max_drafts: Some(8), ..request(0) }).unwrap());
    assert_eq!((answer.ids, answer.usage.drafted_tokens), (want, 0));
}
