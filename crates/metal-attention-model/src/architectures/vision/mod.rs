//! The families of picture encoders: one file for each, which makes a [`VisionModel`] from an `mmproj` file, and one
//! table of the names of projectors. Nothing else looks at these names.
//!
//! In these files `r` is the file.

mod cogvlm;
mod deepseek;
mod dots_ocr;
mod gemma;
mod glm4v;
mod glm_edge;
mod hunyuan;
mod idefics3;
mod internvl;
mod kimi;
mod lfm2;
mod llama4;
mod llava;
mod minicpmv;
mod mobilenet;
mod muse_glimmer;
mod nemotron;
mod paddleocr;
mod pixtral;
mod qwen;
mod youtu;

use metal_attention_gguf::GgufFile;

use crate::ModelError;
use crate::vision::{EncoderActivation, EncoderReader, FileWeights, Stage, VisionModel};

/// A function that makes a family's model.
type FamilyReader = fn(&EncoderReader<'_>) -> Result<VisionModel, ModelError>;

/// Every projector by its name in `clip.projector_type` or `clip.vision.projector_type`, with the models that have it and its
/// function.
#[rustfmt::skip]
const PROJECTORS: &[(&str, &str, FamilyReader)] = &[
    ("adapter",          "GLM-Edge-V",                                            glm_edge::adapter),
    ("cogvlm",           "CogVLM, CogVLM2",                                       cogvlm::cogvlm),
    ("deepseekocr",      "DeepSeek-OCR, Unlimited-OCR",                           deepseek::deepseekocr),
    ("deepseekocr2",     "DeepSeek-OCR 2",                                        deepseek::deepseekocr2),
    ("dots_ocr",         "dots.ocr",                                              dots_ocr::dots_ocr),
    ("exaone4_5",        "EXAONE 4.5",                                            qwen::exaone45),
    ("gemma3",           "Gemma 3 4B, 12B, 27B",                                  gemma::gemma3),
    ("gemma3nv",         "Gemma 3n E2B, E4B",                                     mobilenet::gemma3nv),
    ("gemma4uv",         "Gemma 4 unified",                                       gemma::gemma4uv),
    ("gemma4v",          "Gemma 4",                                               gemma::gemma4v),
    ("glm4v",            "GLM-4.1V, GLM-4.5V, GLM-4.6V, GLM-OCR",                 glm4v::glm4v),
    ("glm5v",            "GLM-5V",                                                glm4v::glm5v),
    ("hunyuanvl",        "HunyuanOCR",                                            hunyuan::hunyuanvl),
    ("idefics3",         "Idefics3, SmolVLM",                                     idefics3::idefics3),
    ("internvl",         "InternVL 2.5, 3, 3.5",                                  internvl::internvl),
    ("janus_pro",        "Janus-Pro",                                             llava::janus_pro),
    ("kimik25",          "Kimi K2.5, GLM-5.2-V",                                  kimi::kimik25),
    ("kimivl",           "Kimi-VL",                                               kimi::kimivl),
    ("ldpv2",            "MobileVLM V2",                                          llava::ldpv2),
    ("lfm2",             "LFM2-VL, LFM2.5-VL",                                    lfm2::lfm2),
    ("lightonocr",       "LightOnOCR",                                            pixtral::lightonocr),
    ("ling3vl",          "Ling 3 VL",                                             qwen::ling3vl),
    ("llama4",           "Llama 4 Scout, Maverick",                               llama4::llama4),
    ("minicpmv4_6",      "MiniCPM-V 4.6",                                         minicpmv::minicpmv46),
    ("mlp",              "LLaVA 1.5, 1.6; Granite Vision 3",                      llava::mlp),
    ("muse-glimmer",     "Muse Glimmer",                                          muse_glimmer::muse_glimmer),
    ("nemotron_v2_vl",   "Nemotron Nano VL 12B v2",                               nemotron::nemotron_v2_vl),
    ("paddleocr",        "PaddleOCR-VL",                                          paddleocr::paddleocr),
    ("phi4",             "Phi-4 reasoning vision",                                llava::phi4),
    ("pixtral",          "Pixtral; Mistral Small 3.1, 3.2; Ministral 3; Devstral 2", pixtral::pixtral),
    ("qwen2.5vl_merger", "Qwen2.5-VL",                                            qwen::qwen25vl),
    ("qwen2vl_merger",   "Qwen2-VL",                                              qwen::qwen2vl),
    ("qwen3vl_merger",   "Qwen3-VL, Qwen3.5",                                     qwen::qwen3vl),
    ("resampler",        "MiniCPM-V 2.5, 2.6, 4.0, 4.5",                          minicpmv::resampler),
    ("youtuvl",          "Youtu-VL",                                              youtu::youtuvl),
];

/// The names of the projectors of all families, with the models that have them, in the order of the names.
pub fn projectors() -> impl Iterator<Item = (&'static str, &'static str)> {
    PROJECTORS.iter().map(|(name, models, _)| (*name, *models))
}

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
        let family = PROJECTORS.iter().find(|(known, ..)| *known == name).map(|(.., family)| family);
        let family = family.ok_or_else(|| ModelError::UnsupportedFeature {
            key: "clip.projector_type".into(),
            value: name,
            why: "no encoder of that family is known",
        })?;
        let reader = EncoderReader::new(file)?;
        let model = family(&reader)?;
        check_rotations(&reader, &model.encoder.stages)?;
        Ok(model)
    }
}

/// An error unless each rotation of heads has an angle for each of their pairs of elements.
fn check_rotations(r: &EncoderReader<'_>, stages: &[Stage<FileWeights>]) -> Result<(), ModelError> {
    for stage in stages {
        let attention = match stage {
            Stage::Block(block) => &block.attention,
            Stage::Attention(attention) => attention,
            _ => continue,
        };
        if let Some(angles) = &attention.rope {
            let whole = 2 * angles.pairs.len() == attention.head_dim;
            let key = "vision.attention.head_count";
            r.keys.check(key, attention.n_head, whole, "makes heads whose elements cannot be rotated in pairs")?;
        }
    }
    Ok(())
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

/// The class token, before the patches as in the original models, with the first row of the table of positions.
fn class_token(r: &EncoderReader<'_>) -> Result<Stage<FileWeights>, ModelError> {
    let mut row = r.values("v.class_embd", r.width)?;
    let positions = r.all_values("v.position_embd.weight", r.width)?;
    row.iter_mut().zip(&positions).for_each(|(v, position)| *v += position);
    Ok(Stage::Others { before: row, after: Vec::new() })
}
