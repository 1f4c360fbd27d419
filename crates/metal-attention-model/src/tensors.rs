//! The tensors a model consists of, by GGUF name: one list that loading checks
//! a file against and that a writer of new files follows.

use crate::weights::ROPE_FREQS;
use crate::{FeedForward, LayerSpec, Mixer, ModelSpec};

/// A tensor that a model has.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorSpec {
    /// GGUF name, e.g. `blk.0.attn_q.weight`.
    pub name: String,
    /// GGUF order: row length first, then the number of rows.
    pub shape: Vec<usize>,
    /// Whether a file without it is broken; others may be left out.
    pub required: bool,
}

impl TensorSpec {
    /// Whether it is a matrix (which may be quantised) and not a vector (always F32).
    pub fn is_matrix(&self) -> bool {
        self.shape.len() > 1
    }
}

impl ModelSpec {
    /// Every tensor of the model in file order, optional ones included.
    pub fn tensors(&self) -> Vec<TensorSpec> {
        let mut list = List(Vec::new());
        let n_embd = self.n_embd;
        list.required("token_embd.weight", &[n_embd, self.n_vocab]);
        list.optional("output.weight", &[n_embd, self.n_vocab]);
        list.required("output_norm.weight", &[n_embd]);
        // All layers have the same: `Weights::load` checks it.
        if let Some(LayerSpec { mixer: Mixer::Attention(a), .. }) = self.layers.first() {
            list.optional(ROPE_FREQS, &[a.rope.n_rot / 2]);
        }
        for (i, layer) in self.layers.iter().enumerate() {
            let name = |role: &str| format!("blk.{i}.{role}");
            let Mixer::Attention(a) = &layer.mixer;
            let (n_q, n_kv) = (a.n_head * a.head_dim, a.n_head_kv * a.head_dim);
            list.required(&name("attn_norm.weight"), &[n_embd]);
            for (role, n_out) in [("attn_q", n_q), ("attn_k", n_kv), ("attn_v", n_kv)] {
                list.required(&name(&format!("{role}.weight")), &[n_embd, n_out]);
                list.push(name(&format!("{role}.bias")), &[n_out], a.qkv_bias);
            }
            if a.qk_norm {
                list.required(&name("attn_q_norm.weight"), &[a.head_dim]);
                list.required(&name("attn_k_norm.weight"), &[a.head_dim]);
            }
            list.required(&name("attn_output.weight"), &[n_q, n_embd]);
            list.optional(&name("attn_output.bias"), &[n_embd]);
            let FeedForward::Gated { n_ff, .. } = layer.feed_forward;
            list.required(&name("ffn_norm.weight"), &[n_embd]);
            for (role, n_in, n_out) in
                [("ffn_gate", n_embd, n_ff), ("ffn_up", n_embd, n_ff), ("ffn_down", n_ff, n_embd)]
            {
                list.required(&name(&format!("{role}.weight")), &[n_in, n_out]);
                list.optional(&name(&format!("{role}.bias")), &[n_out]);
            }
        }
        list.0
    }
}

struct List(Vec<TensorSpec>);

impl List {
    fn push(&mut self, name: String, shape: &[usize], required: bool) {
        self.0.push(TensorSpec { name, shape: shape.to_vec(), required });
    }

    fn required(&mut self, name: &str, shape: &[usize]) {
        self.push(name.to_owned(), shape, true);
    }

    fn optional(&mut self, name: &str, shape: &[usize]) {
        self.push(name.to_owned(), shape, false);
    }
}
