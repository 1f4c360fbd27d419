//! Groups files into models, and chooses the model that a name means.

use std::collections::HashMap;
use std::fmt;

use crate::mmproj::{choose_mmproj, is_mmproj};
use crate::name::{Which, is_gguf, is_inside};

/// The tensor types that are preferred where a name has none, the first available one.
pub const USUAL_TYPES: [&str; 2] = ["Q4_K_M", "Q4_0"];

/// The prefix of the types of "Unsloth dynamic" files.
const DYNAMIC: &str = "UD-";

/// The length of `.gguf`.
const ENDING: usize = ".gguf".len();

/// A model in a list of files: one GGUF file, or all files of a split model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ModelFiles {
    /// The tensor type in the file's name, in upper case; `None`: the name has none.
    pub quant: Option<String>,
    /// Names of its files; those of a split model in order.
    pub files: Vec<String>,
    /// Bytes of all files.
    pub bytes: u64,
    /// Whether no file of a split model is missing.
    pub complete: bool,
}

/// The reason why no model was chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unchosen {
    /// No model has the requested type or file.
    Missing,
    /// Several models match.
    Several,
}

/// Groups the GGUF files of a list of (name, size in bytes). Names that lead out of the folder are ignored.
pub fn models<'a>(files: impl IntoIterator<Item = (&'a str, u64)>) -> Vec<ModelFiles> {
    let usable = |&(name, _): &(&str, u64)| is_gguf(name) && is_inside(name);
    let mut files: Vec<_> = files.into_iter().filter(usable).collect();
    files.sort_unstable();
    files.dedup_by_key(|(name, _)| *name);
    let mut models: Vec<ModelFiles> = Vec::new();
    // The index in `models` of each split model.
    let mut begun: HashMap<SplitFile<'_>, usize> = HashMap::new();
    for (name, bytes) in files {
        let part = SplitFile::of(name);
        if let Some(&i) = part.as_ref().and_then(|part| begun.get(part)) {
            models[i].files.push(name.to_owned());
            models[i].bytes = models[i].bytes.saturating_add(bytes);
            continue;
        }
        begun.extend(part.map(|part| (part, models.len())));
        models.push(ModelFiles {
            quant: quant_in(split_stem(name)),
            files: vec![name.to_owned()],
            bytes,
            complete: part.is_none(),
        });
    }
    for (part, i) in begun {
        // Names differ, so the numbers differ, and they are between 1 and the count.
        models[i].complete = models[i].files.len() == part.count as usize;
    }
    models
}

/// Chooses a model: the only one of the type, the one with the file, or, by default, the only one at all or the only
/// one of the first available of [`USUAL_TYPES`].
pub fn choose<'a>(models: &'a [ModelFiles], which: &Which) -> Result<&'a ModelFiles, Unchosen> {
    let only = |mut fitting: Vec<&'a ModelFiles>| match fitting.len() {
        0 => Err(Unchosen::Missing),
        1 => Ok(fitting.remove(0)),
        _ => Err(Unchosen::Several),
    };
    let main = || models.iter().filter(|model| !model.is_auxiliary());
    let of_type = |quant: &str| only(main().filter(|model| model.has_quant(quant)).collect());
    match which {
        Which::File(file) => only(models.iter().filter(|model| model.files.contains(file)).collect()),
        Which::Quant(quant) => of_type(quant),
        Which::Pattern(pattern) => {
            let fitting = || main().filter(|model| model.fits(pattern));
            match only(fitting().collect()) {
                Err(Unchosen::Several) => only(fitting().filter(|model| !model.is_dynamic()).collect()),
                found => found,
            }
        }
        Which::Default => match only(main().collect()) {
            Err(Unchosen::Several) => {
                let usual =
                    USUAL_TYPES.iter().map(|quant| of_type(quant)).find(|found| *found != Err(Unchosen::Missing));
                usual.unwrap_or(Err(Unchosen::Several))
            }
            found => found,
        },
    }
}

/// The `mmproj` file of a model, by the rules of [`choose_mmproj`]; where several fit equally, the first in their order. `None`
/// if there is none, or if the model is itself one.
pub fn mmproj_of<'a>(models: &'a [ModelFiles], model: &ModelFiles) -> Option<&'a ModelFiles> {
    if model.is_mmproj() {
        return None;
    }
    let whole = |model: &&ModelFiles| model.is_mmproj() && model.files.len() == 1 && model.complete;
    let files: Vec<_> = models.iter().filter(whole).map(|found| (found.files[0].as_str(), found.bytes)).collect();
    let chosen = choose_mmproj(&model.files[0], &files).unwrap_or_else(|equals| equals.first().copied())?;
    models.iter().find(|found| found.files[0] == chosen)
}

impl ModelFiles {
    /// Whether the model has this type, in upper or lower case.
    pub fn has_quant(&self, quant: &str) -> bool {
        self.quant.as_ref().is_some_and(|own| own.eq_ignore_ascii_case(quant))
    }

    /// Whether the name of one of the files, with or without its folder, matches a pattern.
    pub fn fits(&self, pattern: &str) -> bool {
        let without_folder = |file: &str| matches(pattern, file.rsplit('/').next().unwrap_or(file));
        self.files.iter().any(|file| matches(pattern, file) || without_folder(file))
    }

    /// Whether the type is a "dynamic" one: such files are quantised differently from those of the plain type.
    fn is_dynamic(&self) -> bool {
        self.quant.as_ref().is_some_and(|quant| quant.starts_with(DYNAMIC))
    }

    /// Whether this is a picture encoder, which belongs to the models beside it.
    pub fn is_mmproj(&self) -> bool {
        is_mmproj(&self.files[0])
    }

    /// Whether the file accompanies a language model: a picture encoder or an importance matrix.
    fn is_auxiliary(&self) -> bool {
        let name = self.files[0].rsplit('/').next().unwrap_or_default().to_ascii_lowercase();
        self.is_mmproj() || name.contains("imatrix")
    }
}

/// Whether `text` matches `pattern`, in upper or lower case; `*` stands for any text.
fn matches(pattern: &str, text: &str) -> bool {
    let (pattern, text) = (pattern.to_ascii_lowercase(), text.to_ascii_lowercase());
    let Some((first, rest)) = pattern.split_once('*') else { return pattern == text };
    let Some(mut text) = text.strip_prefix(first) else { return false };
    let (middle, last) = rest.rsplit_once('*').unwrap_or(("", rest));
    for part in middle.split('*') {
        let Some(at) = text.find(part) else { return false };
        text = &text[at + part.len()..];
    }
    text.ends_with(last)
}

/// Writes a line of a list of models.
impl fmt::Display for ModelFiles {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let quant = self.quant.as_deref().unwrap_or("-");
        write!(f, "{quant:<9} {:>10}  {}", size(self.bytes), self.files[0])?;
        match self.files.len() {
            1 => Ok(()),
            n => write!(f, " ({n} files)"),
        }
    }
}

/// Formats a size for users.
pub(crate) fn size(bytes: u64) -> String {
    const MIB: f64 = (1 << 20) as f64;
    let mib = bytes as f64 / MIB;
    if mib < 1024.0 { format!("{mib:.1} MiB") } else { format!("{:.1} GiB", mib / 1024.0) }
}

/// The common part of the names of a split model's files, `MODEL-00001-of-00003.gguf`.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
struct SplitFile<'a> {
    /// The name before the number.
    model: &'a str,
    /// The number of files.
    count: u32,
    /// The extension, which may be in upper case.
    ending: &'a str,
}

impl<'a> SplitFile<'a> {
    /// Parses the name of a split model's file; `None`: another name.
    fn of(file: &'a str) -> Option<Self> {
        let (stem, ending) = file.split_at_checked(file.len().checked_sub(ENDING)?)?;
        let (rest, count) = stem.rsplit_once("-of-")?;
        let (model, number) = rest.rsplit_once('-')?;
        let digits = |text: &str| {
            let digits = text.len() == 5 && text.bytes().all(|byte| byte.is_ascii_digit());
            digits.then(|| text.parse::<u32>().ok()).flatten()
        };
        let (number, count) = (digits(number)?, digits(count)?);
        (1..=count).contains(&number).then_some(Self { model, count, ending })
    }
}

/// A file's name, with its folders, without the ending and the number of the part.
pub(crate) fn split_stem(file: &str) -> &str {
    let without_ending = || file.len().checked_sub(ENDING).and_then(|at| file.get(..at)).unwrap_or(file);
    SplitFile::of(file).map_or_else(without_ending, |part| part.model)
}

/// The tensor type in a file's name without its extension: the last part that looks like one.
pub(crate) fn quant_in(stem: &str) -> Option<String> {
    let name = stem.rsplit('/').next().unwrap_or(stem);
    let parts: Vec<_> = name.split(['-', '.']).collect();
    let at = parts.iter().rposition(|part| is_quant(part))?;
    let quant = parts[at].to_ascii_uppercase();
    let dynamic = at > 0 && parts[at - 1].eq_ignore_ascii_case("UD");
    Some(if dynamic { format!("{DYNAMIC}{quant}") } else { quant })
}

/// Whether `part` is the name of a tensor type: `Q4_K_M`, `IQ2_XXS`, `TQ1_0`, `MXFP4`, `BF16`.
pub(crate) fn is_quant(part: &str) -> bool {
    let part = part.to_ascii_uppercase();
    let numbered =
        |prefix| part.strip_prefix(prefix).is_some_and(|rest: &str| rest.starts_with(|c: char| c.is_ascii_digit()));
    matches!(part.as_str(), "F16" | "F32" | "BF16" | "FP16" | "FP32")
        || part.starts_with("MXFP4")
        || ["Q", "IQ", "TQ"].into_iter().any(numbered)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(files: &[&'static str]) -> Vec<ModelFiles> {
        models(files.iter().map(|&name| (name, 1 << 20)))
    }

    #[test]
    fn types_are_found_in_names() {
        for (name, expected) in [
            ("SmolLM-135M-Instruct-Q4_K_M", Some("Q4_K_M")),
            ("qwen2.5-0.5b-instruct-q4_0", Some("Q4_0")),
            ("mistral-7b.Q8_0", Some("Q8_0")),
            ("Q4_0/model", None),
            ("Qwen3-4B-UD-Q4_K_XL", Some("UD-Q4_K_XL")),
            ("gemma-IQ4_XS-imat", Some("IQ4_XS")),
            ("gpt-oss-20b-mxfp4", Some("MXFP4")),
            ("model-bf16", Some("BF16")),
            ("Qwen2-7B", None),
            ("stories260K", None),
        ] {
            assert_eq!(quant_in(name).as_deref(), expected, "{name}");
        }
    }

    #[test]
    fn files_of_a_split_model_are_grouped() {
        let found = names(&[
            "b/m-Q8_0-00002-of-00002.gguf",
            "b/m-Q8_0-00001-of-00002.gguf",
            "m-Q4_0-00001-of-00003.gguf",
            "m-00004-of-00003.gguf",
            "README.md",
            "../evil.gguf",
            "a/../../evil.gguf",
            "/etc/evil.gguf",
            "a\\evil.gguf",
            ".gguf",
        ]);
        let files: Vec<_> =
            found.iter().map(|m| (m.files.len(), m.quant.as_deref(), m.bytes >> 20, m.complete)).collect();
        assert_eq!(files, [(2, Some("Q8_0"), 2, true), (1, None, 1, true), (1, Some("Q4_0"), 1, false)]);
        assert_eq!(found[0].files, ["b/m-Q8_0-00001-of-00002.gguf", "b/m-Q8_0-00002-of-00002.gguf"]);
        assert_eq!(found[0].to_string(), "Q8_0         2.0 MiB  b/m-Q8_0-00001-of-00002.gguf (2 files)");
    }

    #[test]
    fn a_usual_type_is_chosen_by_default() {
        let pick = |files: &[&'static str], which: Which| match choose(&names(files), &which) {
            Ok(model) => model.files[0].clone(),
            Err(why) => format!("{why:?}"),
        };
        let all = ["m-Q2_K.gguf", "m-Q4_0.gguf", "m-Q4_K_M.gguf", "mmproj-m-Q4_K_M.gguf"];
        for mmproj in ["mmproj-model-f16.gguf", "m-mmproj-F16.gguf", "mmproj/m-f16.gguf"] {
            assert_eq!(pick(&[mmproj, "m-Q2_K.gguf"], Which::Default), "m-Q2_K.gguf");
            assert_eq!(pick(&[mmproj, "m-Q2_K.gguf"], Which::Quant("F16".into())), "Missing");
            assert_eq!(pick(&[mmproj, "m-Q2_K.gguf"], Which::Pattern("*.gguf".into())), "m-Q2_K.gguf");
        }
        let quant = |q: &str| Which::Quant(q.into());
        let file = |f: &str| Which::File(f.into());
        assert_eq!(pick(&all, Which::Default), "m-Q4_K_M.gguf");
        assert_eq!(pick(&all[..2], Which::Default), "m-Q4_0.gguf");
        assert_eq!(pick(&all[..1], Which::Default), "m-Q2_K.gguf");
        assert_eq!(pick(&all[3..], Which::Default), "Missing");
        assert_eq!(pick(&["m-Q2_K.gguf", "m-Q8_0.gguf"], Which::Default), "Several");
        assert_eq!(pick(&["a-Q4_0.gguf", "b-Q4_0.gguf"], Which::Default), "Several");
        assert_eq!(pick(&all, quant("q2_k")), "m-Q2_K.gguf");
        assert_eq!(pick(&all, quant("Q4_K_M")), "m-Q4_K_M.gguf");
        assert_eq!(pick(&all, quant("Q4")), "Missing");
        assert_eq!(pick(&all, file("mmproj-m-Q4_K_M.gguf")), "mmproj-m-Q4_K_M.gguf");
        assert_eq!(pick(&all, file("m.gguf")), "Missing");
    }

    #[test]
    fn patterns_choose_by_the_files_name() {
        for (pattern, text, expected) in [
            ("a.gguf", "A.GGUF", true),
            ("a.gguf", "ba.gguf", false),
            ("*q4_k_m*.gguf", "x-Q4_K_M.gguf", true),
            ("*q4_k_m*.gguf", "x-Q4_K_S.gguf", false),
            ("m-*-of-00002.gguf", "m-00001-of-00002.gguf", true),
            ("a*a", "a", false),
            ("*b*b*", "abcb", true),
            ("*b*b*", "abc", false),
            ("*", "", true),
        ] {
            assert_eq!(matches(pattern, text), expected, "{pattern} {text}");
        }
        let pick = |files: &[&'static str], pattern: &str| match choose(&names(files), &Which::Pattern(pattern.into()))
        {
            Ok(model) => model.files[0].clone(),
            Err(why) => format!("{why:?}"),
        };
        let all = ["f/m-Q4_K_M.gguf", "m-UD-Q4_K_M.gguf", "m-Q8_0.gguf", "mmproj-Q4_K_M.gguf"];
        assert_eq!(pick(&all, "*Q4_K_M*.gguf"), "f/m-Q4_K_M.gguf");
        assert_eq!(pick(&all[1..], "*q4_k_m*.gguf"), "m-UD-Q4_K_M.gguf");
        assert_eq!(pick(&all, "m-q4_k_m.gguf"), "f/m-Q4_K_M.gguf");
        assert_eq!(pick(&all, "*Q2_K*.gguf"), "Missing");
        assert_eq!(pick(&["a-Q4_0.gguf", "b-Q4_0.gguf"], "*Q4_0.gguf"), "Several");
    }

    #[test]
    fn duplicate_names_do_not_complete_a_model() {
        let one = "m-00001-of-00002.gguf";
        let found = names(&[one, one, "M.gguf", "M.gguf"]);
        assert_eq!(found.iter().map(|m| (m.files.len(), m.complete)).collect::<Vec<_>>(), [(1, true), (1, false)]);
        // An extension in other case, or a number with a sign, is another file.
        let found = names(&[one, "m-00001-of-00002.GGUF", "m-+0002-of-00002.gguf"]);
        assert!(found.iter().all(|m| m.files.len() == 1), "{found:?}");
        assert_eq!(found.iter().filter(|m| m.complete).count(), 1);
    }

    #[test]
    fn many_files_are_grouped_in_linear_time() {
        // With quadratic time this takes minutes.
        let n = 200_000u32;
        let single = (0..n).map(|i| format!("m{i}-Q4_0.gguf"));
        let parts = (0..n).map(|i| format!("p{}-Q8_0-{:05}-of-00002.gguf", i / 2, i % 2 + 1));
        let split = (0..50_000).map(|i| format!("s-Q2_K-{:05}-of-50000.gguf", i + 1));
        let files: Vec<_> = single.chain(parts).chain(split).rev().collect();
        let found = models(files.iter().map(|name| (name.as_str(), 1)));
        assert_eq!(found.len(), 300_001);
        assert!(found.iter().all(|model| model.complete));
        let last = choose(&found, &Which::File("s-Q2_K-49999-of-50000.gguf".into())).unwrap();
        assert_eq!((last.files.len(), last.bytes), (50_000, 50_000));
        assert_eq!(choose(&found, &Which::Default), Err(Unchosen::Several));
    }
}
