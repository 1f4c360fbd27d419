//! Pictures in prompts of a text model.

use std::ops::ControlFlow;

use metal_attention::gguf::GgufFile;
use metal_attention::picture_files::{Limits, Picture};
use metal_attention::{
    CacheType, Device, EngineOptions, Error, GenerateOptions, Generator, Model, ModelSpec, PictureEncoder,
    PicturePrompt, PromptBuilder, PromptSpan, TokenLimits,
};
use metal_attention_testing::mmproj;

fn options() -> EngineOptions {
    EngineOptions { device: Device::Cpu, n_threads: Some(2), cache_type: CacheType::F32, ..Default::default() }
}

fn encoder(model: &Model, file: &[u8]) -> Result<PictureEncoder, Error> {
    PictureEncoder::new(&GgufFile::from_bytes(file).unwrap(), model.spec(), &options(), TokenLimits::default())
}

fn picture(width: usize, height: usize, seed: usize) -> Picture {
    Picture::decode(&mmproj::bmp(width, height, seed), &Limits::default()).unwrap()
}

/// A prompt of a text, a picture and a text.
fn prompt(model: &Model, encoder: &mut PictureEncoder, picture: &Picture) -> (Vec<u32>, Vec<PromptSpan>) {
    let tokenizer = model.tokenizer().unwrap();
    let divided = encoder.divider().divide(picture).unwrap();
    let encoded = encoder.encode(&[divided], &tokenizer, |_, _| {}).unwrap();
    let mut builder = PromptBuilder::new(&tokenizer);
    builder.text("Once upon a time", &[]);
    builder.picture(&encoded[0]);
    builder.text("there was", &[]);
    builder.finish()
}

/// The greedy ids after a prompt, and how many of its inputs were in the KV cache.
fn continued(generator: &mut Generator, (ids, spans): &(Vec<u32>, Vec<PromptSpan>)) -> (Vec<u32>, usize) {
    let mut kept = None;
    let progress = |done, _| {
        kept.get_or_insert(done);
        ControlFlow::Continue(())
    };
    generator.prompt_with_spans(ids, spans, progress).unwrap();
    let options = GenerateOptions { n_predict: Some(6), ignore_eos: true, ..Default::default() };
    let tokens = generator.generate(options).map(|token| token.unwrap().id).collect();
    (tokens, kept.unwrap_or(ids.len() - 1))
}

#[test]
fn pictures_stand_before_a_text_or_where_it_says() {
    let model = Model::built_in().unwrap();
    let tokenizer = model.tokenizer().unwrap();
    let mut encoder = encoder(&model, &mmproj::gemma3(64)).unwrap();
    let divided = [1, 2].map(|seed| encoder.divider().divide(&picture(50, 30, seed)).unwrap());
    let encoded = encoder.encode(&divided, &tokenizer, |_, _| {}).unwrap();
    let all: Vec<_> = encoded.iter().collect();
    let prompt = |text: &str, pictures: &[&PicturePrompt]| {
        let mut builder = PromptBuilder::new(&tokenizer);
        builder.text_with_pictures(text, false, pictures).map(|()| builder.finish())
    };
    let before = prompt("Once upon", &all).unwrap();
    assert_eq!(before, prompt("<image><image>Once upon", &all).unwrap());
    // Of two pictures and one place the last picture has it.
    let between = prompt("Once<image> upon", &all).unwrap();
    let mut builder = PromptBuilder::new(&tokenizer);
    builder.picture(all[0]);
    builder.text("Once", &[]);
    builder.picture(all[1]);
    builder.text(" upon", &[]);
    assert_eq!(between, builder.finish());
    let error = prompt("<image><image>", &all[..1]).unwrap_err();
    assert!(matches!(error, Error::PicturePlaces { n_places: 2, n_pictures: 1 }), "{error}");
    // Names of control tokens are text.
    assert!(!prompt("</s>", &all).unwrap().0.contains(&2));
}

#[test]
fn a_picture_is_known_by_its_pixels() {
    let model = Model::built_in().unwrap();
    let mut encoder = encoder(&model, &mmproj::gemma3(64)).unwrap();
    let [first, second] = [1, 2].map(|seed| prompt(&model, &mut encoder, &picture(50, 30, seed)));
    // Beside BOS and the texts there are the markers, which this vocabulary spells out, and four rows.
    assert_eq!(first.1.len(), 1);
    let span = &first.1[0];
    assert_eq!((span.inputs.len(), span.content.rows.len()), (4, 4 * 64));
    assert_eq!(span.content.bidirectional_in, vec![true; model.spec().n_layer()]);
    assert!(span.content.positions.is_empty() && span.content.deepstack.is_empty());
    assert_eq!(first.0.len(), second.0.len());
    assert_ne!(span.content.hash, second.1[0].content.hash);
    assert_eq!(span.content.hash, prompt(&model, &mut encoder, &picture(50, 30, 1)).1[0].content.hash);

    let mut generator = Generator::new(&model, &options(), model.sampling()).unwrap();
    let (answer, kept) = continued(&mut generator, &first);
    assert_eq!(kept, 0);
    // The same picture is not evaluated again; another one is, from its first row on.
    assert_eq!(continued(&mut generator, &first), (answer.clone(), first.0.len() - 1));
    let (_, kept) = continued(&mut generator, &second);
    assert_eq!(kept, span.inputs.start);
    assert_eq!(continued(&mut generator, &first), (answer, span.inputs.start));
}

#[test]
fn rows_with_deepstack_go_to_the_first_layers() {
    let model = Model::built_in().unwrap();
    let mut encoder = encoder(&model, &mmproj::qwen3vl(64)).unwrap();
    assert_eq!(encoder.row_width(), 128);
    let with = prompt(&model, &mut encoder, &picture(40, 24, 3));
    let content = &with.1[0].content;
    let n_rows = with.1[0].inputs.len();
    assert_eq!((content.rows.len(), content.deepstack.len()), (64 * n_rows, 1));
    assert_eq!(content.deepstack[0].len(), 64 * n_rows);
    assert!(content.bidirectional_in.is_empty());
    let mut generator = Generator::new(&model, &options(), model.sampling()).unwrap();
    let (answer, _) = continued(&mut generator, &with);
    assert_eq!(answer.len(), 6);
}

#[test]
fn limits_of_tokens_change_the_size_and_the_hash() {
    let model = Model::built_in().unwrap();
    let file = GgufFile::from_bytes(&mmproj::qwen3vl(64)).unwrap();
    let with = |max| {
        let limits = TokenLimits { min: None, max };
        let mut encoder = PictureEncoder::new(&file, model.spec(), &options(), limits).unwrap();
        let (_, spans) = prompt(&model, &mut encoder, &picture(80, 80, 3));
        (spans[0].inputs.len(), spans[0].content.hash)
    };
    let (all, few) = (with(None), with(Some(16)));
    assert_eq!((all.0, few.0), (100, 16));
    assert_ne!(all.1, few.1);
}

#[test]
fn files_that_do_not_fit_are_refused_with_the_reason() {
    let model = Model::built_in().unwrap();
    let error = encoder(&model, &mmproj::gemma3(48)).err().unwrap();
    assert!(matches!(error, Error::OtherPictureWidth { found: 48, expected: 64 }), "{error}");
    let text = std::fs::read(metal_attention_testing::stories()).unwrap();
    let error = encoder(&model, &text).err().unwrap().to_string();
    assert!(error.contains("clip.projector_type"), "{error}");
}

#[test]
fn rows_beside_the_grid_need_a_text_model_without_sections() {
    let files = metal_attention_testing::models::generate("more-architectures");
    let text = |name: &str| {
        let bytes = files.iter().find(|(file, _)| *file == name).map(|(_, bytes)| bytes).unwrap();
        ModelSpec::from_gguf(&GgufFile::from_bytes(bytes).unwrap()).unwrap()
    };
    let family = mmproj::families().into_iter().find(|family| family.name == "hunyuanvl").unwrap();
    let file = GgufFile::from_bytes(&family.bytes).unwrap();
    let new = |text: &ModelSpec| PictureEncoder::new(&file, text, &options(), TokenLimits::default()).err();
    let error = new(&text("qwen2vl.gguf")).expect("an error").to_string();
    assert!(error.contains("rope.dimension_sections"), "{error}");
    assert!(new(&text("hunyuan-dense.gguf")).is_none());
}
