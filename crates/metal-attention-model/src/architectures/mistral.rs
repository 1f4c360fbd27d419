//! Mistral 3 (Ministral 3): Llama with YaRN and queries that grow with their position.

use super::llama;
use crate::attention::QueryTemperature;
use crate::metadata_reader::MetadataReader;
use crate::{ModelError, ModelSpec};

pub(super) fn mistral3(k: &MetadataReader<'_>) -> Result<ModelSpec, ModelError> {
    let mut m = llama::neighbours(k)?;
    if let Some(scale) = k.opt_f32("attention.temperature_scale")?.filter(|&scale| scale != 0.0) {
        let length = k.opt_positive("rope.scaling.original_context_length")?.unwrap_or(m.n_ctx_train);
        m.attention_mut().for_each(|(_, a)| a.temperature = Some(QueryTemperature { scale, length, offset: 0 }));
    }
    Ok(m)
}
