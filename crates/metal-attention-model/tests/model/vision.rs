//! Picture encoders: the files that are refused, and the page that lists the families.

use metal_attention_gguf::{GgufFile, GgufWriter, Metadata, Tensor};
use metal_attention_model::vision::{
    EncoderWork, FileWeights, PictureFamily, PictureShape, PrepareEncoder, Stage, VisionModel, projectors,
};
use metal_attention_model::{ModelError, ModelShape, ModelSpec};
use metal_attention_testing::{mmproj, root};

/// The page; `UPDATE_VISION=1` writes the table.
#[test]
fn the_page_lists_the_families_of_the_registry() {
    const HEAD: &str = "| `clip.projector_type` | models |\n|---|---|\n";
    let path = root().join("docs/vision.md");
    let page = std::fs::read_to_string(&path).unwrap();
    let (before, rest) = page.split_once(HEAD).expect("the table");
    let after: Vec<&str> = rest.split_inclusive('\n').skip_while(|line| line.starts_with('|')).collect();
    let rows: Vec<String> = projectors().map(|(name, models)| format!("| `{name}` | {models} |\n")).collect();
    let wanted = format!("{before}{HEAD}{}{}", rows.concat(), after.concat());
    if std::env::var_os("UPDATE_VISION").is_some() {
        std::fs::write(path, wanted).unwrap();
    } else {
        assert!(page == wanted, "docs/vision.md: write the table with UPDATE_VISION=1");
    }
}

#[test]
fn names_of_projectors_are_in_order() {
    let names: Vec<_> = projectors().map(|(name, _)| name).collect();
    assert!(names.is_sorted(), "{names:?}");
}

/// The metadata of `file` with `change`, and its tensors but those whose names contain `without`.
fn changed(file: &[u8], without: &str, change: impl Fn(&mut Metadata)) -> Result<VisionModel, ModelError> {
    let file = GgufFile::from_bytes(file).unwrap();
    let mut metadata = file.metadata().clone();
    change(&mut metadata);
    let tensors: Vec<_> = file.tensors().iter().filter(|t| without.is_empty() || !t.name().contains(without)).collect();
    let declared: Vec<_> = tensors
        .iter()
        .map(|t| metal_attention_gguf::TensorDecl { name: t.name().into(), shape: t.shape().to_vec(), ty: t.ty() })
        .collect();
    let mut writer = GgufWriter::new(Vec::new(), 3, &metadata, &declared).unwrap();
    for tensor in tensors {
        writer.write(tensor.bytes()).unwrap();
    }
    VisionModel::from_gguf(&GgufFile::from_bytes(&writer.finish().unwrap()).unwrap())
}

#[test]
fn every_missing_tensor_and_every_odd_size_is_an_error() {
    for file in [mmproj::gemma3(32), mmproj::qwen3vl(32)] {
        assert!(changed(&file, "", |_| ()).is_ok());
        let parsed = GgufFile::from_bytes(&file).unwrap();
        let optional =
            |name: &str| [".bias", "weight.1"].iter().any(|end| name.ends_with(end)) || name.contains("soft_emb_norm");
        for tensor in parsed.tensors() {
            let name = tensor.name();
            let outcome = changed(&file, name, |_| ());
            // The norm before Gemma's projection must be there, biases and the second kernel of a patch need not; without the first
            // matrix of a deepstack row there is no such row.
            let may_be_missing =
                (optional(name) && !name.contains("soft_emb_norm")) || name.contains("deepstack.0.fc1");
            assert_eq!(outcome.is_ok(), may_be_missing, "without {name}: {:?}", outcome.err());
        }
        let keys = ["patch_size", "embedding_length", "attention.head_count", "projection_dim", "image_size"];
        for (key, value) in keys.iter().flat_map(|key| [0, 3, 1 << 20, u32::MAX].map(|value| (key, value))) {
            // No panic, whatever the outcome.
            drop(changed(&file, "", |metadata| metadata.set(format!("clip.vision.{key}"), value)));
        }
        for key in ["patch_size", "embedding_length", "projection_dim"] {
            let error = changed(&file, "", |metadata| metadata.set(format!("clip.vision.{key}"), 7_u32));
            assert!(error.is_err(), "{key}");
        }
    }
    let error =
        changed(&mmproj::gemma3(32), "", |metadata| metadata.set("clip.projector_type", "other")).err().unwrap();
    assert!(error.to_string().contains("other"), "{error}");
}

#[test]
fn shapes_of_known_models_are_read_back() {
    for shape in PictureShape::all() {
        let text = ModelShape::named(shape.text).unwrap();
        assert_eq!(PictureShape::of(shape.text), Some(shape));
        // Few blocks, but that of the first deepstack rows.
        let shape = PictureShape { n_block: shape.n_block.min(6), ..shape.clone() };
        let tensors = shape.tensors(text.n_embd);
        let mut writer = GgufWriter::new(Vec::new(), 3, &shape.metadata(text.n_embd), &tensors).unwrap();
        for tensor in &tensors {
            let n = tensor.ty.row_bytes(tensor.shape.iter().product());
            writer.write(&vec![0; n]).unwrap();
        }
        let file = GgufFile::from_bytes(&writer.finish().unwrap()).unwrap();
        let VisionModel { encoder, markers, .. } = VisionModel::from_gguf(&file).unwrap();
        let n_deepstack = usize::from(matches!(shape.family, PictureFamily::Qwen3Vl { .. }));
        assert_eq!((encoder.n_embd, encoder.n_deepstack), (text.n_embd, n_deepstack), "{}", shape.text);
        let is_block = |stage: &&Stage<_>| matches!(stage, Stage::Block(_));
        assert_eq!(encoder.stages.iter().filter(is_block).count(), shape.n_block);
        // The texts around pictures are tokens of the vocabulary.
        let tokens = shape.special_tokens();
        let around = markers.around.iter().flatten().filter(|text| !text.is_empty());
        assert!(around.clone().all(|text| tokens.iter().any(|token| token == text)), "{}", shape.text);
    }
}

#[test]
fn models_with_pictures_have_the_published_number_of_parameters() {
    for (text, parameters) in
        [("smolvlm-500m", 507_482_304), ("qwen3-vl-4b", 4_437_815_808), ("gemma-3-4b", 4_300_079_472)]
    {
        let shape = ModelShape::named(text).unwrap();
        let spec = ModelSpec::from_metadata(&shape.metadata()).unwrap();
        let of_text = shape.tensors(&spec).into_iter().map(|tensor| tensor.shape);
        let of_pictures = PictureShape::of(text).unwrap().tensors(shape.n_embd).into_iter().map(|tensor| tensor.shape);
        let n: usize = of_text.chain(of_pictures).map(|shape| shape.iter().product::<usize>()).sum();
        assert_eq!(n, parameters, "{text}");
    }
}

/// A backend whose weights are those of the file.
struct Unchanged;

impl PrepareEncoder for Unchanged {
    type Types = FileWeights;
    type Error = std::convert::Infallible;

    fn matrix(&mut self, tensor: &Tensor) -> Result<Tensor, Self::Error> {
        Ok(tensor.clone())
    }

    fn vector(&mut self, values: Vec<f32>) -> Result<Vec<f32>, Self::Error> {
        Ok(values)
    }
}

#[test]
fn operations_are_those_counted_by_hand() {
    // Rows of 16 elements, feed-forwards of 24, two blocks, patches of 3 x 4 x 4 values.
    let of = |file: &[u8], pictures: &[[usize; 2]]| {
        let Ok(encoder) =
            VisionModel::from_gguf(&GgufFile::from_bytes(file).unwrap()).unwrap().encoder.prepare(&mut Unchanged);
        encoder.work(pictures)
    };
    let block = |n: u64| n * (4 * 16 * 16 + 2 * 16 * 24);
    // 36 patches; their 4 rows of 3 x 3 patches are multiplied by [32, 16].
    let multiplications = 36 * 48 * 16 + 2 * block(36) + 4 * 16 * 32;
    let square = EncoderWork {
        products: 2 * multiplications,
        attention: 2 * 2 * (36 * 36 * 16 + 36 * 36 * 16),
        depthwise: 0,
        n_rows: 4,
    };
    assert_eq!(of(&mmproj::gemma3(32), &[[24, 24]]), square);
    assert_eq!(square.flops(), 2 * (27_648 + 129_024 + 2048) + 165_888);
    // Pictures do not attend to each other.
    let twice = EncoderWork { products: 2 * square.products, attention: 2 * square.attention, depthwise: 0, n_rows: 8 };
    assert_eq!(of(&mmproj::gemma3(32), &[[24, 24], [24, 24]]), twice);
    // 8 patches in 4 columns; 2 rows of 2 x 2 patches, [24, 64] and [32, 24], beside which the deepstack rows go through [24, 64] and
    // [32, 24], too.
    let wide = EncoderWork {
        products: 2 * (8 * 48 * 16 + 2 * block(8) + 2 * 2 * (64 * 24 + 24 * 32)),
        attention: 2 * 2 * (8 * 8 * 16 + 8 * 8 * 16),
        depthwise: 0,
        n_rows: 2,
    };
    assert_eq!(of(&mmproj::qwen3vl(32), &[[16, 8]]), wide);
}
