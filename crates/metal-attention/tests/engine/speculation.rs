//! Texts with and without drafts are equal: for every kind of layer, greedily and with seeds, alone and with others in a
//! scheduler. On the CPU, where the bits of a token do not depend on its batch.

use std::ops::ControlFlow;
use std::sync::Arc;

use metal_attention::gguf::GgufFile;
use metal_attention::sampling::SamplerOptions;
use metal_attention::scheduler::{Request, Scheduler, SchedulerOptions, SchedulerParts};
use metal_attention::speculation::{
    AssistantDrafter, Draft, DraftDepth, DraftModel, DraftModelOptions, DraftRequest, Drafter, DrafterKind,
    NgramDrafter, Speculation, SpeculativePass,
};
use metal_attention::{
    Device, EngineOptions, ForwardError, GenerateOptions, Generator, MemoryUse, Model, ModelOptions,
};
use metal_attention_testing::models::{draft_models, more_architectures, with_drafters, with_heads};

use crate::scheduler::support::read;

/// Models with each kind of layer: attention with and without windows, latent attention, experts, and each recurrence.
const MODELS: [&str; 16] = [
    "gemma3.gguf",
    "gemma4.gguf",
    "deepseek2.gguf",
    "qwen3moe.gguf",
    "lfm2.gguf",
    "lfm2moe.gguf",
    "qwen35.gguf",
    "qwen3next.gguf",
    "mamba.gguf",
    "mamba2.gguf",
    "jamba.gguf",
    "granitehybrid.gguf",
    "nemotron_h.gguf",
    "falcon-h1.gguf",
    "rwkv6.gguf",
    "rwkv7.gguf",
];

/// Prompts of each model. With the built-in model there are more than a thousand texts.
const N_PROMPTS: usize = 60;

/// Prompts of each drafter in a file of its own.
const N_TEXTS: usize = 1040;

/// Tokens of an answer.
const N: usize = 20;

/// Pseudo-random numbers.
struct Numbers(u64);

impl Numbers {
    fn below(&mut self, n: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 16) as usize % n
    }
}

/// Proposes what comes, since it knows the texts, with a wrong token now and then.
struct Oracle {
    texts: Arc<Vec<Vec<u32>>>,
    numbers: Numbers,
    n_vocab: usize,
}

impl Drafter for Oracle {
    fn name(&self) -> &'static str {
        "oracle"
    }

    fn propose(&mut self, requests: &[DraftRequest<'_>]) -> Result<Vec<Draft>, ForwardError> {
        let mut propose = |request: &DraftRequest<'_>| {
            let text = self.texts.iter().find(|text| text.starts_with(request.ids));
            let n = self.numbers.below(request.n + 1);
            let mut ids: Vec<u32> = text.map_or(&[][..], |text| &text[request.ids.len()..]).to_vec();
            ids.truncate(n);
            for id in &mut ids {
                if self.numbers.below(5) == 0 {
                    *id = self.numbers.below(self.n_vocab) as u32;
                }
            }
            Draft { confidence: vec![1.0; ids.len()], ids }
        };
        Ok(requests.iter().map(&mut propose).collect())
    }

    fn memory_use(&self) -> MemoryUse {
        MemoryUse::default()
    }
}

/// A prompt that repeats itself in part, and how it is continued: every other one greedily.
pub(crate) struct Task {
    pub(crate) prompt: Vec<u32>,
    pub(crate) sampling: SamplerOptions,
    pub(crate) min_tokens: usize,
}

pub(crate) fn tasks(n: usize, n_vocab: usize) -> Vec<Task> {
    let mut numbers = Numbers(0x5DEE_CE66_D1CE_4E5B);
    let mut task = |i: usize| {
        let part: Vec<u32> = (0..2 + numbers.below(40)).map(|_| (3 + numbers.below(n_vocab - 3)) as u32).collect();
        let sampling = match i % 2 {
            0 => SamplerOptions::greedy(),
            _ => SamplerOptions { seed: Some(i as u64), temperature: 0.7, repeat_penalty: 1.1, ..Default::default() },
        };
        Task { prompt: [&part[..], &part[..=numbers.below(part.len())]].concat(), sampling, min_tokens: i % 7 }
    };
    (0..n).map(&mut task).collect()
}

fn engine(n_seq: usize) -> EngineOptions {
    EngineOptions { device: Device::Cpu, n_ctx: Some(160), n_seq, n_threads: Some(1), ..Default::default() }
}

pub(crate) fn open(bytes: &[u8]) -> Model {
    Model::from_gguf(GgufFile::from_bytes(bytes).unwrap(), &ModelOptions::default()).unwrap()
}

fn models() -> impl Iterator<Item = (&'static str, Model)> {
    let read = |name: &'static str| (name, open(&more_architectures()[name]));
    MODELS.into_iter().map(read).chain([("the built-in model", Model::built_in().unwrap())])
}

/// The prompt and its continuation of `n` tokens, and the numbers of drafts that were evaluated and that held.
pub(crate) fn text(generator: &mut Generator, task: &Task, n: usize) -> (Vec<u32>, usize, usize) {
    generator.set_sampling(task.sampling.clone()).unwrap();
    generator.prompt(&task.prompt, |_, _| ControlFlow::Continue(())).unwrap();
    let options = GenerateOptions { n_predict: Some(n), min_tokens: task.min_tokens, ..Default::default() };
    generator.generate(options).try_for_each(|token| token.map(drop)).unwrap();
    let timings = generator.timings();
    (generator.ids().to_vec(), timings.drafted, timings.accepted)
}

/// The texts of a model without drafts.
fn plain_texts(model: &Model, tasks: &[Task]) -> Vec<Vec<u32>> {
    let mut generator = Generator::new(model, &engine(1), SamplerOptions::greedy()).unwrap();
    tasks.iter().map(|task| text(&mut generator, task, N).0).collect()
}

/// Makes a forward pass with a drafter.
type Speculative<'a> = &'a dyn Fn(&EngineOptions) -> SpeculativePass;

/// Checks that the texts with drafts are `texts`. Returns the numbers of drafts that were evaluated and that held.
fn check_alone(
    name: &str,
    model: &Model,
    new: Speculative<'_>,
    depth: DraftDepth,
    tasks: &[Task],
    texts: &[Vec<u32>],
) -> [usize; 2] {
    let SpeculativePass { pass, drafter } = new(&engine(1));
    let mut generator = Generator::with_pass(model, pass, SamplerOptions::greedy()).unwrap();
    generator.set_drafter(drafter, depth);
    let mut counts = [0; 2];
    for (task, want) in tasks.iter().zip(texts) {
        let (ids, drafted, accepted) = text(&mut generator, task, N);
        assert_eq!(&ids, want, "{name} after {:?} with {}", task.prompt, task.sampling.temperature);
        counts = [counts[0] + drafted, counts[1] + accepted];
    }
    counts
}

/// [`check_alone`] with several sequences in a batch, each with its own number of drafts.
fn check_together(
    name: &str,
    model: &Model,
    new: Speculative<'_>,
    depth: DraftDepth,
    tasks: &[Task],
    texts: &[Vec<u32>],
) -> [usize; 2] {
    let options = SchedulerOptions { n_parallel: 4, draft_depth: depth, ..Default::default() };
    let SpeculativePass { pass, drafter } = new(&engine(6));
    let parts = SchedulerParts { drafter, ..Default::default() };
    let scheduler = Scheduler::start_with(pass, Arc::new(model.clone()), options, parts).unwrap();
    let submit = |task: &Task| {
        let request = Request {
            prompt: task.prompt.clone().into(),
            sampling: task.sampling.clone(),
            max_tokens: Some(N),
            min_tokens: task.min_tokens,
            ..Default::default()
        };
        scheduler.submit(request).unwrap()
    };
    let events: Vec<_> = tasks.iter().map(submit).collect();
    let mut n_generated = 0;
    for ((events, task), want) in events.into_iter().zip(tasks).zip(texts) {
        let answer = read(events);
        assert_eq!(answer.error, None);
        assert_eq!([&task.prompt[..], &answer.ids].concat(), *want, "{name}");
        n_generated += answer.ids.len();
    }
    let metrics = scheduler.metrics();
    assert_eq!(metrics.generated_tokens as usize, n_generated, "{name}");
    [metrics.drafted_tokens as usize, metrics.accepted_tokens as usize]
}

/// Without drafts, then with those of an oracle and of n-grams.
#[test]
fn drafts_do_not_change_texts() {
    let (mut n_texts, mut counts) = (0, [[0; 2]; 2]);
    for (name, model) in models() {
        let n_vocab = model.spec().n_vocab;
        let tasks = tasks(N_PROMPTS, n_vocab);
        let texts = Arc::new(plain_texts(&model, &tasks));
        let with = |drafter: Box<dyn Drafter>, options: &EngineOptions| SpeculativePass {
            pass: model.forward_pass(options).unwrap(),
            drafter: Some(drafter),
        };
        let oracle = || Oracle { texts: Arc::clone(&texts), numbers: Numbers(77), n_vocab };
        let oracles = |options: &EngineOptions| with(Box::new(oracle()), options);
        let ngrams = |options: &EngineOptions| with(Box::<NgramDrafter>::default(), options);
        let few = 24;
        let depths = [1 + n_texts % 5, 4 + n_texts % 5].map(DraftDepth::Fixed);
        for ((new, depth), sum) in [&oracles as Speculative<'_>, &ngrams].into_iter().zip(depths).zip(&mut counts) {
            let alone = check_alone(name, &model, new, depth, &tasks, &texts);
            let together = check_together(name, &model, new, depth, &tasks[..few], &texts[..few]);
            *sum = [0, 1].map(|i| sum[i] + alone[i] + together[i]);
        }
        n_texts += texts.len();
    }
    assert!(n_texts > 1000);
    for [drafted, accepted] in counts {
        assert!(drafted > 1000 && accepted > 100 && accepted < drafted, "{accepted} of {drafted}");
    }
}

/// With the prediction heads of models' files, of each architecture that has some.
#[test]
fn drafts_of_prediction_heads_do_not_change_texts() {
    let mut counts = [0; 2];
    let mut n_texts = 0;
    for name in ["qwen35", "qwen35moe", "qwen3next", "glm4moe", "deepseek2", "hy_v3", "nemotron_h_moe", "step35"] {
        let model = open(&with_heads(&format!("{name}.gguf")));
        let tasks = tasks(130, model.spec().n_vocab);
        let texts = plain_texts(&model, &tasks);
        let mtp = |options: &EngineOptions| {
            let speculation = Speculation { drafter: DrafterKind::Mtp, ..Default::default() };
            SpeculativePass::new(&model, options, speculation).unwrap()
        };
        let few = 24;
        let alone = check_alone(name, &model, &mtp, DraftDepth::Fixed(3), &tasks, &texts);
        let together = check_together(name, &model, &mtp, DraftDepth::Fixed(2), &tasks[..few], &texts[..few]);
        counts = [0, 1].map(|i| counts[i] + alone[i] + together[i]);
        // As few or many as pay.
        check_alone(name, &model, &mtp, DraftDepth::default(), &tasks[..few], &texts[..few]);
        n_texts += texts.len();
    }
    assert!(n_texts > 1000);
    let [drafted, accepted] = counts;
    assert!(drafted > 1000 && accepted > 0 && accepted < drafted, "{accepted} of {drafted}");
}

/// With EAGLE-3's drafters, which read hidden rows of several layers.
#[test]
fn drafts_of_eagle_3_do_not_change_texts() {
    check_drafters_of("eagle3.gguf", &["eagle3-drafter.gguf", "eagle3-own-drafter.gguf"]);
}

/// With drafters that propose a block of tokens from hidden rows.
#[test]
fn drafts_of_dflash_do_not_change_texts() {
    check_drafters_of("dflash.gguf", &["dflash-drafter.gguf", "dflash-2-drafter.gguf", "dspark-drafter.gguf"]);
}

/// Checks the texts of `target` with drafters of their own files that read its hidden rows.
fn check_drafters_of(target: &str, names: &[&str]) {
    let model = crate::drafters::target(target);
    let tasks = tasks(N_TEXTS, model.spec().n_vocab);
    let texts = plain_texts(&model, &tasks);
    for name in names {
        let draft = crate::drafters::drafter(name);
        let new = |options: &EngineOptions| {
            let speculation = Speculation { drafter: DrafterKind::Auto, ..Default::default() };
            SpeculativePass::with_draft_file(&model, &draft, options, speculation, None).unwrap()
        };
        let alone = check_alone(name, &model, &new, DraftDepth::Fixed(3), &tasks, &texts);
        let together = check_together(name, &model, &new, DraftDepth::Fixed(2), &tasks[..100], &texts[..100]);
        let [drafted, accepted] = [0, 1].map(|i| alone[i] + together[i]);
        assert!(drafted > 1000 && accepted < drafted, "{name}: {accepted} of {drafted}");
        // As few or many as pay.
        check_alone(name, &model, &new, DraftDepth::default(), &tasks[..24], &texts[..24]);
    }
}

/// With an assistant, which attends to the target's keys and values.
#[test]
fn drafts_of_an_assistant_do_not_change_texts() {
    let model = open(&with_drafters("gemma4.gguf"));
    let file = GgufFile::from_bytes(&with_drafters("gemma4-assistant.gguf")).unwrap();
    let tasks = tasks(N_TEXTS, model.spec().n_vocab);
    let texts = plain_texts(&model, &tasks);
    let new = |options: &EngineOptions| {
        let mut pass = model.backend(options).unwrap();
        let drafter = AssistantDrafter::attach(&model, &file, &mut *pass, options).unwrap();
        SpeculativePass { pass, drafter: Some(Box::new(drafter)) }
    };
    let few = 200;
    let alone = check_alone("gemma4", &model, &new, DraftDepth::Fixed(3), &tasks, &texts);
    let together = check_together("gemma4", &model, &new, DraftDepth::Fixed(4), &tasks[..few], &texts[..few]);
    check_alone("gemma4", &model, &new, DraftDepth::default(), &tasks[..few], &texts[..few]);
    let [drafted, accepted] = [0, 1].map(|i| alone[i] + together[i]);
    assert!(texts.len() > 1000 && drafted > 1000 && accepted > 0 && accepted < drafted, "{accepted} of {drafted}");
}

/// With a second model, of the same and of another vocabulary.
#[test]
fn drafts_of_a_model_do_not_change_texts() {
    let files = draft_models();
    let target = open(&files["draft-same.gguf"]);
    let tasks = tasks(N_TEXTS, target.spec().n_vocab);
    let texts = plain_texts(&target, &tasks);
    for name in ["draft-same-drafter.gguf", "draft-other-drafter.gguf", "draft-same.gguf"] {
        let draft = open(&files[name]);
        let new = |options: &EngineOptions| SpeculativePass {
            pass: target.forward_pass(options).unwrap(),
            drafter: Some(Box::new(DraftModel::new(&target, &draft, options, DraftModelOptions::default()).unwrap())),
        };
        let alone = check_alone(name, &target, &new, DraftDepth::Fixed(4), &tasks, &texts);
        let together = check_together(name, &target, &new, DraftDepth::Fixed(3), &tasks[..100], &texts[..100]);
        let [drafted, accepted] = [0, 1].map(|i| alone[i] + together[i]);
        assert!(drafted > 1000 && accepted <= drafted, "{accepted} of {drafted}");
        // A model drafts what it writes itself.
        assert!(name != "draft-same.gguf" || 3 * accepted > drafted, "{accepted} of {drafted}");
    }
}
