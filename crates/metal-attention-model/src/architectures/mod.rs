//! The architectures: one file for each family, which puts a [`ModelSpec`] together from a file's metadata, and one
//! table of their names. No backend uses `general.architecture`.
//!
//! In these files `k` is the metadata and `m` the spec under construction.

mod afmoe;
mod assistant;
mod bailing;
mod bert;
mod cohere;
mod dbrx;
mod decoder;
mod deepseek;
mod dflash;
mod eagle3;
mod eurobert;
mod exaone;
mod falcon_h1;
mod gemma;
mod glm;
mod gpt;
mod gpt_oss;
mod granite;
mod grok;
mod heads;
mod hunyuan;
mod kimi_linear;
mod laguna;
mod lfm;
mod llama;
mod mamba;
mod mellum;
mod minimax;
mod missing;
mod mistral;
mod modern_bert;
mod muse_glimmer;
mod nemotron_h;
mod olmo;
mod openelm;
mod phi;
mod plamo;
mod quantization;
mod qwen;
mod qwen_hybrid;
mod rwkv;
mod spark;
mod stablelm;
mod step35;
pub(crate) mod vision;

use crate::metadata_reader::MetadataReader;
use crate::{ModelError, ModelSpec};
pub(crate) use assistant::read_assistant;
pub(crate) use dflash::read_dflash;
pub use eagle3::Eagle3Spec;
pub(crate) use eagle3::read_eagle3;
pub(crate) use heads::read_heads;
pub(crate) use quantization::{QuantizationTraits, quantization_traits};

/// A function that makes a family's spec from its metadata.
type FamilyReader = fn(&MetadataReader<'_>) -> Result<ModelSpec, ModelError>;

/// Every architecture by its name in `general.architecture`, with its function.
#[rustfmt::skip]
const ARCHITECTURES: &[(&str, FamilyReader)] = &[
    ("afmoe",          afmoe::afmoe),
    ("arcee",          llama::arcee),
    ("arwkv7",         rwkv::arwkv7),
    ("baichuan",       llama::baichuan),
    ("bailingmoe",     bailing::bailingmoe),
    ("bailingmoe2",    bailing::bailingmoe2),
    ("bert",           bert::bert),
    ("bloom",          gpt::bloom),
    ("chatglm",        glm::chatglm),
    ("codeshell",      gpt::codeshell),
    ("cohere2",        cohere::cohere2),
    ("command-r",      cohere::command_r),
    ("dbrx",           dbrx::dbrx),
    ("deepseek",       deepseek::deepseek),
    ("deepseek2",      deepseek::deepseek2),
    ("deepseek2-ocr",  deepseek::deepseek_ocr),
    ("dots1",          deepseek::dots1),
    ("ernie4_5",       llama::neighbours),
    ("ernie4_5-moe",   llama::ernie_moe),
    ("eurobert",       eurobert::eurobert),
    ("exaone",         llama::halves),
    ("exaone4",        exaone::exaone4),
    ("exaone-moe",     exaone::exaone_moe),
    ("falcon",         gpt::falcon),
    ("falcon-h1",      falcon_h1::falcon_h1),
    ("gemma",          gemma::gemma),
    ("gemma2",         gemma::gemma2),
    ("gemma3",         gemma::gemma3),
    ("gemma3n",        gemma::gemma3n),
    ("gemma4",         gemma::gemma4),
    ("gemma-embedding",gemma::embedding),
    ("glm4",           glm::glm4),
    ("glm4moe",        glm::glm4moe),
    ("gpt2",           gpt::gpt2),
    ("gptneox",        gpt::gptneox),
    ("gpt-oss",        gpt_oss::gpt_oss),
    ("granite",        granite::granite),
    ("granitehybrid",  granite::granite_hybrid),
    ("granitemoe",     granite::granite),
    ("grok",           grok::grok),
    ("hunyuan-dense",  hunyuan::hunyuan_dense),
    ("hunyuan-moe",    hunyuan::hunyuan),
    ("hunyuan_vl",     hunyuan::hunyuan_vl),
    ("hy_v3",          hunyuan::hunyuan3),
    ("internlm2",      llama::neighbours),
    ("jais",           gpt::jais),
    ("jais2",          gpt::jais2),
    ("jamba",          mamba::jamba),
    ("jina-bert-v2",   bert::jina_v2),
    ("jina-bert-v3",   bert::jina_v3),
    ("kimi-linear",    kimi_linear::kimi_linear),
    ("laguna",         laguna::laguna),
    ("lfm2",           lfm::lfm2),
    ("lfm2moe",        lfm::lfm2moe),
    ("llama",          llama::neighbours),
    ("llama4",         llama::llama4),
    ("llama-embed",    llama::embed),
    ("maincoder",      llama::maincoder),
    ("mamba",          mamba::mamba),
    ("mamba2",         mamba::mamba2),
    ("mellum",         mellum::mellum),
    ("minicpm",        granite::minicpm),
    ("minicpm3",       granite::minicpm3),
    ("minimax-m2",     minimax::minimax_m2),
    ("mistral3",       mistral::mistral3),
    ("mistral4",       deepseek::deepseek2),
    ("modern-bert",    modern_bert::modern_bert),
    ("mpt",            gpt::mpt),
    ("muse-glimmer",   muse_glimmer::muse_glimmer),
    ("nemotron",       gpt::nemotron),
    ("nemotron_h",     nemotron_h::nemotron_h),
    ("nemotron_h_moe", nemotron_h::nemotron_h),
    ("neo-bert",       eurobert::neo_bert),
    ("nomic-bert",     bert::nomic),
    ("nomic-bert-moe", bert::nomic_moe),
    ("olmo",           olmo::olmo),
    ("olmo2",          olmo::olmo2),
    ("olmoe",          olmo::olmoe),
    ("openelm",        openelm::openelm),
    ("orion",          llama::orion),
    ("paddleocr",      llama::paddleocr),
    ("pangu-embedded", llama::halves),
    ("phi2",           phi::phi2),
    ("phi3",           phi::phi3),
    ("phimoe",         phi::phimoe),
    ("plamo",          plamo::plamo),
    ("plamo2",         plamo::plamo2),
    ("plm",            deepseek::plm),
    ("qwen",           qwen::qwen),
    ("qwen2",          qwen::qwen2),
    ("qwen2moe",       qwen::qwen2moe),
    ("qwen2vl",        qwen::qwen2vl),
    ("qwen3",          qwen::qwen3),
    ("qwen35",         qwen_hybrid::qwen35),
    ("qwen35moe",      qwen_hybrid::qwen35moe),
    ("qwen3moe",       qwen::qwen3moe),
    ("qwen3next",      qwen_hybrid::qwen3next),
    ("qwen3vl",        qwen::qwen3vl),
    ("qwen3vlmoe",     qwen::qwen3vlmoe),
    ("refact",         llama::refact),
    ("rwkv6",          rwkv::rwkv6),
    ("rwkv6qwen2",     rwkv::rwkv6qwen2),
    ("rwkv7",          rwkv::rwkv7),
    ("seed_oss",       llama::seed_oss),
    ("smollm3",        llama::smollm3),
    ("spark2_5",       spark::spark2_5),
    ("stablelm",       stablelm::stablelm),
    ("starcoder",      gpt::gpt2),
    ("starcoder2",     gpt::starcoder2),
    ("step35",         step35::step35),
    ("xverse",         llama::xverse),
];

/// The names of all architectures.
pub(crate) fn names() -> impl Iterator<Item = &'static str> {
    ARCHITECTURES.iter().map(|(name, _)| *name)
}

/// The spec of the model with this metadata.
pub(crate) fn read(keys: &MetadataReader<'_>) -> Result<ModelSpec, ModelError> {
    let architecture = keys.architecture();
    match ARCHITECTURES.iter().find(|(name, _)| *name == architecture) {
        Some((_, read)) => {
            let spec = read(keys)?;
            spec.check_residuals()?;
            Ok(spec)
        }
        None if missing::DRAFTERS.contains(&architecture) => {
            Err(ModelError::DrafterAlone { architecture: architecture.to_owned() })
        }
        None => Err(ModelError::UnsupportedArchitecture {
            architecture: architecture.to_owned(),
            missing: missing::part(architecture),
            supported: names().collect(),
        }),
    }
}
