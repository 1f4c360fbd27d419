//! `mmproj` files, which have the picture encoder of a model: how they are recognised, and which one belongs to a model.

use crate::choose::{quant_in, split_stem};

/// The types of `mmproj` files, the preferred one first. All others come after them, the smallest file first.
const TYPES: [&str; 4] = ["F16", "BF16", "Q8_0", "F32"];

/// What the names of `mmproj` files contain.
const MARK: &str = "mmproj";

/// Whether a file, named with `/` between its folders, is an `mmproj` file: its name or one of its folders contains `mmproj`.
pub fn is_mmproj(file: &str) -> bool {
    file.to_ascii_lowercase().contains(MARK)
}

/// The file that belongs to a model by its name, among `mmproj` files with their sizes. `model` is the model's first file; all
/// names have `/` between folders.
///
/// Files in the model's folder are preferred, then the one whose name is the model's (without `mmproj`, type and number of the
/// part), then those whose names begin most like the model's. Of files whose names differ only in the type the order is F16,
/// BF16, `Q8_0`, F32, then the smallest.
///
/// # Errors
///
/// The files that fit equally, if their names differ in more than the type; in the same order.
pub fn choose_mmproj<'a>(model: &str, files: &[(&'a str, u64)]) -> Result<Option<&'a str>, Vec<&'a str>> {
    let own = stem(model);
    let fit = |file: &str| {
        let stem = stem(file);
        let common = stem.chars().zip(own.chars()).take_while(|(a, b)| a == b).count();
        (folder(file) == folder(model), stem == own, common)
    };
    let Some(best) = files.iter().map(|(file, _)| fit(file)).max() else { return Ok(None) };
    let mut best: Vec<_> = files.iter().filter(|(file, _)| fit(file) == best).collect();
    best.sort_by_key(|(file, bytes)| (rank(file), *bytes, *file));
    let first = best[0].0;
    let differs = |file: &str| file != first && (stem(file) != stem(first) || type_of(file) == type_of(first));
    if best.iter().any(|(file, _)| differs(file)) {
        return Err(best.into_iter().map(|(file, _)| *file).collect());
    }
    Ok(Some(first))
}

/// The position of a file's type in [`TYPES`].
fn rank(file: &str) -> usize {
    let ty = type_of(file);
    TYPES.iter().position(|known| ty.as_deref() == Some(known)).unwrap_or(TYPES.len())
}

/// The folders of a file.
fn folder(file: &str) -> &str {
    file.rsplit_once('/').map_or("", |(folder, _)| folder)
}

/// The type in a file's name, in upper case.
fn type_of(file: &str) -> Option<String> {
    quant_in(split_stem(file))
}

/// A file's name in lower case without folders, ending, number of the part, type and `mmproj`, its words separated by `-`.
fn stem(file: &str) -> String {
    let stem = split_stem(file);
    let name = stem.rsplit('/').next().unwrap_or(stem).to_ascii_lowercase();
    // The separators within a type, as in Q4_K_M, belong to it.
    let without_type = match quant_in(stem) {
        Some(ty) => name.replace(&ty.to_ascii_lowercase(), ""),
        None => name,
    };
    let words = without_type.split(['-', '_', '.', ' ']).filter(|word| !word.is_empty() && *word != MARK);
    words.collect::<Vec<_>>().join("-")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mmproj_files_are_known_by_their_names_and_folders() {
        for file in ["mmproj-model-f16.gguf", "Model-mmproj-F16.gguf", "mmproj/xxx.gguf", "a/MMPROJ-b.gguf"] {
            assert!(is_mmproj(file), "{file}");
        }
        assert!(!is_mmproj("gemma-3-4b-it-Q4_K_M.gguf"));
    }

    #[test]
    fn the_file_of_a_real_repository_is_chosen() {
        let pick = |model: &str, files: &[&'static str]| {
            let sized: Vec<_> = files.iter().enumerate().map(|(i, file)| (*file, i as u64)).collect();
            choose_mmproj(model, &sized).unwrap()
        };
        for (model, files, expected) in [
            ("gemma-3-4b-it-Q4_K_M.gguf", &["mmproj-model-f16.gguf"][..], "mmproj-model-f16.gguf"),
            (
                "gemma-3-4b-it-UD-Q4_K_XL.gguf",
                &["mmproj-BF16.gguf", "mmproj-F32.gguf", "mmproj-F16.gguf"],
                "mmproj-F16.gguf",
            ),
            ("x-Q4_0.gguf", &["mmproj-F32.gguf", "mmproj-BF16.gguf"], "mmproj-BF16.gguf"),
            (
                "Qwen_Qwen2.5-VL-7B-Instruct-Q4_K_M.gguf",
                &["mmproj-Qwen_Qwen2.5-VL-7B-Instruct-bf16.gguf", "mmproj-Qwen_Qwen2.5-VL-7B-Instruct-f16.gguf"],
                "mmproj-Qwen_Qwen2.5-VL-7B-Instruct-f16.gguf",
            ),
            (
                "SmolVLM-500M-Instruct-Q8_0.gguf",
                &["mmproj-SmolVLM-500M-Instruct-Q8_0.gguf", "mmproj-SmolVLM-500M-Instruct-f16.gguf"],
                "mmproj-SmolVLM-500M-Instruct-f16.gguf",
            ),
            (
                "Qwen3VL-8B-Instruct-Q4_K_M.gguf",
                &["mmproj-Qwen3VL-8B-Instruct-Q8_0.gguf", "mmproj-Qwen3VL-8B-Instruct-F16.gguf"],
                "mmproj-Qwen3VL-8B-Instruct-F16.gguf",
            ),
            // The smallest of other types; the first has no size here.
            ("m-Q4_0.gguf", &["mmproj-Q5_1.gguf", "mmproj-Q6_K.gguf"], "mmproj-Q5_1.gguf"),
            // Several models in one folder.
            (
                "gemma-3-4b-it-Q4_0-00001-of-00002.gguf",
                &[
                    "mmproj-gemma-3-27b-it-f16.gguf",
                    "mmproj-gemma-3-4b-it-qat-f16.gguf",
                    "gemma-3-4b-it.mmproj-f16.gguf",
                ],
                "gemma-3-4b-it.mmproj-f16.gguf",
            ),
            // Of the model's own folder.
            ("b/m-Q4_0.gguf", &["a/mmproj-m-F16.gguf", "b/mmproj-F32.gguf"], "b/mmproj-F32.gguf"),
            ("m-Q4_0.gguf", &["mmproj/m-F32.gguf", "mmproj/m-F16.gguf"], "mmproj/m-F16.gguf"),
        ] {
            assert_eq!(pick(model, files), Some(expected), "{model}");
        }
        assert_eq!(pick("m.gguf", &[]), None);
    }

    #[test]
    fn files_that_fit_equally_are_an_error() {
        let of = |model: &str, files: &[&'static str]| {
            let sized: Vec<_> = files.iter().map(|file| (*file, 1)).collect();
            choose_mmproj(model, &sized).unwrap_err()
        };
        let names = ["mmproj-b-Q8_0.gguf", "mmproj-a-F16.gguf"];
        assert_eq!(of("model-Q4_0.gguf", &names), [names[1], names[0]]);
        // One type and one stem under two names.
        assert_eq!(of("m.gguf", &["m-mmproj-f16.gguf", "mmproj-m-f16.gguf"]).len(), 2);
    }
}
