//! The sampling options that a model's file recommends: the keys `general.sampling.*`, as llama.cpp reads them.

use metal_attention_gguf::{Metadata, Value};

use super::{NumberOption, SamplerKind, SamplerOptions};

impl SamplerOptions {
    /// Metadata key by which a file recommends the samplers' order: names separated by `;`.
    pub const SEQUENCE_KEY: &str = "general.sampling.sequence";

    /// The defaults, replaced by what `metadata` recommends. A value that is not a number or is out of range is logged
    /// and ignored; names of unknown samplers are ignored. Mirostat is not supported.
    pub fn recommended(metadata: &Metadata) -> Self {
        let mut options = Self::default();
        for option in NumberOption::ALL {
            let Some((key, value)) = option.metadata_key.and_then(|key| Some((key, metadata.get(key)?))) else {
                continue;
            };
            match number(value).map(|number| option.set(&mut options, number)) {
                Some(Ok(())) => {}
                Some(Err(why)) => tracing::warn!(key, "ignored: {why}"),
                None => tracing::warn!(key, "ignored: the value is no number"),
            }
        }
        if let Ok(Some(names)) = metadata.str(Self::SEQUENCE_KEY) {
            let order: Vec<SamplerKind> = names.split(';').filter_map(|name| name.trim().parse().ok()).collect();
            if order.is_empty() {
                tracing::warn!(key = Self::SEQUENCE_KEY, "ignored: no name of a sampler in {names:?}");
            } else {
                options.order = order;
            }
        }
        options
    }
}

/// A number, or a string that is one, as llama.cpp accepts both.
fn number(value: &Value) -> Option<f64> {
    match value {
        Value::U8(n) => Some(f64::from(*n)),
        Value::I8(n) => Some(f64::from(*n)),
        Value::U16(n) => Some(f64::from(*n)),
        Value::I16(n) => Some(f64::from(*n)),
        Value::U32(n) => Some(f64::from(*n)),
        Value::I32(n) => Some(f64::from(*n)),
        Value::U64(n) => Some(*n as f64),
        Value::I64(n) => Some(*n as f64),
        Value::F32(n) => Some(f64::from(*n)),
        Value::F64(n) => Some(*n),
        Value::String(text) => text.trim().parse().ok(),
        Value::Bool(_) | Value::Array(_) => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_recommends_sampling() {
        let mut metadata = Metadata::new();
        assert_eq!(SamplerOptions::recommended(&metadata), SamplerOptions::default());
        metadata.set("general.sampling.temp", 0.6f32);
        metadata.set("general.sampling.top_k", 20i32);
        metadata.set("general.sampling.top_p", "0.9");
        metadata.set("general.sampling.penalty_last_n", -1i32);
        metadata.set("general.sampling.penalty_repeat", 1.1f32);
        metadata.set("general.sampling.xtc_probability", 0.25f32);
        metadata.set("general.sampling.sequence", "top_k;nonsense;temp");
        let expected = SamplerOptions {
            temperature: 0.6,
            top_k: 20,
            top_p: 0.9,
            penalty_last_n: usize::MAX,
            repeat_penalty: 1.1,
            xtc_probability: 0.25,
            order: vec![SamplerKind::TopK, SamplerKind::Temperature],
            ..Default::default()
        };
        assert_eq!(SamplerOptions::recommended(&metadata), expected);
    }

    #[test]
    fn invalid_recommendations_are_ignored() {
        let mut metadata = Metadata::new();
        metadata.set("general.sampling.temp", f32::NAN);
        metadata.set("general.sampling.top_p", 7.0f32);
        metadata.set("general.sampling.min_p", true);
        metadata.set("general.sampling.top_k", "many");
        metadata.set("general.sampling.sequence", ";");
        metadata.set("general.sampling.mirostat", 2i32);
        assert_eq!(SamplerOptions::recommended(&metadata), SamplerOptions::default());
    }
}
