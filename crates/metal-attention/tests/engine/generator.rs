//! `Generator`, which evaluates one sequence at a time, with the built-in model.

use std::ops::ControlFlow;

use metal_attention::sampling::SamplerOptions;
use metal_attention::tokenizer::EncodeOptions;
use metal_attention::{
    CpuError, Device, EngineOptions, Error, ForwardError, GenerateOptions, GeneratedToken, Generator, Model, Pooler,
    StopReason, Watch,
};

/// The text that the built-in model generates greedily after "Once upon a time".
const STORY: &str = ", there was a little girl named Lily. She loved to play outside in the park.";

/// A greedy generator for the built-in model.
fn generator(options: &EngineOptions) -> Generator {
    Generator::new(&Model::built_in().unwrap(), options, SamplerOptions::greedy()).unwrap()
}

/// The token ids of `text`, after the model's special tokens for the beginning.
fn encode(generator: &Generator, text: &str) -> Vec<u32> {
    generator.model().tokenizer().unwrap().encode(text, EncodeOptions { add_special: true, parse_special: false })
}

/// Options to generate at most `n` tokens.
fn tokens(n: usize) -> GenerateOptions {
    GenerateOptions { n_predict: Some(n), ..Default::default() }
}

/// Generates `n` ids.
fn ids(generator: &mut Generator, n: usize) -> Vec<u32> {
    generator.generate(tokens(n)).map(|t| t.unwrap().id).collect()
}

/// The text of generated tokens.
fn text(tokens: impl Iterator<Item = Result<GeneratedToken, Error>>) -> String {
    tokens.map(|t| t.unwrap().text).collect()
}

/// A progress callback that does not interrupt the prompt.
fn keep_going(_done: usize, _total: usize) -> ControlFlow<()> {
    ControlFlow::Continue(())
}

#[test]
fn an_embedding_equals_that_of_a_new_forward_pass() {
    let options = EngineOptions { device: Device::Cpu, ..Default::default() };
    let mut generator = generator(&options);
    let story = text(generator.complete("Once upon a time", tokens(20)).unwrap());
    let pooler = Pooler::new(generator.model(), None);
    let prompt = encode(&generator, "The dog runs.");
    let mut pass = generator.model().forward_pass(&options).unwrap();
    let mut pooled = pooler.begin();
    pooled.add(&pass.forward_hidden(&pooler.batch(&prompt, 0)).unwrap());
    assert_eq!(generator.embed(&pooler, &prompt).unwrap(), pooler.finish(pooled));
    // The earlier sequence was removed from the cache. Later results are not affected.
    assert!(generator.ids().is_empty() && generator.forward_pass().n_past(0) == 0);
    assert_eq!(text(generator.complete("Once upon a time", tokens(20)).unwrap()), story);
    assert!(matches!(generator.embed(&pooler, &[]), Err(Error::EmptyPrompt)));
    assert!(matches!(generator.embed(&pooler, &vec![1; 600]), Err(Error::PromptTooLong { .. })));
    assert_eq!(generator.ids().len(), 25, "refused prompts change nothing");
}

#[test]
fn generation_continues_where_it_ended() {
    let mut generator = generator(&EngineOptions::default());
    let mut story = text(generator.complete("Once upon a time", tokens(5)).unwrap());
    story += &text(generator.generate(tokens(1)));
    story += &text(generator.generate(tokens(16)));
    assert!(STORY.starts_with(&story) && story.len() > 50, "{story}");
    assert_eq!(generator.ids().len(), 5 + 22);
    assert_eq!(generator.timings().generated, 22);
}

#[test]
fn a_prompt_in_micro_batches_generates_the_same_text() {
    let prompt = "Lily and Ben went to the park. They saw a big";
    let mut whole = generator(&EngineOptions::default());
    let all = encode(&whole, prompt);
    whole.prompt(&all, keep_going).unwrap();
    let expected = ids(&mut whole, 20);
    for n_ubatch in [1, 2, 5, all.len() - 1, all.len()] {
        let mut cut = generator(&EngineOptions { n_ubatch: Some(n_ubatch), ..Default::default() });
        let mut reports = Vec::new();
        let progress = |done, total| {
            reports.push((done, total));
            ControlFlow::Continue(())
        };
        cut.prompt(&all, progress).unwrap();
        assert_eq!(reports.len(), all.len().div_ceil(n_ubatch), "{reports:?}");
        assert_eq!(ids(&mut cut, 20), expected, "micro-batches of {n_ubatch}");
        assert_eq!(cut.timings().prompt_tokens, all.len());
    }
}

#[test]
fn a_shared_prefix_is_evaluated_once() {
    let mut warm = generator(&EngineOptions::default());
    text(warm.complete("Once upon a time, there was a little dog", tokens(10)).unwrap());
    for prompt in ["Once upon a time, there was a cat", "Once upon a time", "The cat sat on the mat and"] {
        let all = encode(&warm, prompt);
        let shared = warm.ids().iter().zip(&all).take_while(|(a, b)| a == b).count().min(all.len() - 1);
        warm.prompt(&all, keep_going).unwrap();
        let continued = ids(&mut warm, 10);
        let timings = warm.timings();
        assert_eq!((timings.cached_tokens, timings.prompt_tokens), (shared, all.len() - shared), "{prompt}");
        let mut cold = generator(&EngineOptions::default());
        cold.prompt(&all, keep_going).unwrap();
        assert_eq!(continued, ids(&mut cold, 10), "{prompt}");
    }
}

#[test]
fn an_interrupted_prompt_can_be_finished() {
    let mut generator = generator(&EngineOptions { n_ubatch: Some(2), ..Default::default() });
    let all = encode(&generator, "Once upon a time");
    let stop_at_4 = |done, _| if done == 4 { ControlFlow::Break(()) } else { ControlFlow::Continue(()) };
    let error = generator.prompt(&all, stop_at_4).unwrap_err();
    assert!(matches!(error, Error::Interrupted { done: 4, total: 5 }), "{error}");
    assert_eq!(generator.timings().prompt_tokens, 4);
    generator.prompt(&all, keep_going).unwrap();
    assert_eq!(text(generator.generate(tokens(8))), ", there was a little girl");
    assert_eq!(generator.timings().cached_tokens, 4);
}

#[test]
fn a_watch_ends_a_prompt_and_a_generation() {
    let watch = Watch::default();
    let mut generator = generator(&EngineOptions { n_ubatch: Some(2), watch: watch.clone(), ..Default::default() });
    let all = encode(&generator, "Once upon a time");
    let cancel_at_2 = |done, _| {
        if done == 2 {
            watch.cancel();
        }
        ControlFlow::Continue(())
    };
    let error = generator.prompt(&all, cancel_at_2).unwrap_err();
    assert!(matches!(error, Error::Interrupted { done: 2, total: 5 }) && error.is_cancelled(), "{error}");
    watch.resume();
    generator.prompt(&all, keep_going).unwrap();
    assert_eq!(generator.timings().cached_tokens, 2);

    let mut generation = generator.generate(tokens(8));
    let mut story = generation.next().unwrap().unwrap().text;
    watch.cancel();
    let error = generation.next().unwrap().unwrap_err();
    assert!(matches!(error, Error::Forward(ForwardError::Cancelled)) && error.is_cancelled(), "{error}");
    assert!(generation.next().is_none());
    story += &generation.finish();
    watch.resume();
    story += &text(generator.generate(tokens(7)));
    assert_eq!(story, ", there was a little girl");

    watch.cancel();
    let options = EngineOptions { watch, device: Device::Cpu, ..Default::default() };
    let error = Model::built_in().unwrap().forward_pass(&options).err().unwrap();
    assert!(matches!(error, Error::Cpu(CpuError::Cancelled)) && error.is_cancelled(), "{error}");
}

#[test]
fn refused_prompts_change_nothing() {
    let mut generator = generator(&EngineOptions { n_ctx: Some(8), ..Default::default() });
    assert!(matches!(generator.generate(tokens(1)).next(), Some(Err(Error::EmptyPrompt))));
    text(generator.complete("Once upon", tokens(2)).unwrap());
    let before = generator.ids().to_vec();
    let error = generator.prompt(&[1; 9], keep_going).unwrap_err();
    assert!(matches!(error, Error::PromptTooLong { n_prompt: 9, n_ctx: 8, n_ctx_train: 512 }), "{error}");
    let error = generator.prompt(&[1, 512], keep_going).unwrap_err();
    assert!(matches!(error, Error::Forward(ForwardError::TokenOutOfRange { id: 512, n_vocab: 512 })), "{error}");
    assert!(matches!(generator.prompt(&[], keep_going), Err(Error::EmptyPrompt)));
    assert_eq!(generator.ids(), before);
    assert_eq!(ids(&mut generator, 1).len(), 1);
}

#[test]
fn a_full_context_ends_generation() {
    let mut generator = generator(&EngineOptions { n_ctx: Some(8), ..Default::default() });
    let mut generation = generator.complete("Once upon a time", GenerateOptions::default()).unwrap();
    // Three more tokens fit. A fourth is sampled from the last one's logits.
    assert_eq!(generation.by_ref().count(), 4);
    assert_eq!(generation.stop_reason(), Some(StopReason::ContextFull));
    assert!(generation.next().is_none());
}

#[test]
fn stop_strings_end_generation() {
    let mut generator = generator(&EngineOptions::default());
    let options = GenerateOptions { stop: vec!["girl".into()], ..tokens(50) };
    let mut generation = generator.complete("Once upon a time", options).unwrap();
    assert_eq!(text(generation.by_ref()), ", there was a little ");
    assert_eq!(generation.stop_reason(), Some(StopReason::StopString));
    assert_eq!(generation.finish(), "");

    // If generation ends first, the text that was held back as a possible stop string is returned at the end.
    let options = GenerateOptions { stop: vec![" girl named Bob".into()], ..tokens(8) };
    let mut generation = generator.complete("Once upon a time", options).unwrap();
    assert_eq!(text(generation.by_ref()), ", there was a little");
    assert_eq!(generation.stop_reason(), Some(StopReason::Length));
    assert_eq!(generation.finish(), " girl");
}

#[test]
fn the_end_token_can_be_ignored() {
    let model = Model::built_in().unwrap();
    let eos = model.tokenizer().unwrap().eos().unwrap();
    // EOS is always sampled, unless it is forbidden.
    let sampling = SamplerOptions { logit_bias: vec![(eos, 1e6)], ..SamplerOptions::greedy() };
    let mut generator = Generator::new(&model, &EngineOptions::default(), sampling).unwrap();
    let mut generation = generator.complete("Once upon a time", tokens(6)).unwrap();
    assert!(generation.next().is_none());
    assert_eq!(generation.stop_reason(), Some(StopReason::EndOfGeneration));
    let options = GenerateOptions { ignore_eos: true, ..tokens(8) };
    assert_eq!(text(generator.generate(options)), ", there was a little girl");
}

#[test]
fn stop_ids_end_generation_after_the_minimum_of_tokens() {
    let model = Model::built_in().unwrap();
    let eos = model.tokenizer().unwrap().eos().unwrap();
    let mut generator = generator(&EngineOptions::default());
    let ids = |generator: &mut Generator, options: GenerateOptions| -> (Vec<u32>, Option<StopReason>) {
        let mut generation = generator.complete("Once upon a time", options).unwrap();
        let ids = generation.by_ref().map(|token| token.unwrap().id).collect();
        (ids, generation.stop_reason())
    };
    let (story, _) = ids(&mut generator, tokens(8));
    assert_eq!(story[..4], [432, 383, 286, 261]);
    let stopping = |min_tokens| GenerateOptions { stop_ids: vec![286, 9999], min_tokens, ..tokens(8) };
    let end = Some(StopReason::EndOfGeneration);
    assert_eq!(ids(&mut generator, stopping(0)), (vec![432, 383], end));
    assert_eq!(ids(&mut generator, stopping(2)), (vec![432, 383], end));
    let (longer, _) = ids(&mut generator, stopping(3));
    assert_eq!(longer[..2], [432, 383]);
    assert!(longer.len() > 2 && longer[2] != 286, "{longer:?}");

    let sampling = SamplerOptions { logit_bias: vec![(eos, 1e6)], ..SamplerOptions::greedy() };
    generator.set_sampling(sampling).unwrap();
    let minimum = GenerateOptions { min_tokens: 3, ..tokens(8) };
    assert_eq!(ids(&mut generator, minimum), (vec![432, 383, 286], end));
}

#[test]
fn equal_seeds_give_equal_texts() {
    let model = Model::built_in().unwrap();
    let sampling = |seed| SamplerOptions { temperature: 1.2, seed: Some(seed), ..Default::default() };
    let mut one = Generator::new(&model, &EngineOptions::default(), sampling(1)).unwrap();
    let story = text(one.complete("Once upon a time", tokens(30)).unwrap());
    assert_eq!(text(one.complete("Once upon a time", tokens(30)).unwrap()), story);
    let mut two = Generator::new(&model, &EngineOptions::default(), sampling(2)).unwrap();
    assert_ne!(text(two.complete("Once upon a time", tokens(30)).unwrap()), story);
}

#[test]
fn generated_text_at_the_start_has_no_leading_space() {
    let mut generator = generator(&EngineOptions::default());
    assert_eq!(text(generator.complete("", tokens(4)).unwrap()), "Once upon a time");
    assert_eq!(text(generator.complete("Once", tokens(3)).unwrap()), " upon a time");
}

#[test]
fn a_logits_processor_changes_the_sampled_tokens() {
    let mut generator = generator(&EngineOptions::default());
    let plain = text(generator.complete("Once upon a time", tokens(8)).unwrap());
    assert!(STORY.starts_with(&plain));
    let girl = encode(&generator, " girl").pop().unwrap();
    let no_girl = move |_: &[u32], logits: &mut [f32]| {
        logits[girl as usize] = f32::NEG_INFINITY;
        Ok(())
    };
    generator.set_logits_processor(Some(Box::new(no_girl)));
    let other = text(generator.complete("Once upon a time", tokens(8)).unwrap());
    assert_ne!(other, plain);
    generator.set_logits_processor(Some(Box::new(|_: &[u32], _: &mut [f32]| Err("no".into()))));
    let error = generator.complete("Once upon a time", tokens(8)).unwrap().next().unwrap().unwrap_err();
    assert_eq!(error.to_string(), "the logits processor failed: no");
    generator.set_logits_processor(None);
    assert_eq!(text(generator.complete("Once upon a time", tokens(8)).unwrap()), plain);
}
