//! The families of picture encoders: one file for each, which makes a [`VisionModel`] from an `mmproj` file, and one
//! table of the names of projectors. Nothing else looks at these names.
//!
//! In these files `r` is the file.

mod dots_ocr;
mod gemma;
mod glm4v;
mod idefics3;
mod internvl;
mod kimi;
mod lfm2;
mod llama4;
mod llava;
mod minicpmv;
mod mobilenet;
mod paddleocr;
mod pixtral;
mod qwen;

use metal_attention_gguf::GgufFile;

use crate::ModelError;
use crate::vision::{EncoderActivation, EncoderReader, FileWeights, Stage, VisionModel};

/// A function that makes a family's model.
type FamilyReader = fn(&EncoderReader<'_>) -> Result<VisionModel, ModelError>;

/// Every projector by its name in `clip.projector_type` or `clip.vision.projector_type`, with its function.
#[rustfmt::skip]
const PROJECTORS: &[(&str, FamilyReader)] = &[
    ("dots_ocr",         dots_ocr::dots_ocr),
    ("gemma3",           gemma::gemma3),
    ("gemma3nv",         mobilenet::gemma3nv),
    ("gemma4uv",         gemma::gemma4uv),
    ("gemma4v",          gemma::gemma4v),
    ("glm4v",            glm4v::glm4v),
    ("idefics3",         idefics3::idefics3),
    ("internvl",         internvl::internvl),
    ("janus_pro",        llava::janus_pro),
    ("kimik25",          kimi::kimik25),
    ("kimivl",           kimi::kimivl),
    ("lfm2",             lfm2::lfm2),
    ("lightonocr",       pixtral::lightonocr),
    ("llama4",           llama4::llama4),
    ("minicpmv4_6",      minicpmv::minicpmv46),
    ("mlp",              llava::mlp),
    ("paddleocr",        paddleocr::paddleocr),
    ("phi4",             llava::phi4),
    ("pixtral",          pixtral::pixtral),
    ("qwen2.5vl_merger", qwen::qwen25vl),
    ("qwen2vl_merger",   qwen::qwen2vl),
    ("qwen3vl_merger",   qwen::qwen3vl),
    ("resampler",        minicpmv::resampler),
];

impl VisionModel {
    /// Reads an `mmproj` file.
    ///
    /// # Errors
    ///
    /// The file has no picture encoder, or one of an unknown family; a key or a tensor is missing or has an implausible value or
    /// shape.
    pub fn from_gguf(file: &GgufFile) -> Result<Self, ModelError> {
        let metadata = file.metadata();
        let of_key = |key: &str| metadata.str(key).map(|name| name.map(str::to_owned));
        let name = match of_key("clip.vision.projector_type")? {
            Some(name) => name,
            None => of_key("clip.projector_type")?
                .ok_or_else(|| ModelError::MissingKey { key: "clip.projector_type".into() })?,
        };
        let family = PROJECTORS.iter().find(|(known, _)| *known == name).map(|(_, family)| family);
        let family = family.ok_or_else(|| ModelError::UnsupportedFeature {
            key: "clip.projector_type".into(),
            value: name,
            why: "no encoder of that family is known",
        })?;
        family(&EncoderReader::new(file)?)
    }
}

/// Two matrices with an activation between them, as most projectors are.
fn two_layers(
    r: &EncoderReader<'_>,
    [first, second]: [&str; 2],
    n_in: usize,
    activation: EncoderActivation,
) -> Result<[Stage<FileWeights>; 3], ModelError> {
    let first = r.linear(first, n_in, None)?;
    let second = r.linear(second, first.n_out, Some(r.n_embd))?;
    Ok([Stage::Linear(first), Stage::Activation(activation), Stage::Linear(second)])
}
