//! Prediction heads (multi-token prediction): blocks behind a model's last layer that predict further tokens.
//!
//! The function of an architecture reads these blocks as if they were layers; each becomes a model of its own.

use crate::metadata_reader::MetadataReader;
use crate::spec::{Norm, NormKind};
use crate::state_input::{HeadUse, JoinedState, StateInput};
use crate::{ModelError, ModelSpec};

/// How an architecture's heads differ from its layers.
struct HeadTraits {
    /// Value of `general.architecture`.
    architecture: &'static str,
    /// How they propose drafts.
    heads: HeadUse,
    /// The formula of a head's last norm, where it is one of its own.
    last_norm: NormKind,
}

/// The architectures whose heads are implemented.
#[rustfmt::skip]
const HEADS: &[HeadTraits] = &[
    HeadTraits { architecture: "deepseek2",      heads: HeadUse::Repeated, last_norm: NormKind::Rms },
    HeadTraits { architecture: "glm4moe",        heads: HeadUse::Repeated, last_norm: NormKind::Rms },
    HeadTraits { architecture: "hy_v3",          heads: HeadUse::Repeated, last_norm: NormKind::Rms },
    HeadTraits { architecture: "nemotron_h_moe", heads: HeadUse::Repeated, last_norm: NormKind::Layer },
    HeadTraits { architecture: "qwen35",         heads: HeadUse::Repeated, last_norm: NormKind::Rms },
    HeadTraits { architecture: "qwen35moe",      heads: HeadUse::Repeated, last_norm: NormKind::Rms },
    HeadTraits { architecture: "qwen3next",      heads: HeadUse::Repeated, last_norm: NormKind::Rms },
    HeadTraits { architecture: "step35",         heads: HeadUse::Chained,  last_norm: NormKind::Rms },
];

/// The specs of the heads, each a model of one layer; empty if the file has none.
pub(crate) fn read_heads(k: &MetadataReader<'_>) -> Result<Vec<ModelSpec>, ModelError> {
    let (n_head, first) = (k.n_prediction_heads()?, k.n_layer_without_heads()?);
    // Some files have the key, but were made without the heads.
    if n_head == 0 || !k.has_tensor(&format!("blk.{first}.nextn.eh_proj.weight"), true) {
        return Ok(Vec::new());
    }
    let Some(traits) = HEADS.iter().find(|traits| traits.architecture == k.architecture()) else {
        let why = "the prediction heads of this architecture are not implemented: use the model without them";
        return Err(k.unsupported("nextn_predict_layers", n_head, why));
    };
    let all = super::read(&k.with_heads())?;
    // Where one head proposes all drafts, it is the first.
    let n_head = match traits.heads {
        HeadUse::Repeated | HeadUse::Eagle => 1,
        HeadUse::Chained => n_head,
    };
    (first..first + n_head).map(|block| head(k, traits, &all, block)).collect()
}

/// The head of block `block`. `all`: the model with the blocks of all heads as layers.
fn head(k: &MetadataReader<'_>, traits: &HeadTraits, all: &ModelSpec, block: usize) -> Result<ModelSpec, ModelError> {
    let layer = &all.layers[block];
    let shares_keys = layer.mixer.attention().is_some_and(|a| !a.owns_cache());
    k.check("nextn_predict_layers", block, !shares_keys, "a prediction head cannot read another layer's keys")?;
    let norm = k.norm(NormKind::Rms)?;
    let own = |stem: &str| k.has_tensor(&format!("blk.{block}.{stem}.weight"), true);
    let mut output = all.output.clone();
    if let Some(stem) = ["nextn.shared_head_norm", "layer_output_norm"].into_iter().find(|stem| own(stem)) {
        output.norm = Some(Norm { has_bias: false, ..k.norm(traits.last_norm)?.with_tensor(stem) });
    }
    let mut embedding = all.embedding.clone();
    embedding.state = Some(StateInput::Joined(JoinedState {
        embedding_norm: norm.with_tensor("nextn.enorm"),
        state_norm: norm.with_tensor("nextn.hnorm"),
        heads: traits.heads,
    }));
    Ok(ModelSpec { layers: vec![layer.clone()], first_block: block, embedding, output, ..all.clone() })
}
