//! A step's kernels, in the order of the paper.

mod alone;
mod attention;
mod delta_rule;
mod ends;
mod exchange;
mod experts;
mod feed_forward;
mod few;
mod grouped;
mod latent_attention;
mod layer;
mod mamba;
mod product;
mod rows;
mod rwkv;
mod short_conv;
mod streams;
mod top_k;
mod walk;
mod wide;

use std::sync::Arc;

use bytemuck::Pod;
use metal_attention_model::ModelSpec;

use crate::CudaError;
use crate::activations::Activations;
use crate::device::{CudaBuffer, CudaDevice, Kernels};
use crate::exchange::Exchange;
use crate::ids::Ids;
use crate::kv_cache::CudaKvCache;
use crate::launch::{Grid, Start};
use crate::profile::Timers;
use crate::state::{CudaStates, RunSizes};
use crate::weights::CudaWeights;

pub(crate) use experts::route_args;
pub(crate) use few::few_tokens;
pub(crate) use rows::room_for_rows;
pub(crate) use top_k::{TOP_K, top_k_bytes, top_k_list};
pub(crate) use wide::split_bytes;

/// What comes back of each wanted token.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Wanted {
    /// Its state after the last norm.
    Hidden,
    /// All its logits.
    Logits,
    /// The [`TOP_K`] highest, with their ids.
    TopK,
    /// The id of the largest. `advance`: the token goes on with it.
    Id { advance: bool },
}

/// What a step works on, and how much of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct StepSize {
    pub(crate) n_tokens: usize,
    pub(crate) n_wanted: usize,
    /// Runs of tokens of a sequence, cut into tiles of queries; 0: each token is alone in its sequence.
    pub(crate) n_query_tiles: usize,
    /// The runs of recurrent layers.
    pub(crate) runs: RunSizes,
    pub(crate) wanted: Wanted,
}

/// Everything that kernels are launched with.
pub(crate) struct Steps {
    pub(crate) gpu: Arc<CudaDevice>,
    pub(crate) kernels: Kernels,
    pub(crate) weights: CudaWeights,
    pub(crate) s: Activations,
    pub(crate) ids: Ids,
    pub(crate) exact: bool,
    /// Tokens up to which weights come straight to registers (`step/few.rs`).
    pub(crate) few_tokens: usize,
    /// Where several cards share the model.
    pub(crate) exchange: Option<Exchange>,
    /// Kernels launched so far, those of graphs when they were recorded.
    pub(crate) n_launches: u64,
    /// Where kernels are timed.
    pub(crate) timers: Option<Timers>,
}

/// What the parts of a step have in common.
#[derive(Clone, Copy)]
pub(crate) struct Step<'a> {
    pub(crate) spec: &'a ModelSpec,
    pub(crate) cache: &'a CudaKvCache,
    pub(crate) states: &'a CudaStates,
    pub(crate) size: StepSize,
}

impl Steps {
    /// Launches a kernel; a profile tells what it was for, too.
    fn launch<A: Pod>(&mut self, name: &str, what: &str, grid: Grid, args: &A) -> Result<(), CudaError> {
        let kernel = self.kernels.get(&self.gpu, name)?;
        self.n_launches += 1;
        match &mut self.timers {
            None => self.gpu.launch(kernel, grid, args, Start::Early),
            Some(timers) => timers
                .around(format!("{name} {what}").trim_end(), || self.gpu.launch(kernel, grid, args, Start::InTurn)),
        }
    }

    /// What is still to do when a token went through all layers, and the head, in one launch.
    pub(crate) fn after_one_launch(&mut self, n_vocab: usize, wanted: Wanted) -> Result<(), CudaError> {
        match wanted {
            Wanted::Hidden | Wanted::Id { advance: _ } => return Ok(()),
            Wanted::Logits | Wanted::TopK => {}
        }
        if let Some(exchange) = &mut self.exchange {
            // Those of the launch are counted.
            exchange.begin_step();
        }
        self.gather_logits(1, n_vocab)?;
        if wanted == Wanted::TopK {
            self.top_k(n_vocab, 1)?;
        }
        self.count_exchanges()
    }

    /// Launches all kernels of a step. `after_layer` comes after each layer.
    pub(crate) fn run(
        &mut self,
        spec: &ModelSpec,
        (cache, states): (&CudaKvCache, &CudaStates),
        size: StepSize,
        mut after_layer: impl FnMut(usize, &CudaBuffer) -> Result<(), CudaError>,
    ) -> Result<(), CudaError> {
        if let Some(exchange) = &mut self.exchange {
            exchange.begin_step();
        }
        self.embedding(spec, size.n_tokens)?;
        let step = Step { spec, cache, states, size };
        for i in 0..spec.n_layer() {
            // Taken out for as long as they are borrowed beside the kernels.
            let layers = std::mem::take(&mut self.weights.layers);
            let outcome = self.layer(step, i, &layers[i]);
            self.weights.layers = layers;
            outcome?;
            after_layer(i, &self.s.x)?;
        }
        if size.n_wanted > 0 {
            self.results(spec, size)?;
        }
        self.count_exchanges()
    }
}
