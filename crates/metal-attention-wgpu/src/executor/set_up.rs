//! Loads a model onto the GPU: [`WgpuExecutor::new`] makes every buffer, uploads the weights and compiles every
//! pipeline, so that evaluating a batch allocates and compiles nothing.

use std::sync::Arc;
use std::time::{Duration, Instant};

use metal_attention_gguf::Tensor;
use metal_attention_model::{BatchKind, CacheGroups, LoadedAssistant, LoadedModel, MemoryUse, Session, SessionOptions};

use super::{FLAG_BYTES, TOP_K, WgpuExecutor, WgpuForwardPass, log_persistent_layers};
use crate::activations::{ActivationWidths, Activations};
use crate::kv_cache::WgpuKvCache;
use crate::options::{WgpuTuning, capacity};
use crate::parts::{LayerPages, page_bytes, supports};
use crate::persistent_layers::{PersistentLayersBuilder, PlainLayer, workgroup_counts_to_try};
use crate::pipelines::PipelineCache;
use crate::plan::{MAX_GEMV_TOKENS, PlanBuilder, few_limits};
use crate::rope_tables::RopeTables;
use crate::spans::Spans;
use crate::state::WgpuStates;
use crate::waker::Waker;
use crate::weights::{Uploads, WgpuWeights};
use crate::{BatchBuffer, Readback, WgpuDevice, WgpuError};

/// The time that loading waits for the persistent kernel to be compiled. Until it is, the plans with a dispatch for
/// each kernel are used.
const PATIENCE: Duration = Duration::from_millis(700);

/// The executor of another model on the same GPU.
#[derive(Clone, Copy)]
struct First<'f> {
    /// The executor, whose ends are shared where they are the same.
    executor: &'f WgpuExecutor,
    /// Whether the model is an assistant of that one, whose KV cache it reads.
    is_target: bool,
}

impl WgpuExecutor {
    /// A session with a model, tuned by the GPU: see [`new`](Self::new).
    pub fn session(
        gpu: Arc<WgpuDevice>,
        model: &LoadedModel,
        options: &SessionOptions,
    ) -> Result<WgpuForwardPass, WgpuError> {
        Self::tuned_session(gpu, model, options, &WgpuTuning::default())
    }

    /// A session with a model: see [`new`](Self::new).
    pub fn tuned_session(
        gpu: Arc<WgpuDevice>,
        model: &LoadedModel,
        options: &SessionOptions,
        tuning: &WgpuTuning,
    ) -> Result<WgpuForwardPass, WgpuError> {
        Ok(Session::new(Self::new(gpu, model, options, tuning)?))
    }

    /// Loads a model onto `gpu`. Errors: an option out of range, a part of the model without kernels, too little
    /// memory, a pipeline that the driver rejects.
    pub fn new(
        gpu: Arc<WgpuDevice>,
        model: &LoadedModel,
        options: &SessionOptions,
        tuning: &WgpuTuning,
    ) -> Result<Self, WgpuError> {
        Self::with_first(gpu, model, options, tuning, None)
    }

    /// [`new`](Self::new) on the GPU of `first`, for a model that was [loaded beside](LoadedModel::load_beside) that of
    /// `first`: an embedding table and an output head that are those of `first` are not uploaded again, and their memory is
    /// not counted.
    pub fn beside(
        first: &Self,
        model: &LoadedModel,
        options: &SessionOptions,
        tuning: &WgpuTuning,
    ) -> Result<Self, WgpuError> {
        Self::with_first(
            Arc::clone(&first.gpu),
            model,
            options,
            tuning,
            Some(First { executor: first, is_target: false }),
        )
    }

    /// Sets up an assistant of the model of `target`, to be [attached](Session::attach_assistant) to its session: it reads the
    /// KV cache of `target`, and has none. Errors: as of [`new`](Self::new).
    pub fn assistant(
        target: &Self,
        assistant: &LoadedAssistant,
        options: &SessionOptions,
        tuning: &WgpuTuning,
    ) -> Result<Self, WgpuError> {
        let first = First { executor: target, is_target: true };
        Self::with_first(Arc::clone(&target.gpu), assistant.as_model(), options, tuning, Some(first))
    }

    /// [`new`](Self::new), or beside the executor `first`.
    fn with_first(
        gpu: Arc<WgpuDevice>,
        model: &LoadedModel,
        options: &SessionOptions,
        tuning: &WgpuTuning,
        first: Option<First<'_>>,
    ) -> Result<Self, WgpuError> {
        let (spec, weights) = (model.spec().clone(), model.weights());
        let target = first.filter(|first| first.is_target).map(|first| first.executor);
        let first = first.map_or(&[][..], |first| &first.executor.ends);
        let cache_capacity = capacity(options, &spec, gpu.summary().max_binding);
        if let Some((option, max)) = cache_capacity.out_of_range() {
            return Err(WgpuError::Option { option, max });
        }
        supports(&spec)?;
        let is_shared = |tensor: &&Tensor| first.iter().any(|(of_first, _)| of_first.is_same(tensor));
        let shared: u64 =
            weights.tensors().into_iter().filter(is_shared).map(|tensor| tensor.bytes().len() as u64).sum();
        let needed = Self::memory_needed(model, options, gpu.summary().max_binding).total().saturating_sub(shared);
        if let Some(available) = gpu.summary().memory.filter(|&m| needed > m) {
            return Err(WgpuError::ModelTooLarge { name: gpu.summary().name.clone(), needed, available });
        }
        let cache_groups = match target {
            Some(target) => target.groups.of_assistant(&spec),
            None => CacheGroups::new(&spec, cache_capacity),
        };
        let cache_type = target.map_or(options.cache_type, |target| target.cache.cache_type);
        let cache_capacity = target.map_or(cache_capacity, |target| target.groups.capacity());
        let before = gpu.allocated_bytes();
        let layer_pages = LayerPages::of_layers(&cache_groups, spec.n_layer(), cache_type);
        let widths = ActivationWidths::new(&spec, weights, &layer_pages);
        let n_ubatch = cache_capacity.n_tokens(&spec);
        let scratch_capacity = Activations::capacity(gpu.summary().max_binding, &widths, n_ubatch);
        if !spec.is_causal() && scratch_capacity.0 < n_ubatch {
            let why =
                format!("a text has to be evaluated whole, and this GPU has room for {} tokens", scratch_capacity.0);
            return Err(WgpuError::Mismatch { what: format!("a batch of {n_ubatch} tokens"), why });
        }
        let begin = Instant::now();
        // The page tables and the KV cache first: they are what too many sequences or too long a context make too
        // large.
        let n_pages: Vec<_> = cache_groups.groups().iter().map(|group| group.n_pages).collect();
        let batch_buffer =
            |n_tokens| BatchBuffer::new(&gpu, n_tokens, cache_capacity.n_seq, cache_capacity.n_positions(), &n_pages);
        let batch_of_one = batch_buffer(1)?;
        let batch = batch_buffer(scratch_capacity.0)?;
        let page_bytes = page_bytes(weights, &layer_pages, &cache_groups);
        let cache = match target {
            Some(target) => WgpuKvCache::of_assistant(&target.cache, spec.n_layer(), &cache_groups),
            None => WgpuKvCache::new(&gpu, &spec, &page_bytes, &cache_groups, cache_type, tuning.layers_in_a_buffer)?,
        };
        let states = WgpuStates::new(&gpu, &spec, &cache_groups, scratch_capacity.0)?;
        let before_weights = gpu.allocated_bytes();
        let mut uploads = Uploads::default();
        let gpu_weights =
            WgpuWeights::new(&gpu, &spec, weights, &layer_pages, tuning.layers_in_a_buffer, &mut uploads, first)?;
        let rope_tables = RopeTables::new(&gpu, &spec, weights, cache_capacity, scratch_capacity.0)?;
        let rope = rope_tables.of_layers(&spec);
        let weight_bytes = gpu.allocated_bytes() - before_weights;
        let scratch = Activations::new(&gpu, &widths, scratch_capacity, cache_capacity.n_seq.min(MAX_GEMV_TOKENS))?;
        let spans = Spans::new(&gpu, &spec, rope_tables, scratch.n_tokens)?;
        let ids = gpu.buffer("ids", 4 * scratch.n_outputs as u64)?;
        let top_k = gpu.buffer("short lists", 8 * (TOP_K * scratch.n_outputs) as u64)?;
        // Only read where all layers are plain; each of those has keys and values of its own.
        let keys_and_values: Vec<_> = cache.layers.iter().flatten().cloned().collect();
        let persistent = PersistentLayersBuilder {
            gpu: &gpu,
            spec: &spec,
            // Blocks are no decode steps.
            layers: PlainLayer::of_model(&gpu_weights, weights).filter(|_| !spec.takes_context),
            cache: &keys_and_values,
            rope: &rope,
            x: &scratch.x,
            batch: &batch_of_one,
        };
        let plan = |kind, batch| {
            let builder = PlanBuilder {
                gpu: &gpu,
                spec: &spec,
                weights: &gpu_weights,
                scratch: &scratch,
                cache: &cache,
                states: &states,
                rope: &rope,
                spans: &spans,
                batch,
                ids: &ids,
                top_k: &top_k,
                exact: options.exact,
                kind,
            };
            builder.build()
        };
        let groups = tuning.persistent_workgroups.as_ref().map_or(workgroup_counts_to_try(&gpu), std::slice::from_ref);
        // Threads compile pipelines while the weights are uploaded. The persistent kernel, which takes longest, is
        // queued first.
        let builders = PipelineCache::start_builders(&gpu);
        let persistent_layers = match groups {
            [] | [0] => Err("this GPU is not known to run workgroups side by side"),
            [most, ..] => persistent.build(*most)?,
        };
        let [few, many, mut one, sequences] = [
            plan(BatchKind::Few, batch.buffer())?,
            plan(BatchKind::Many, batch.buffer())?,
            plan(BatchKind::One, batch_of_one.buffer())?,
            plan(BatchKind::Sequences, batch.buffer())?,
        ];
        // A discrete GPU that idles during the upload clocks down, and then evaluates the first prompt slowly. The
        // products that keep it awake need the output head, which is uploaded first.
        let mut waker = Waker::new(&gpu);
        let before_uploads = gpu.allocated_bytes();
        uploads.run(&gpu, &|done| waker.beside_upload(&gpu, &one, done))?;
        let uploaded_through = gpu.allocated_bytes() - before_uploads;
        tracing::debug!(elapsed = ?begin.elapsed(), "weights are on the GPU");
        let all_ready = || [&few, &many, &one, &sequences].into_iter().all(|plan| plan.is_ready(&gpu));
        while !all_ready() && waker.wake(&gpu, &one) {}
        for plan in [&few, &many, &one, &sequences] {
            plan.wait_ready(&gpu)?;
        }
        tracing::debug!(elapsed = ?begin.elapsed(), pipelines = gpu.pipelines().len(), "pipelines are compiled");
        let mut compiling_layers = None;
        let tried = match persistent_layers {
            Err(why) => Err(why),
            Ok(first) => {
                // Compiling the persistent kernel for the first time takes longer than all other work of loading.
                let waits = || tuning.persistent_workgroups.is_some() || begin.elapsed() < PATIENCE;
                while !first.is_ready(&gpu) && waits() && waker.wake(&gpu, &one) {}
                if first.is_ready(&gpu) || waits() {
                    persistent.try_out(first, &groups[1..])?
                } else {
                    compiling_layers = Some(first);
                    Err("the kernel for all of them is still being compiled, and is used from then on")
                }
            }
        };
        let persistent_timed_out = match tried {
            Ok(layers) => {
                log_persistent_layers(&layers);
                one.persistent_layers = Some(layers.dispatches);
                Some(layers.timed_out)
            }
            Err(why) => {
                tracing::info!("a token goes through the layers in many dispatches: {why}");
                None
            }
        };
        builders.finish();
        tracing::debug!(elapsed = ?begin.elapsed(), "all layers at once are tried");
        gpu.pipelines().save();
        tracing::debug!(elapsed = ?begin.elapsed(), "pipelines are kept");
        let readback = Readback::new(&gpu, 8 * TOP_K as u64 + FLAG_BYTES)?;
        let memory = MemoryUse {
            weights: weight_bytes,
            kv_cache: cache.bytes() + states.bytes(),
            scratch: gpu.allocated_bytes() - uploaded_through - before - weight_bytes - cache.bytes() - states.bytes(),
        };
        Ok(Self {
            few_limits: few_limits(&gpu, options.exact),
            gpu,
            spec,
            scratch,
            cache,
            states,
            spans,
            plan_one: one,
            plan_sequences: sequences,
            plan_few: few,
            plan_many: many,
            batch_of_one,
            batch,
            ids,
            top_k,
            free: Vec::new(),
            readback,
            blocks: None,
            prepared: None,
            unread: None,
            trace: None,
            persistent_timed_out,
            memory,
            groups: cache_groups,
            waker,
            compiling_layers,
            ends: gpu_weights.ends.matrices,
        })
    }
}
