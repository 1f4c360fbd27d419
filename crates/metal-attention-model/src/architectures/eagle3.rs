//! EAGLE-3 (arXiv 2503.01840): a drafter of one layer that reads hidden rows of its target.

use std::fmt::Display;

use super::decoder::decoder;
use crate::metadata_reader::MetadataReader;
use crate::spec::{ModelSpec, NormKind, OutputSpec};
use crate::state_input::{AttendedState, ProjectedState, StateInput};
use crate::{ModelError, RopeLayout};

/// Most layers of the target whose rows are read; files have 3.
const MAX_TARGET_LAYERS: usize = 16;

/// The specifications of an EAGLE-3 drafter.
#[derive(Debug, Clone, PartialEq)]
pub struct Eagle3Spec {
    /// The layer, with a [`StateInput::Attended`].
    pub layer: ModelSpec,
    /// What makes its states of the target's rows, with a [`StateInput::Projected`].
    pub projection: ModelSpec,
    /// The rows of the target that make up a state, in order: `i` is the input of layer `i`, and the number of layers the output of the
    /// last one, before the output norm.
    pub target_layers: Vec<usize>,
}

/// Reads the drafter of a file for `target`.
pub(crate) fn read_eagle3(k: &MetadataReader<'_>, target: &ModelSpec) -> Result<Eagle3Spec, ModelError> {
    if k.architecture() != "eagle3" {
        return Err(ModelError::InvalidValue {
            key: "general.architecture".into(),
            value: k.architecture().to_owned(),
            why: "must be eagle3".into(),
        });
    }
    let n_layer = k.n_layer()?;
    k.check("block_count", n_layer, n_layer == 1, "drafters of EAGLE-3 have one layer")?;
    if let Some(n) = k.n_expert()? {
        return Err(k.unsupported("expert_count", n, "drafters with experts are not implemented"));
    }
    let target_layers = target_layers(k, target)?;
    let n_embd_target = k.positive("target_hidden_size")?;
    if n_embd_target != target.n_embd {
        return Err(other_target(k, "target_hidden_size", n_embd_target, &target.n_embd));
    }
    let norm = k.norm(NormKind::Rms)?;
    let m = decoder(k, NormKind::Rms, RopeLayout::Interleaved)?;
    let own_table = k.tensor_rows("token_embd.weight");
    let n_ids = own_table.unwrap_or(target.n_vocab);
    if n_ids < target.n_vocab {
        return Err(other_target(k, "vocab_size", n_ids, &target.n_vocab));
    }
    if own_table.is_none() && m.n_embd != target.n_embd {
        return Err(other_target(k, "embedding_length", m.n_embd, &target.n_embd));
    }
    let mut layer = ModelSpec {
        // The head may have rows for some of the tokens alone.
        n_vocab: k.tensor_rows("output.weight").unwrap_or(target.n_vocab),
        ..m
    };
    layer.embedding.n_rows = Some(n_ids);
    layer.embedding.state = Some(StateInput::Attended(AttendedState {
        embedding_norm: norm,
        state_norm: norm.with_tensor("attn_norm_2"),
        norms_residual: k.opt_bool("norm_before_residual")?.unwrap_or(false),
    }));
    // Attention reads the state beside the token, each with its own norm.
    layer.layers.iter_mut().for_each(|layer| layer.mixer_norm = None);
    let width = n_embd_target * target_layers.len();
    let norm_before = k.opt_bool("norm_before_fc")?.unwrap_or(false).then(|| norm.with_tensor("enc.output_norm"));
    let mut projection = ModelSpec {
        layers: Vec::new(),
        output: OutputSpec { norm: None, head: None, ..layer.output.clone() },
        ..layer.clone()
    };
    projection.embedding.state = Some(StateInput::Projected(ProjectedState { width, norm: norm_before }));
    Ok(Eagle3Spec { layer, projection, target_layers })
}

/// The rows of the target that make up a state.
fn target_layers(k: &MetadataReader<'_>, target: &ModelSpec) -> Result<Vec<usize>, ModelError> {
    let key = "target_layers";
    let layers = k.opt_sizes(key)?.ok_or_else(|| k.missing(key))?;
    let plausible = (1..=MAX_TARGET_LAYERS).contains(&layers.len());
    k.check(key, layers.len(), plausible, "1 to 16 layers of the target are read")?;
    match layers.iter().find(|&&layer| layer > target.n_layer()) {
        None => Ok(layers),
        Some(&layer) => Err(other_target(k, key, layer, &format!("{} layers", target.n_layer()))),
    }
}

/// The error for a drafter of another target.
pub(super) fn other_target(k: &MetadataReader<'_>, key: &str, found: usize, expected: &dyn Display) -> ModelError {
    ModelError::OtherTarget { key: k.key(key), found: found.to_string(), expected: expected.to_string() }
}
