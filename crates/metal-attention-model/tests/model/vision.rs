//! Picture encoders: the files that are refused, and the page that lists the families.

use metal_attention_gguf::{GgufFile, GgufWriter, Metadata};
use metal_attention_model::ModelError;
use metal_attention_model::vision::{VisionModel, projectors};
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
