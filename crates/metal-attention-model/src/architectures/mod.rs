//! The architectures: one file a family, which puts a model together from the parts of [`ModelSpec`], and one table of their
//! names. `general.architecture` is looked at nowhere else.

mod bert;
mod cohere;
mod decoder;
mod deepseek;
mod exaone;
mod gemma;
mod glm;
mod gpt;
mod gpt_oss;
mod granite;
mod llama;
mod mistral;
mod modern_bert;
mod olmo;
mod phi;
mod qwen;
mod stablelm;

use crate::keys::Keys;
use crate::{ModelError, ModelSpec};

/// Reads a family's metadata.
type Reader = fn(&Keys<'_>) -> Result<ModelSpec, ModelError>;

/// Every architecture by its name in `general.architecture`, and what reads it.
#[rustfmt::skip]
const ARCHITECTURES: &[(&str, Reader)] = &[
    ("bert",            bert::bert),
    ("cohere2",         cohere::cohere2),
    ("command-r",       cohere::command_r),
    ("deepseek2",       deepseek::deepseek2),
    ("dots1",           deepseek::dots1),
    ("ernie4_5",        llama::neighbours),
    ("ernie4_5-moe",    llama::ernie_moe),
    ("exaone4",         exaone::exaone4),
    ("falcon",          gpt::falcon),
    ("gemma",           gemma::gemma),
    ("gemma2",          gemma::gemma2),
    ("gemma3",          gemma::gemma3),
    ("gemma3n",         gemma::gemma3n),
    ("gemma4",          gemma::gemma4),
    ("gemma-embedding", gemma::embedding),
    ("glm4",            glm::glm4),
    ("glm4moe",         glm::glm4moe),
    ("gpt2",            gpt::gpt2),
    ("gpt-oss",         gpt_oss::gpt_oss),
    ("gptneox",         gpt::gptneox),
    ("granite",         granite::granite),
    ("granitemoe",      granite::granite),
    ("hunyuan-dense",   llama::hunyuan),
    ("hunyuan-moe",     llama::hunyuan),
    ("internlm2",       llama::neighbours),
    ("jina-bert-v2",    bert::jina_v2),
    ("jina-bert-v3",    bert::jina_v3),
    ("llama",           llama::neighbours),
    ("llama4",          llama::llama4),
    ("llama-embed",     llama::embed),
    ("minicpm",         granite::minicpm),
    ("mistral3",        mistral::mistral3),
    ("modern-bert",     modern_bert::modern_bert),
    ("nomic-bert",      bert::nomic),
    ("nomic-bert-moe",  bert::nomic_moe),
    ("olmo",            olmo::olmo),
    ("olmo2",           olmo::olmo2),
    ("olmoe",           olmo::olmoe),
    ("phi2",            phi::phi2),
    ("phi3",            phi::phi3),
    ("phimoe",          phi::phimoe),
    ("qwen2",           qwen::qwen2),
    ("qwen2moe",        qwen::qwen2moe),
    ("qwen2vl",         qwen::qwen2),
    ("qwen3",           qwen::qwen3),
    ("qwen3moe",        qwen::qwen3moe),
    ("qwen3vl",         qwen::qwen3),
    ("qwen3vlmoe",      qwen::qwen3moe),
    ("seed_oss",        llama::seed_oss),
    ("smollm3",         llama::smollm3),
    ("stablelm",        stablelm::stablelm),
    ("starcoder2",      gpt::starcoder2),
];

/// The names of all architectures.
pub(crate) fn names() -> impl Iterator<Item = &'static str> {
    ARCHITECTURES.iter().map(|(name, _)| *name)
}

/// What the model is made of whose metadata these are.
pub(crate) fn read(keys: &Keys<'_>) -> Result<ModelSpec, ModelError> {
    let architecture = keys.architecture();
    match ARCHITECTURES.iter().find(|(name, _)| *name == architecture) {
        Some((_, read)) => read(keys),
        None => Err(ModelError::UnsupportedArchitecture {
            architecture: architecture.to_owned(),
            supported: names().collect(),
        }),
    }
}
