//! Assistants, which attend to their target's keys and values: their drafts and logits are llama.cpp's on each backend, also of
//! several sequences at once, with windows that have moved on, after drafts were taken or refused, and with steps in flight.

use metal_attention::backends::BackendPass;
use metal_attention::gguf::GgufFile;
use metal_attention::speculation::{
    AssistantDrafter, DraftFile, DraftRequest, Drafter, DrafterKind, Evaluated, Speculation, SpeculativePass,
};
use metal_attention::{
    AssistantToken, BatchToken, CacheType, Device, EngineOptions, ForwardError, ForwardPass, HiddenRequest, Model,
    ModelOptions, OutputKind, TracedTokens,
};
use metal_attention_testing::models;
use serde::Deserialize;

/// Largest NMSE of a draft's logits.
const LIMIT: f64 = 1e-6;

/// What llama.cpp drafts with an assistant.
#[derive(Deserialize)]
struct Case {
    /// The target reads all but the last one.
    tokens: Vec<u32>,
    drafts: Vec<u32>,
    /// The logits from which each draft is taken.
    logits: Vec<Vec<f32>>,
}

#[derive(Deserialize)]
struct Cases {
    cases: Vec<Case>,
}

fn cases() -> Vec<Case> {
    metal_attention_testing::reference::read::<Cases>("assistants").cases
}

/// The target, and the file of its assistant.
fn open() -> (Model, GgufFile) {
    let [target, assistant] = ["gemma4.gguf", "gemma4-assistant.gguf"].map(models::with_drafters);
    let target = Model::from_gguf(GgufFile::from_bytes(&target).unwrap(), &ModelOptions::default()).unwrap();
    (target, GgufFile::from_bytes(&assistant).unwrap())
}

fn options(device: Device) -> EngineOptions {
    let (n_ctx, n_ubatch) = (Some(512), Some(8));
    EngineOptions { device, n_ctx, n_ubatch, n_seq: 3, cache_type: CacheType::F32, exact: true, ..Default::default() }
}

/// A target with its drafter.
struct Pair {
    target: Box<dyn BackendPass>,
    drafter: AssistantDrafter,
}

impl Pair {
    fn new(options: &EngineOptions) -> Self {
        let (model, file) = open();
        Self::over(&model, &file, model.backend(options).unwrap(), options)
    }

    fn over(model: &Model, file: &GgufFile, mut target: Box<dyn BackendPass>, options: &EngineOptions) -> Self {
        let drafter = AssistantDrafter::attach(model, file, &mut *target, options).unwrap();
        Self { target, drafter }
    }

    fn on_the_cpu() -> Self {
        Self::new(&options(Device::Cpu))
    }

    /// Evaluates `tokens`, which may be of several sequences, with the target in batches of at most `n`, and lets the drafter observe
    /// each batch.
    fn evaluate(&mut self, tokens: &[BatchToken], n: usize) {
        let (before, n_embd) = (self.drafter.reads_hidden().to_vec(), self.target.spec().n_embd);
        for batch in tokens.chunks(n) {
            let request = HiddenRequest { before: &before, tokens: TracedTokens::All };
            let (_, rows) = self.target.forward_with_hidden(batch.into(), OutputKind::Hidden, request).unwrap();
            let mut start = 0;
            for run in batch.chunk_by(|a, b| a.seq == b.seq) {
                let ids: Vec<_> = run.iter().map(|token| token.id).collect();
                let rows = &rows.of_layer(0)[start * n_embd..][..run.len() * n_embd];
                let evaluated = Evaluated { seq: run[0].seq, first: run[0].pos, ids: &ids, hidden: &[rows] };
                self.drafter.observe(evaluated).unwrap();
                start += run.len();
            }
        }
    }

    /// Evaluates the tokens of `ids` from position `first` on but the last one, in sequence `seq`.
    fn evaluate_from(&mut self, seq: usize, first: usize, ids: &[u32], n: usize) {
        let evaluated = ids[..ids.len() - 1].iter().enumerate().skip(first);
        let tokens: Vec<_> = evaluated.map(|(pos, &id)| BatchToken { id, seq, pos, output: false }).collect();
        self.evaluate(&tokens, n);
    }

    /// Drafts and their logits. Nothing in the KV cache changes.
    fn propose(&mut self, requests: &[DraftRequest<'_>]) -> (Vec<Vec<u32>>, Vec<Vec<Vec<f32>>>) {
        let mut logits = vec![Vec::new(); requests.len()];
        let mut keep = |request: usize, draft: usize, row: &[f32]| {
            assert_eq!(logits[request].len(), draft);
            logits[request].push(row.to_vec());
        };
        let (n_past, pages) = (self.target.n_past(0), self.target.cache_pages());
        let drafts = self.drafter.propose_beside(&mut *self.target, requests, Some(&mut keep)).unwrap();
        let drafts: Vec<_> = drafts.into_iter().map(|draft| draft.ids).collect();
        assert_eq!((self.target.n_past(0), self.target.cache_pages()), (n_past, pages));
        // Ids alone, as they are wanted in generation.
        let ids = self.drafter.propose_beside(&mut *self.target, requests, None).unwrap();
        assert!(ids.iter().map(|draft| &draft.ids).eq(&drafts), "{ids:?} without logits, {drafts:?} with");
        (drafts, logits)
    }
}

fn nmse(got: &[f32], want: &[f32]) -> f64 {
    assert_eq!(got.len(), want.len());
    let error: f64 = want.iter().zip(got).map(|(w, g)| f64::from(w - g).powi(2)).sum();
    error / want.iter().map(|&w| f64::from(w).powi(2)).sum::<f64>()
}

fn request(seq: usize, case: &Case) -> DraftRequest<'_> {
    DraftRequest { seq, ids: &case.tokens, prediction: &[], n: 4 }
}

fn after(seq: usize, ids: &[u32], n: usize) -> DraftRequest<'_> {
    DraftRequest { seq, ids, prediction: &[], n }
}

fn check_case(case: &Case, drafts: &[u32], logits: &[Vec<f32>]) {
    let n = case.tokens.len();
    assert_eq!(drafts, case.drafts, "{n} tokens");
    assert_eq!(logits.len(), case.logits.len());
    for (i, (got, want)) in logits.iter().zip(&case.logits).enumerate() {
        let error = nmse(got, want);
        assert!(error <= LIMIT, "{n} tokens, draft {i}: NMSE {error:e}");
    }
}

/// All cases: one after the other, together with other chunks, and with steps in flight.
fn check(mut pair: Pair) {
    let cases = cases();
    for case in &cases {
        pair.target.reset();
        pair.evaluate_from(0, 0, &case.tokens, usize::MAX);
        let (drafts, logits) = pair.propose(&[request(0, case)]);
        check_case(case, &drafts[0], &logits[0]);
    }
    pair.target.reset();
    // Batches end within prompts, and have tokens of several sequences.
    let mut tokens = Vec::new();
    for (seq, case) in cases.iter().enumerate() {
        let evaluated = case.tokens[..case.tokens.len() - 1].iter().enumerate();
        tokens.extend(evaluated.map(|(pos, &id)| BatchToken { id, seq, pos, output: false }));
    }
    pair.evaluate(&tokens, 5);
    let requests: Vec<_> = cases.iter().enumerate().map(|(seq, case)| request(seq, case)).collect();
    let (drafts, logits) = pair.propose(&requests);
    for (i, case) in cases.iter().enumerate() {
        check_case(case, &drafts[i], &logits[i]);
    }
    steps_in_flight(pair);
}

/// Greedy steps that were submitted ahead write to the pages behind a sequence, and move its windows on.
fn steps_in_flight(mut pair: Pair) {
    pair.target.reset();
    let ids = text(70);
    pair.evaluate_from(0, 0, &ids, 50);
    let n_embd = pair.target.spec().n_embd;
    let states: Vec<f32> = (0..n_embd).map(|i| (i % 7) as f32 - 3.0).collect();
    let token = [AssistantToken { id: 9, seq: 0 }];
    let mut id = ids[69];
    for pos in 69..140 {
        let ahead = pair.target.forward_assistant(&token, &states, true).unwrap();
        // Steps behind this one stay in flight.
        id = pair.target.forward_greedy(&[BatchToken { id, seq: 0, pos, output: true }]).unwrap()[0];
        let in_flight = pair.target.forward_assistant(&token, &states, true).unwrap();
        assert_ne!(ahead.logits, in_flight.logits, "the sequence has a token more");
        // As if nothing had been in flight.
        let again = pair.target.forward_assistant(&token, &states, true).unwrap();
        assert_eq!(in_flight, again, "{pos} tokens");
    }
}

#[test]
fn drafts_are_llama_cpps_on_the_cpu() {
    check(Pair::on_the_cpu());
}

#[cfg(feature = "wgpu")]
#[test]
fn drafts_are_llama_cpps_through_wgpu() {
    use metal_attention::WgpuExecutor;

    let Some(gpu) = crate::wgpu::device::gpu() else { return };
    let (model, file) = open();
    let options = options(Device::Wgpu);
    let session = options.session_options(options.n_ctx_of(&model), 8);
    let target = WgpuExecutor::session(gpu, model.loaded(), &session).unwrap();
    check(Pair::over(&model, &file, Box::new(target), &options));
}

#[cfg(feature = "cuda")]
#[test]
fn drafts_are_llama_cpps_through_cuda() {
    if !crate::cuda::has_cuda() {
        return;
    }
    check(Pair::new(&options(Device::Cuda(0))));
}

/// Pseudo-random token ids.
fn text(n: usize) -> Vec<u32> {
    (0..n as u32).map(|i| 3 + (i * i * 31 + i * 7) % 300).collect()
}

/// The drafts after `ids` of a drafter that has seen nothing else, with pages for all positions.
fn fresh(ids: &[u32], n: usize) -> (Vec<Vec<u32>>, Vec<Vec<Vec<f32>>>) {
    let mut pair = Pair::new(&EngineOptions { n_ubatch: Some(512), ..options(Device::Cpu) });
    pair.evaluate_from(0, 0, ids, usize::MAX);
    pair.propose(&[after(0, ids, n)])
}

/// Windows drop pages, which are given to other positions. What the assistant attends to is still there, bit for bit.
#[test]
fn windows_that_have_moved_on_do_not_change_drafts() {
    let ids = text(400);
    let mut pair = Pair::on_the_cpu();
    let mut first = 0;
    for n in [63, 64, 65, 128, 130, 250, 399, 400] {
        let ids = &ids[..n];
        pair.evaluate_from(1, first, ids, 11);
        first = n - 1;
        let (drafts, logits) = pair.propose(&[after(1, ids, 3)]);
        let want = fresh(ids, 3);
        assert!((drafts, logits) == want, "{n} tokens");
    }
}

/// The target takes some drafts and refuses others. The next drafts are those of the whole sequence, bit for bit.
#[test]
fn drafts_after_verified_ones_are_those_of_the_whole_sequence() {
    let mut pair = Pair::on_the_cpu();
    let mut ids = cases()[1].tokens.clone();
    pair.evaluate_from(1, 0, &ids, 7);
    for n_taken in [1, 0, 3, 2, 3, 3, 0, 1] {
        let (drafts, logits) = pair.propose(&[after(1, &ids, 3)]);
        let want = fresh(&ids, 3);
        assert!((&drafts, &logits) == (&want.0, &want.1), "{} tokens", ids.len());
        // The target evaluates the last token and all drafts, of which some hold; then another token follows.
        let first = ids.len() - 1;
        let verified = ids[first..].iter().chain(&drafts[0]).copied();
        let token = |(i, id)| BatchToken { id, seq: 1, pos: first + i, output: true };
        let tokens: Vec<_> = verified.enumerate().map(token).collect();
        let (before, request) = (pair.drafter.reads_hidden().to_vec(), TracedTokens::All);
        let request = HiddenRequest { before: &before, tokens: request };
        let (_, rows) = pair.target.forward_with_hidden(tokens[..].into(), OutputKind::Hidden, request).unwrap();
        ids.extend_from_slice(&drafts[0][..n_taken]);
        assert_eq!(pair.target.rewind(1, ids.len()), ids.len());
        let held = rows.rows_of_layer(0, 0..1 + n_taken);
        pair.drafter.observe(Evaluated { seq: 1, first, ids: &ids[first..], hidden: &[held] }).unwrap();
        ids.push((drafts[0].get(n_taken).copied().unwrap_or(5) + 1) % 300);
    }
}

/// A sequence that is cut back, replaced, shared or not observed gets no wrong drafts, and others are not disturbed.
#[test]
fn sequences_may_be_cut_back_replaced_or_shared() {
    let cases = cases();
    let none = (vec![Vec::<u32>::new()], vec![Vec::<Vec<f32>>::new()]);
    let mut pair = Pair::on_the_cpu();
    let (short, long) = (&cases[0], &cases[2]);
    assert_eq!(pair.propose(&[request(0, long)]), none, "the target has evaluated nothing");
    pair.evaluate_from(0, 0, &long.tokens, 9);
    pair.evaluate_from(2, 0, &short.tokens, 9);
    // Cut back without a word: the state is that of a later position.
    assert_eq!(pair.target.rewind(0, 12), 12);
    assert_eq!(pair.propose(&[after(0, &long.tokens[..13], 3)]), none);
    let cut: Vec<u32> = long.tokens[..12].iter().copied().chain([7, 9, 250]).collect();
    pair.evaluate_from(0, 12, &cut, 9);
    let (drafts, logits) = pair.propose(&[after(0, &cut, 3), request(2, short)]);
    let want = fresh(&cut, 3);
    assert!((&drafts[0], &logits[0]) == (&want.0[0], &want.1[0]), "{drafts:?} for {:?}", want.0);
    check_case(short, &drafts[1], &logits[1]);
    // A copy of the beginning, which then goes on by itself: the pages are shared.
    let shared = pair.target.share_prefix(0, 1, 10).unwrap();
    let ids = [&cut[..shared], &[3, 5, 8, 13]].concat();
    assert_eq!(pair.propose(&[after(1, &ids, 3)]), none, "not observed");
    pair.evaluate_from(1, shared, &ids, 9);
    let found = pair.propose(&[after(1, &ids, 3), after(0, &cut, 2)]);
    let own = fresh(&ids, 3);
    assert!((&found.0[0], &found.1[0]) == (&own.0[0], &own.1[0]));
    assert!(found.1[1][..] == want.1[0][..2]);
    pair.drafter.forget(1);
    assert_eq!(pair.propose(&[after(1, &ids, 3)]), none);
    // Up to the end of the context.
    let filled = text(512);
    pair.target.rewind(1, 0);
    pair.evaluate_from(1, 0, &filled, 50);
    assert_eq!(pair.propose(&[after(1, &filled, 2)]), fresh(&filled, 2));
    assert_eq!(pair.propose(&[after(1, &filled, 0)]), none, "none are requested");
}

#[test]
fn drafts_that_are_not_possible_are_refused() {
    let (model, file) = open();
    let n_embd = model.spec().n_embd;
    let mut target = model.backend(&options(Device::Cpu)).unwrap();
    let states = vec![0.5; 2 * n_embd];
    let token = |id, seq| AssistantToken { id, seq };
    let draft = |target: &mut dyn ForwardPass, tokens: &[AssistantToken], n: usize| {
        target.forward_assistant(tokens, &states[..n * n_embd], false)
    };
    let not_possible = |outcome| match outcome {
        Err(ForwardError::NoAssistantDraft { why }) => why,
        other => panic!("{other:?}"),
    };
    target.forward(&[BatchToken { id: 3, seq: 0, pos: 0, output: true }]).unwrap();
    assert_eq!(not_possible(draft(&mut *target, &[token(4, 0)], 1)), "none is attached to the model");
    let before = target.memory_use();
    AssistantDrafter::attach(&model, &file, &mut *target, &options(Device::Cpu)).unwrap();
    let with = target.memory_use();
    assert_eq!(before.kv_cache, with.kv_cache, "it has no keys of its own");
    assert!(with.weights > before.weights);
    assert_eq!(draft(&mut *target, &[token(4, 0)], 1).unwrap().ids.len(), 1);
    assert!(not_possible(draft(&mut *target, &[token(4, 1)], 1)).contains("evaluated nothing"));
    assert!(not_possible(draft(&mut *target, &[token(4, 0), token(5, 0)], 2)).contains("twice"));
    let wrong = ForwardError::WrongStates { found: 2 * n_embd, expected: n_embd };
    assert_eq!(draft(&mut *target, &[token(4, 0)], 2).unwrap_err(), wrong);
    let wrong = ForwardError::TokenOutOfRange { id: 320, n_vocab: 320 };
    assert_eq!(draft(&mut *target, &[token(320, 0)], 1).unwrap_err(), wrong);
    let wrong = ForwardError::SequenceOutOfRange { seq: 3, n_seq: 3 };
    assert_eq!(draft(&mut *target, &[token(4, 3)], 1).unwrap_err(), wrong);
    let ids = text(512);
    let tokens: Vec<_> =
        ids.iter().zip(1..512).map(|(&id, pos)| BatchToken { id, seq: 0, pos, output: false }).collect();
    target.forward(&tokens).unwrap();
    assert!(matches!(draft(&mut *target, &[token(4, 0)], 1), Err(ForwardError::ContextFull { n_past: 512, .. })));
    assert_eq!(draft(&mut *target, &[], 0).unwrap().ids, [] as [u32; 0]);
}

#[test]
fn an_assistant_is_for_its_own_target() {
    let (model, file) = open();
    let mut other = Model::built_in().unwrap().backend(&options(Device::Cpu)).unwrap();
    let refused = AssistantDrafter::attach(&Model::built_in().unwrap(), &file, &mut *other, &options(Device::Cpu));
    let why = refused.err().unwrap().to_string();
    assert!(why.starts_with("general.architecture = llama is not usable: the assistant drafts for Gemma 4"), "{why}");
    // A file that is no assistant.
    let mut target = model.backend(&options(Device::Cpu)).unwrap();
    let refused = AssistantDrafter::attach(&model, model.gguf(), &mut *target, &options(Device::Cpu)).err().unwrap();
    assert!(refused.to_string().contains("supported are: gemma4-assistant"), "{refused}");
    // Alone it is no model.
    let alone = Model::from_gguf(file, &ModelOptions::default()).err().unwrap();
    assert!(alone.to_string().contains("which is no model by itself"), "{alone}");
}

#[test]
fn a_draft_file_may_have_an_assistant() {
    let (model, file) = open();
    let draft = DraftFile::from_gguf(file, &ModelOptions::default()).unwrap();
    assert!(draft.model().is_none());
    let options = options(Device::Cpu);
    let with = |drafter| {
        let speculation = Speculation { drafter, ..Default::default() };
        SpeculativePass::with_draft_file(&model, &draft, &options, speculation, None)
    };
    // It is Gemma 4's multi-token prediction.
    for kind in [DrafterKind::Auto, DrafterKind::Mtp, DrafterKind::Gemma4Assistant] {
        assert_eq!(with(kind).unwrap().drafter.unwrap().name(), "gemma4-assistant");
    }
    assert!(with(DrafterKind::Off).unwrap().drafter.is_none());
    assert!(with(DrafterKind::Ngram).is_err() && with(DrafterKind::Eagle3).is_err());
    // It has no device of its own.
    let mut pass = model.backend(&options).unwrap();
    assert!(draft.drafter(&model, &mut *pass, &options, Some(&Device::Cpu)).is_err());
}
