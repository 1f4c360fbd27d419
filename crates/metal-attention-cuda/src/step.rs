//! A step's kernels, in the order of the paper.

use std::sync::Arc;

use bytemuck::Pod;
use metal_attention_model::{CacheType, ModelSpec};

use crate::CudaError;
use crate::activations::{ARGMAX_BLOCKS, Activations, n_splits};
use crate::args::{
    ArgmaxArgs, AttentionArgs, EmbeddingArgs, LogitsArgs, MAX_PARTS, MatmulArgs, MatrixArgs, MatvecArgs, NormArgs,
    Output, PrefillArgs,
};
use crate::device::{CudaBuffer, CudaDevice, Kernels};
use crate::kv_cache::CudaKvCache;
use crate::launch::{Grid, Start};
use crate::matrix::{CudaMatrix, Format, PANEL, TILE};
use crate::profile::Timers;
use crate::weights::{Attention, CudaLayer, CudaWeights};

/// Tokens that a product takes as exactly as F32, and in one go.
const MATVEC_TOKENS: usize = 4;
/// Tokens up to which every warp reads all inputs.
const FEW_TOKENS: usize = 64;
/// Warps of a block of products.
const WARPS: usize = 8;
/// Warps that keep the memory busy.
const BUSY_WARPS: usize = 2112;
/// Elements of a matrix from which on two blocks a multiprocessor are better than one.
const LARGE: usize = 8 << 20;
/// Panels that a warp asks for at once.
const PANELS_AHEAD: usize = 4;

/// What comes back of each wanted token.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Wanted {
    /// Its state after the last norm.
    Hidden,
    /// All its logits.
    Logits,
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
    pub(crate) wanted: Wanted,
}

/// Everything that kernels are launched with.
pub(crate) struct Steps {
    pub(crate) gpu: Arc<CudaDevice>,
    pub(crate) kernels: Kernels,
    pub(crate) weights: CudaWeights,
    pub(crate) s: Activations,
    pub(crate) exact: bool,
    /// Where kernels are timed.
    pub(crate) timers: Option<Timers>,
}

/// The input of a product.
#[derive(Clone, Copy)]
enum Input {
    /// F32 rows, which may go through a norm on the way: address of the rows, weight of the norm or 0, its epsilon.
    Rows { x: u64, norm: u64, eps: f32 },
    /// Packed F16.
    Packed(u64),
}

/// A product over all tokens.
struct Product<'a> {
    /// What it is, for a profile.
    what: &'static str,
    /// One matrix below the other; GATED: those of the gate, then those of up.
    parts: Vec<(&'a CudaMatrix, usize)>,
    n_out: usize,
    output: Output,
    activation: u32,
    scale: f32,
    bias: u64,
    /// F32 rows, and where GATED over many tokens packed F16.
    y: u64,
    packed: u64,
}

impl Steps {
    /// How many tokens go through products of the first kind; of longer steps inputs are packed.
    fn is_exact(&self, n_tokens: usize) -> bool {
        self.exact || n_tokens <= MATVEC_TOKENS
    }

    /// Launches a kernel; a profile tells what it was for, too.
    fn launch<A: Pod>(&mut self, name: &str, what: &str, grid: Grid, args: &A) -> Result<(), CudaError> {
        let kernel = self.kernels.get(&self.gpu, name)?;
        match &mut self.timers {
            None => self.gpu.launch(kernel, grid, args, Start::Early),
            Some(timers) => timers
                .around(format!("{name} {what}").trim_end(), || self.gpu.launch(kernel, grid, args, Start::InTurn)),
        }
    }

    /// Launches all kernels of a step. `after_layer` comes after each layer.
    pub(crate) fn run(
        &mut self,
        spec: &ModelSpec,
        cache: &CudaKvCache,
        size: StepSize,
        mut after_layer: impl FnMut(usize, &CudaBuffer) -> Result<(), CudaError>,
    ) -> Result<(), CudaError> {
        self.embedding(spec, size.n_tokens)?;
        for i in 0..spec.n_layer() {
            self.layer(spec, cache, i, size)?;
            after_layer(i, &self.s.x)?;
        }
        if size.n_wanted > 0 {
            self.results(spec, size)?;
        }
        Ok(())
    }

    fn embedding(&mut self, spec: &ModelSpec, n_tokens: usize) -> Result<(), CudaError> {
        let args = EmbeddingArgs {
            table: self.weights.token_embd.args(0),
            tokens: self.s.tokens.ptr(),
            x: self.s.x.ptr(),
            scale: spec.embedding.scale,
            n_embd: spec.n_embd as u32,
        };
        let grid = Grid { blocks: [spec.n_embd.div_ceil(256), n_tokens, 1], threads: 256, shared: 0 };
        self.launch("embedding", "", grid, &args)
    }

    fn layer(&mut self, spec: &ModelSpec, cache: &CudaKvCache, i: usize, size: StepSize) -> Result<(), CudaError> {
        // Taken out for as long as it is borrowed beside the kernels.
        let layers = std::mem::take(&mut self.weights.layers);
        let outcome = self.parts_of_layer(spec, cache, i, &layers[i], size);
        self.weights.layers = layers;
        outcome
    }

    fn parts_of_layer(
        &mut self,
        spec: &ModelSpec,
        cache: &CudaKvCache,
        i: usize,
        layer: &CudaLayer,
        size: StepSize,
    ) -> Result<(), CudaError> {
        let (n, n_embd) = (size.n_tokens, spec.n_embd);
        let a = &layer.attention;
        let widths = [a.n_head, a.n_kv_head, a.n_kv_head].map(|n| n * a.head_dim);
        let first = [0, widths[0], widths[0] + widths[1]];
        let input = self.normed(self.s.x.ptr(), &layer.mixer_norm, layer.mixer_eps, n_embd, n)?;
        let qkv = Product {
            what: "qkv",
            parts: layer.qkv.iter().zip(first).collect(),
            n_out: a.stride(),
            output: Output::Store,
            activation: 0,
            scale: 1.0,
            bias: layer.qkv_bias.as_ref().map_or(0, CudaBuffer::ptr),
            y: self.s.qkv.ptr(),
            packed: 0,
        };
        self.product(&qkv, input, n_embd, n)?;
        self.attention(cache, i, a, size)?;
        let out = Product {
            what: "attention output",
            parts: vec![(&layer.out, 0)],
            n_out: n_embd,
            output: Output::Add,
            activation: 0,
            scale: layer.scale,
            bias: layer.out_bias.as_ref().map_or(0, CudaBuffer::ptr),
            y: self.s.x.ptr(),
            packed: 0,
        };
        let input = self.input(&self.s.att, &self.s.packed_att, n);
        self.product(&out, input, widths[0], n)?;

        let input = self.normed(self.s.x.ptr(), &layer.ff_norm, layer.ff_eps, n_embd, n)?;
        let gated = Product {
            what: "gate and up",
            parts: vec![(&layer.gate, 0), (&layer.up, 0)],
            n_out: layer.up.n_rows,
            output: Output::Gated,
            activation: layer.activation,
            scale: 1.0,
            bias: 0,
            y: self.s.gated.ptr(),
            packed: self.s.packed_gated.ptr(),
        };
        self.product(&gated, input, n_embd, n)?;
        let down = Product {
            what: "down",
            parts: vec![(&layer.down, 0)],
            n_out: n_embd,
            output: Output::Add,
            activation: 0,
            scale: layer.scale,
            bias: layer.down_bias.as_ref().map_or(0, CudaBuffer::ptr),
            y: self.s.x.ptr(),
            packed: 0,
        };
        let input = self.input(&self.s.gated, &self.s.packed_gated, n);
        self.product(&down, input, layer.up.n_rows, n)
    }

    /// Rows that a product takes as they are.
    fn input(&self, rows: &CudaBuffer, packed: &CudaBuffer, n_tokens: usize) -> Input {
        if self.is_exact(n_tokens) {
            Input::Rows { x: rows.ptr(), norm: 0, eps: 0.0 }
        } else {
            Input::Packed(packed.ptr())
        }
    }

    /// Rows that a product takes through a norm: on its way, or packed before.
    fn normed(
        &mut self,
        x: u64,
        norm: &CudaBuffer,
        eps: f32,
        n_in: usize,
        n_tokens: usize,
    ) -> Result<Input, CudaError> {
        if self.is_exact(n_tokens) {
            return Ok(Input::Rows { x, norm: norm.ptr(), eps });
        }
        let packed = self.s.packed_x.ptr();
        self.norm(
            NormArgs {
                x,
                weight: norm.ptr(),
                packed,
                out: 0,
                rows: 0,
                n_in: n_in as u32,
                n_token_tiles: n_tokens.div_ceil(8) as u32,
                eps,
                unused: 0,
            },
            n_tokens,
        )?;
        Ok(Input::Packed(packed))
    }

    fn norm(&mut self, args: NormArgs, n_rows: usize) -> Result<(), CudaError> {
        self.launch("rms_norm", "", Grid { blocks: [n_rows, 1, 1], threads: 256, shared: 0 }, &args)
    }

    /// `y = W x` of all tokens.
    fn product(&mut self, p: &Product<'_>, input: Input, n_in: usize, n_tokens: usize) -> Result<(), CudaError> {
        match input {
            Input::Rows { x, norm, eps } => {
                for first in (0..n_tokens).step_by(MATVEC_TOKENS) {
                    let n = (n_tokens - first).min(MATVEC_TOKENS);
                    let at = |rows: u64, width: usize| rows + (4 * first * width) as u64;
                    self.matvec(p, at(x, n_in), norm, eps, 0, at(p.y, p.n_out), n_in, n)?;
                }
                Ok(())
            }
            Input::Packed(x) => self.matmul(p, x, n_tokens),
        }
    }

    #[expect(clippy::too_many_arguments, reason = "the addresses of a product")]
    fn matvec(
        &mut self,
        p: &Product<'_>,
        x: u64,
        norm: u64,
        eps: f32,
        rows: u64,
        y: u64,
        n_in: usize,
        n_tokens: usize,
    ) -> Result<(), CudaError> {
        let mut parts = [MatrixArgs { ..bytemuck::Zeroable::zeroed() }; MAX_PARTS];
        for (to, (matrix, first)) in parts.iter_mut().zip(&p.parts) {
            *to = matrix.args(*first);
        }
        let gated = p.output == Output::Gated;
        let of = if gated { 1 } else { p.parts.len() };
        let tiles: Vec<usize> = p.parts[..of].iter().map(|(matrix, _)| matrix.n_tiles()).collect();
        let n_tiles: usize = tiles.iter().sum();
        let n_panels = n_in.div_ceil(PANEL);
        // As few warps a tile as keep the memory busy, and as leave each enough to ask for.
        let most = (n_panels / PANELS_AHEAD).clamp(1, WARPS);
        let warps_a_tile = BUSY_WARPS.div_ceil(n_tiles).clamp(1, most).next_power_of_two();
        let warps_a_tile = if warps_a_tile > most { warps_a_tile / 2 } else { warps_a_tile };
        // One block on each multiprocessor leaves room for those of the next kernel.
        let most_blocks = self.gpu.summary().n_sm * if n_tiles * TILE * n_in > LARGE { 2 } else { 1 };
        let groups = tiles.iter().map(|tiles| tiles.div_ceil(WARPS / warps_a_tile));
        let n_groups: usize = groups.clone().sum();
        let share = |groups: usize| {
            if n_groups <= most_blocks { groups } else { (most_blocks * groups / n_groups).max(1) }
        };
        let mut blocks = [0; MAX_PARTS];
        let mut n_blocks = 0;
        for (end, groups) in blocks.iter_mut().zip(groups) {
            n_blocks += share(groups);
            *end = n_blocks as u32;
        }
        let args = MatvecArgs {
            parts,
            n_parts: p.parts.len() as u32,
            blocks,
            n_in: n_in as u32,
            n_out: p.n_out as u32,
            warps_a_tile: warps_a_tile as u32,
            output: p.output as u32,
            activation: p.activation,
            eps,
            scale: p.scale,
            unused: 0,
            x,
            norm,
            bias: p.bias,
            y,
            rows,
        };
        // `RING` of matvec.cu, or two panels.
        let ring = p.parts.iter().map(|(matrix, _)| if matrix.format == Format::F32 { 8192 } else { 6144 }).max();
        let shared = WARPS * ring.unwrap_or(0) + n_tokens * (n_panels * 272 + 4 * (2 * WARPS * TILE + 1));
        let grid = Grid { blocks: [n_blocks, 1, 1], threads: 32 * WARPS, shared };
        self.launch(["matvec_1", "matvec_2", "matvec_3", "matvec_4"][n_tokens - 1], p.what, grid, &args)
    }

    fn matmul(&mut self, p: &Product<'_>, x: u64, n_tokens: usize) -> Result<(), CudaError> {
        let token_tiles = n_tokens.div_ceil(8);
        let gated = p.output == Output::Gated;
        let products: Vec<_> = match (&p.parts[..], gated) {
            ([gate, up], true) => vec![(*gate, *up)],
            (parts, _) => parts.iter().map(|part| (*part, *part)).collect(),
        };
        for ((a, first), (b, _)) in products {
            let args = MatmulArgs {
                a: a.args(first),
                b: b.args(first),
                x,
                n_tokens: n_tokens as u32,
                n_token_tiles: token_tiles as u32,
                n_out: p.n_out as u32,
                output: p.output as u32,
                activation: p.activation,
                scale: p.scale,
                bias: p.bias,
                y: p.y,
                packed: p.packed,
                y_token_tiles: token_tiles as u32,
                unused: 0,
            };
            if n_tokens <= FEW_TOKENS || a.format != b.format {
                let tiles_at_once = match token_tiles {
                    1 => 1,
                    2 => 2,
                    3 | 4 => 4,
                    _ => 8,
                };
                let blocks = if gated { a.n_tiles() } else { a.n_tiles().div_ceil(2) };
                let grid = Grid {
                    blocks: [blocks, token_tiles.div_ceil(tiles_at_once), 1],
                    threads: 32 * WARPS,
                    shared: WARPS * 2 * tiles_at_once * 512,
                };
                self.launch(&format!("matmul_few_{tiles_at_once}"), p.what, grid, &args)?;
            } else {
                let rows = a.n_tiles().div_ceil(if gated { 4 } else { 8 });
                let grid =
                    Grid { blocks: [token_tiles.div_ceil(16), rows, 1], threads: 32 * WARPS, shared: 4 * 16 * 1024 };
                self.launch(&format!("matmul_{}", Format::name(a.format)), p.what, grid, &args)?;
            }
        }
        Ok(())
    }

    fn attention(&mut self, cache: &CudaKvCache, i: usize, a: &Attention, size: StepSize) -> Result<(), CudaError> {
        let n = size.n_tokens;
        let [k_cache, v_cache] = cache.of_layer(i);
        let packed = if self.is_exact(n) { 0 } else { self.s.packed_att.ptr() };
        let token_tiles = n.div_ceil(8) as u32;
        let of_kv = a.n_head / a.n_kv_head;
        let group = of_kv.next_power_of_two().min(8);
        let n_chunks = of_kv.div_ceil(group);
        let splits = n_splits(n, a.n_kv_head * n_chunks);
        let args = AttentionArgs {
            inputs: a.inputs,
            tokens: self.s.tokens.ptr(),
            pages: cache.pages_of_layer(i),
            k_cache,
            v_cache,
            qkv: self.s.qkv.ptr(),
            out: self.s.att.ptr(),
            packed,
            partial: self.s.partial.ptr(),
            tickets: self.s.tickets.ptr(),
            sinks: a.sinks.as_ref().map_or(0, CudaBuffer::ptr),
            n_head: a.n_head as u32,
            n_kv_head: a.n_kv_head as u32,
            head_dim: a.head_dim as u32,
            stride: a.stride() as u32,
            n_splits: splits as u32,
            n_chunks: n_chunks as u32,
            n_token_tiles: token_tiles,
            mask: a.mask,
            reach: a.reach,
            soft_cap: a.soft_cap,
        };
        let ty = match cache.cache_type {
            CacheType::F16 => "f16",
            CacheType::F32 => "f32",
        };
        let together = size.n_query_tiles > 0;
        if together {
            let heads = a.n_head + 2 * a.n_kv_head;
            let grid = Grid { blocks: [heads.div_ceil(4), n, 1], threads: 128, shared: 16 * a.head_dim };
            self.launch(&format!("append_{ty}"), "", grid, &args)?;
        }
        let on_units = matches!(a.head_dim, 64 | 96 | 128) && cache.cache_type == CacheType::F16 && packed != 0;
        if together && on_units {
            return self.prefill_attention(&args, a, size);
        }
        let grid = Grid {
            blocks: [a.n_kv_head * n_chunks, splits, n],
            threads: 128,
            shared: {
                let page_row = a.head_dim + 32 / cache.cache_type.bytes();
                2 * 64 * page_row * cache.cache_type.bytes() + 4 * ((group + 2) * a.head_dim + group * 67 + 256)
            },
        };
        let name =
            if together { format!("attention_appended_{ty}_{group}") } else { format!("attention_{ty}_{group}") };
        self.launch(&name, "", grid, &args)
    }

    fn prefill_attention(&mut self, of: &AttentionArgs, a: &Attention, size: StepSize) -> Result<(), CudaError> {
        let args = PrefillArgs {
            tiles: self.s.query_tiles.ptr(),
            pages: of.pages,
            k_cache: of.k_cache,
            v_cache: of.v_cache,
            qkv: of.qkv,
            packed: of.packed,
            sinks: of.sinks,
            n_head: of.n_head,
            n_kv_head: of.n_kv_head,
            stride: of.stride,
            n_token_tiles: of.n_token_tiles,
            mask: of.mask,
            reach: of.reach,
            soft_cap: of.soft_cap,
            unused: 0,
        };
        let shared = 2 * 2 * 2 * 64 * (a.head_dim + 8);
        let grid = Grid { blocks: [size.n_query_tiles, a.n_head, 1], threads: 128, shared };
        self.launch(&format!("prefill_attention_{}", a.head_dim), "", grid, &args)
    }

    /// What comes of the wanted tokens.
    fn results(&mut self, spec: &ModelSpec, size: StepSize) -> Result<(), CudaError> {
        let (n, n_embd, eps) = (size.n_wanted, spec.n_embd, self.weights.output_eps);
        let norm = NormArgs {
            x: self.s.x.ptr(),
            weight: self.weights.output_norm.ptr(),
            packed: 0,
            out: 0,
            rows: self.s.wanted.ptr(),
            n_in: n_embd as u32,
            n_token_tiles: n.div_ceil(8) as u32,
            eps,
            unused: 0,
        };
        let advance = match size.wanted {
            Wanted::Hidden => return self.norm(NormArgs { out: self.s.hidden.ptr(), ..norm }, n),
            Wanted::Logits => None,
            Wanted::Id { advance } => Some(advance),
        };
        let Some((head, bias)) =
            self.weights.output.as_ref().map(|(head, bias)| (Arc::clone(head), bias.as_ref().map(CudaBuffer::ptr)))
        else {
            return Ok(());
        };
        let product = Product {
            what: "logits",
            parts: vec![(&*head, 0)],
            n_out: spec.n_vocab,
            output: Output::Store,
            activation: 0,
            scale: 1.0,
            bias: bias.unwrap_or(0),
            y: self.s.logits.ptr(),
            packed: 0,
        };
        if self.is_exact(n) {
            for first in (0..n).step_by(MATVEC_TOKENS) {
                let rows = self.s.wanted.ptr() + 4 * first as u64;
                let y = product.y + (4 * first * spec.n_vocab) as u64;
                let n = (n - first).min(MATVEC_TOKENS);
                self.matvec(&product, norm.x, norm.weight, eps, rows, y, n_embd, n)?;
            }
        } else {
            let packed = self.s.packed_x.ptr();
            self.norm(NormArgs { packed, ..norm }, n)?;
            self.matmul(&product, packed, n)?;
        }
        let (scale, soft_cap) = spec.output.head.map_or((1.0, None), |head| (head.scale, head.soft_cap));
        if scale != 1.0 || soft_cap.is_some() {
            let args = LogitsArgs {
                logits: self.s.logits.ptr(),
                n: (n * spec.n_vocab) as u32,
                scale,
                soft_cap: soft_cap.unwrap_or(0.0),
                unused: 0,
            };
            self.launch("scale_logits", "", Grid { blocks: [256, 1, 1], threads: 256, shared: 0 }, &args)?;
        }
        let Some(advance) = advance else { return Ok(()) };
        let args = ArgmaxArgs {
            logits: self.s.logits.ptr(),
            n_vocab: spec.n_vocab as u32,
            advance: u32::from(advance),
            best: self.s.best.ptr(),
            tickets: self.s.argmax_tickets.ptr(),
            ids: self.s.ids.ptr(),
            tokens: self.s.tokens.ptr(),
        };
        self.launch("argmax", "", Grid { blocks: [ARGMAX_BLOCKS, n, 1], threads: 256, shared: 0 }, &args)
    }
}
