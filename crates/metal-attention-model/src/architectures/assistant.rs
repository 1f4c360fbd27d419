//! Assistants: models without keys and values of their own, which draft for the target model whose they read.

use super::gemma::gemma4_with_own_keys;
use super::missing;
use crate::attention::{KvSource, Mask};
use crate::metadata_reader::MetadataReader;
use crate::spec::{AssistantEnds, HeadMatrix};
use crate::{ModelError, ModelSpec};

/// The architecture of the target, and that of the assistant.
const GEMMA_4: [&str; 2] = ["gemma4", "gemma4-assistant"];

/// What to do about an assistant that does not fit the target.
const OTHER_TARGET: &str = "that of the model beside it is another: use the model that the assistant was made for";

/// The tensors of an assistant that are in no block.
const OUTSIDE_OF_BLOCKS: [&str; 5] = [
    "token_embd.weight",
    "output_norm.weight",
    "rope_freqs.weight",
    "nextn.pre_projection.weight",
    "nextn.post_projection.weight",
];

/// The spec of the assistant with these metadata, for a model of `target`.
pub(crate) fn read_assistant(k: &MetadataReader<'_>, target: &ModelSpec) -> Result<ModelSpec, ModelError> {
    let [of_target, of_assistant] = GEMMA_4;
    if k.architecture() != of_assistant {
        return Err(ModelError::UnsupportedArchitecture {
            architecture: k.architecture().to_owned(),
            missing: missing::part(k.architecture()),
            supported: vec![of_assistant],
        });
    }
    if target.architecture != of_target {
        return Err(ModelError::InvalidValue {
            key: "general.architecture".into(),
            value: target.architecture.clone(),
            why: "the assistant drafts for Gemma 4 alone: use the model that the assistant was made for".into(),
        });
    }
    // Its blocks are counted as prediction heads.
    let k = &k.with_heads();
    let (mut m, windowed) = gemma4_with_own_keys(k)?;
    check_blocks(k, &m)?;
    let width = k.opt_positive("embedding_length_out")?.unwrap_or(target.n_embd);
    k.check("embedding_length_out", width, width == target.n_embd, OTHER_TARGET)?;
    k.check("vocab_size", m.n_vocab, m.n_vocab == target.n_vocab, OTHER_TARGET)?;
    m.embedding.scale = target.embedding.scale;
    m.embedding.assistant = Some(AssistantEnds { target_width: width });
    if let Some(head) = &mut m.output.head {
        // Its own embedding table.
        (head.soft_cap, head.matrix) = (None, HeadMatrix::EmbeddingTable);
    }
    let n_layer = m.n_layer();
    for (i, a) in m.attention_mut() {
        let mask = match a.mask {
            // The token itself is in no cache.
            Mask::Window(n) => {
                k.check("attention.sliding_window", n, n >= 2, "an assistant attends to the tokens before its own")?;
                Mask::Window(n - 1)
            }
            mask => mask,
        };
        // Windowed layers read the last but one layer, the others the last one, or what these read.
        let named = target.n_layer().checked_sub(if windowed[i] { 2 } else { 1 });
        let layer = named.and_then(|named| target.layers[named].mixer.kv_cache_layer(named));
        let of_target = layer.and_then(|layer| Some((layer, target.layers[layer].mixer.attention()?)));
        let Some((layer, of_target)) = of_target else {
            return Err(k.unsupported("attention.shared_kv_layers", n_layer, OTHER_TARGET));
        };
        let keeps_all = match (mask, of_target.mask) {
            (_, Mask::Causal) => true,
            (Mask::Window(n), Mask::Window(of_target)) => n < of_target,
            (_, Mask::Window(_) | Mask::Chunk(_) | Mask::Full | Mask::SymmetricWindow(_)) => false,
        };
        k.check("attention.sliding_window_pattern", i, keeps_all, "the target keeps less than this layer attends to")?;
        let key = if windowed[i] { "attention.key_length_swa" } else { "attention.key_length" };
        k.check(key, a.head_dim, a.head_dim == of_target.head_dim, OTHER_TARGET)?;
        let divides = a.n_head.is_multiple_of(of_target.n_head_kv);
        k.check("attention.head_count", a.n_head, divides, "must be a multiple of the KV heads of the target")?;
        (a.mask, a.n_head_kv, a.value_norm, a.kv) = (mask, of_target.n_head_kv, None, KvSource::Target(layer));
    }
    m.check_residuals()?;
    check_tensors(k)?;
    Ok(m)
}

/// Checks that all blocks are of the assistant, and that none has keys and values of its own.
fn check_blocks(k: &MetadataReader<'_>, m: &ModelSpec) -> Result<(), ModelError> {
    let n_layer = m.n_layer();
    for key in ["nextn_predict_layers", "attention.shared_kv_layers"] {
        if let Some(n) = k.opt_usize(key)?.filter(|&n| n != n_layer) {
            return Err(k.unsupported(key, n, "an assistant reads the target's keys in all of its blocks"));
        }
    }
    for i in 0..n_layer {
        for name in ["attn_k", "attn_v", "attn_qkv"] {
            if k.has_tensor(&format!("blk.{i}.{name}.weight"), false) {
                return Err(k.unsupported(
                    "attention.shared_kv_layers",
                    n_layer,
                    "a block has keys or values of its own",
                ));
            }
        }
    }
    match &m.embedding.per_layer {
        None => Ok(()),
        Some(p) => Err(k.unsupported(
            "embedding_length_per_layer_input",
            p.width,
            "an assistant has one embedding for all layers",
        )),
    }
}

/// Checks that the file has no other tensors outside of its blocks than those that are read: there may be newer ways between target
/// and assistant.
fn check_tensors(k: &MetadataReader<'_>) -> Result<(), ModelError> {
    match k.tensor_names().filter(|name| !name.starts_with("blk.")).find(|name| !OUTSIDE_OF_BLOCKS.contains(name)) {
        None => Ok(()),
        Some(name) => Err(ModelError::UnknownTensor { name: name.to_owned() }),
    }
}
