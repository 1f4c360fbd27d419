//! [`CudaEncoderOps`]: the operations of encoders as launches.

use std::sync::{Arc, Mutex, PoisonError};

use metal_attention_model::DeviceInfo;
use metal_attention_model::vision::{
    AttentionSegment, Colours, EncoderActivation, EncoderFeedForward, EncoderLinear, EncoderNorm, EncoderOps,
    PatchOrder, PatchSpec, Pixels, hidden,
};

use super::attention::AttentionPlan;
use super::rows::{CudaRows, RowMemory};
use super::{CudaEncoderTypes, EncoderVector};
use crate::args::{
    ElementsArgs, ElementsFunction, Epilogue, InterleaveArgs, NormArgs, PatchesArgs, RotateArgs, SumRowsArgs,
};
use crate::bounds::KernelArgs;
use crate::device::{CudaBuffer, Readback};
use crate::kernels::{self, EntryPoint, Kernels};
use crate::launch::LaunchGrid;
use crate::runner::launcher::Launcher;
use crate::runner::linear::{LinearInput, norm_args};
use crate::runner::{max_few_tokens, split_bytes};
use crate::slice::{DevicePtr, DeviceSlice};
use crate::weights::norm_kind;
use crate::{CudaDevice, CudaError};

/// Most threads of a block of the kernels of rows.
const THREADS: usize = 256;
/// Blocks of these kernels for each multiprocessor; each takes several rows.
const BLOCKS_PER_SM: usize = 16;
/// Rows of the largest block of the products, which split-K shares among blocks.
const MOST_SPLIT_ROWS: usize = 256;

/// The device, the loaded kernels, and the memory of rows.
pub(super) struct CudaEncoderOps {
    pub(super) gpu: Arc<CudaDevice>,
    kernels: Kernels,
    pub(super) memory: RowMemory,
    /// Pinned memory for the rows that come out; `None` before the first.
    readback: Option<Readback>,
    /// Space for the partial sums of split-K products, and their counters.
    split: [CudaBuffer; 2],
    /// Whether products and attention read F32 inputs.
    pub(super) exact: bool,
    n_launches: u64,
}

impl CudaEncoderOps {
    pub(super) fn new(gpu: Arc<CudaDevice>, kernels: Kernels, exact: bool) -> Result<Self, CudaError> {
        let [sums, tickets] = split_bytes(gpu.summary(), MOST_SPLIT_ROWS);
        let zeros = |bytes: usize| gpu.zeros("the picture encoder", bytes as u64);
        let split = [zeros(sums)?, zeros(tickets)?];
        Ok(Self { memory: RowMemory::new(Arc::clone(&gpu)), readback: None, gpu, kernels, split, exact, n_launches: 0 })
    }

    /// The GPU.
    pub(super) fn device(&self) -> DeviceInfo {
        self.gpu.info()
    }

    /// Ends a call of the encoder.
    pub(super) fn end_call(&mut self) {
        self.memory.end_call();
    }

    /// What launches need, for products of rows of `n_in` elements.
    pub(super) fn launcher(&mut self, n_in: usize) -> Launcher<'_> {
        let [sums, tickets] = &self.split;
        Launcher {
            gpu: &self.gpu,
            kernels: &mut self.kernels,
            n_launches: &mut self.n_launches,
            timers: None,
            max_few_tokens: max_few_tokens(self.gpu.summary(), n_in),
            split_sums: sums.ptr(),
            split_tickets: tickets.ptr(),
        }
    }

    /// Launches a kernel of rows: a thread for each of `columns` columns.
    pub(super) fn launch_rows<A: KernelArgs>(
        &mut self,
        entry: EntryPoint<A>,
        n_rows: usize,
        columns: usize,
        args: &A,
    ) -> Result<(), CudaError> {
        if n_rows == 0 || columns == 0 {
            return Ok(());
        }
        let grid = row_grid(self.gpu.summary().n_sm, n_rows, columns);
        self.launcher(columns).launch(entry, "", grid, args)
    }

    /// Launches `out = function(x, y)`.
    fn elements(
        &mut self,
        function: ElementsFunction,
        x: &CudaRows,
        y: Option<(DeviceSlice<f32>, usize)>,
        out: DeviceSlice<f32>,
        [a, b]: [f32; 2],
    ) -> Result<(), CudaError> {
        let args = ElementsArgs { out: out.ptr(), a, b, ..elements_args(function, x, y) };
        self.launch_rows(kernels::ENCODER_ELEMENTS, x.n_rows, x.width, &args)
    }

    /// Launches `x = function(x, y)`, with rows `y`.
    fn with_rows(&mut self, function: ElementsFunction, x: &mut CudaRows, y: &CudaRows) -> Result<(), CudaError> {
        let out = x.slice_mut();
        self.elements(function, x, Some((y.slice(), y.width)), out, [0.0; 2])
    }

    /// Launches `x = function(x, y)`, with one row `y` for all rows.
    fn with_vector(
        &mut self,
        function: ElementsFunction,
        x: &mut CudaRows,
        y: &EncoderVector,
    ) -> Result<(), CudaError> {
        let out = x.slice_mut();
        self.elements(function, x, Some((y.buffer.slice().take(y.len), 0)), out, [0.0; 2])
    }

    /// Launches sums of `n` rows of `x` each: those with the indices `rows`, or in order. They are stored to the rows `out`,
    /// which are `out_stride` elements apart.
    fn sum_rows(
        &mut self,
        x: &CudaRows,
        n: usize,
        rows: Option<&[u32]>,
        sums: Sums<'_>,
        (out, out_stride): (DeviceSlice<f32>, usize),
    ) -> Result<(), CudaError> {
        let n_rows = rows.map_or(x.n_rows, <[u32]>::len) / n.max(1);
        let indices = rows.map(|rows| self.memory.upload(rows)).transpose()?;
        let args = SumRowsArgs {
            x: x.slice().ptr(),
            rows: indices.as_ref().map_or(DevicePtr::NULL, |indices| indices.ptr()),
            weights: sums.weights.map_or(DevicePtr::NULL, |weights| weights.buffer.ptr()),
            out: out.ptr(),
            n_rows: n_rows as u32,
            width: x.width as u32,
            n: n as u32,
            out_stride: out_stride as u32,
            divisor: sums.divisor,
            unused: 0,
        };
        self.launch_rows(kernels::ENCODER_SUM_ROWS, n_rows, x.width, &args)
    }
}

/// Calls `work` for each part with its index, in a thread each; this one does the work of those that the system refuses.
fn for_each_part(parts: &mut [Vec<f32>], work: impl Fn(usize, &mut Vec<f32>) + Sync) {
    let n_others = parts.len().saturating_sub(1);
    let rest = Mutex::new(parts.iter_mut().enumerate());
    let run = || {
        loop {
            let next = rest.lock().unwrap_or_else(PoisonError::into_inner).next();
            let Some((i, part)) = next else { return };
            work(i, part);
        }
    };
    std::thread::scope(|scope| {
        for _ in 0..n_others {
            let _ = std::thread::Builder::new().spawn_scoped(scope, run);
        }
        run();
    });
}

/// The arguments of `function(x, y)`, with rows `y` and the distance of two of them in elements. The caller sets where the result goes.
pub(super) fn elements_args(
    function: ElementsFunction,
    x: &CudaRows,
    y: Option<(DeviceSlice<f32>, usize)>,
) -> ElementsArgs {
    let (y, y_stride) = y.map_or((DevicePtr::NULL, 0), |(y, stride)| (y.ptr(), stride));
    ElementsArgs {
        x: x.slice().ptr(),
        y,
        out: DevicePtr::NULL,
        packed: DevicePtr::NULL,
        n_rows: x.n_rows as u32,
        width: x.width as u32,
        y_stride: y_stride as u32,
        function: function as u32,
        a: 0.0,
        b: 0.0,
        n_token_tiles: 0,
        unused: 0,
    }
}

/// The factors of sums of rows.
#[derive(Clone, Copy)]
struct Sums<'a> {
    /// `[n, width]`; `None`: ones.
    weights: Option<&'a EncoderVector>,
    /// What the sums are divided by.
    divisor: f32,
}

/// Sums without factors.
const PLAIN: Sums<'_> = Sums { weights: None, divisor: 1.0 };

/// The grid of a kernel of rows.
pub(crate) fn row_grid(n_sm: usize, n_rows: usize, columns: usize) -> LaunchGrid {
    let threads = columns.next_multiple_of(32).min(THREADS);
    let parts = columns.div_ceil(threads);
    let blocks = [parts, (BLOCKS_PER_SM * n_sm).div_ceil(parts).min(n_rows), 1];
    LaunchGrid { blocks, threads, shared: 0 }
}

/// The function of an activation.
pub(super) fn function_of(activation: EncoderActivation) -> ElementsFunction {
    match activation {
        EncoderActivation::Gelu => ElementsFunction::Gelu,
        EncoderActivation::GeluErf => ElementsFunction::GeluErf,
        EncoderActivation::QuickGelu => ElementsFunction::QuickGelu,
        EncoderActivation::Silu => ElementsFunction::Silu,
        EncoderActivation::SquaredRelu => ElementsFunction::SquaredRelu,
    }
}

impl EncoderOps for CudaEncoderOps {
    type Types = CudaEncoderTypes;
    type Rows = CudaRows;
    type Error = CudaError;

    fn upload(&mut self, [_, width]: [usize; 2], values: impl FnOnce() -> Vec<f32>) -> Result<CudaRows, CudaError> {
        self.memory.uploaded_rows(&values(), width)
    }

    fn patches(&mut self, patch: PatchSpec, colours: Colours, pictures: &[Pixels<'_>]) -> Result<CudaRows, CudaError> {
        let PatchSpec { side, order } = patch;
        let width = 3 * side * side;
        let n_patches = |pixels: &Pixels<'_>| pixels.width / side * (pixels.height / side);
        let rows = self.memory.rows(pictures.iter().map(n_patches).sum(), width)?;
        let mut first = 0;
        for pixels in pictures {
            let rgb = self.memory.upload(pixels.rgb)?;
            let args = PatchesArgs {
                rgb: rgb.ptr(),
                out: rows.slice().skip(first * width).ptr(),
                width: pixels.width as u32,
                height: pixels.height as u32,
                side: side as u32,
                pixel_first: u32::from(order == PatchOrder::PixelFirst),
                mean: colours.mean,
                std: colours.std,
            };
            self.launch_rows(kernels::ENCODER_PATCHES, n_patches(pixels), width, &args)?;
            first += n_patches(pixels);
        }
        Ok(rows)
    }

    fn read(&mut self, rows: &CudaRows, columns: usize) -> Result<Vec<Vec<f32>>, CudaError> {
        let columns = columns.max(1);
        let bytes = (rows.slice().len() * size_of::<f32>()) as u64;
        // Pinned memory takes long to allocate.
        let readback = match self.readback.take().filter(|readback| readback.bytes() >= bytes) {
            Some(readback) => self.readback.insert(readback),
            None => self.readback.insert(Readback::new(&self.gpu, bytes)?),
        };
        readback.copy(rows.buffer(), bytes)?;
        let (n_rows, width) = (rows.n_rows, rows.width);
        let mut parts = vec![Vec::new(); width / columns];
        // The system makes pages at the first write to them, which takes as long as some blocks; the GPU is computing meanwhile.
        for_each_part(&mut parts, |_, part| {
            part.reserve_exact(n_rows * columns);
            part.resize(n_rows * columns, f32::NAN);
        });
        let values: &[f32] = bytemuck::cast_slice(readback.read(bytes)?);
        for_each_part(&mut parts, |i, part| {
            for (to, row) in part.chunks_exact_mut(columns).zip(values.chunks_exact(width)) {
                to.copy_from_slice(&row[i * columns..][..columns]);
            }
        });
        Ok(parts)
    }

    fn width(&self, rows: &CudaRows) -> usize {
        rows.width
    }

    fn reshape(&mut self, rows: CudaRows, width: usize) -> CudaRows {
        rows.reshaped(width)
    }

    fn copy(&mut self, rows: &CudaRows) -> Result<CudaRows, CudaError> {
        let out = self.memory.rows(rows.n_rows, rows.width)?;
        self.sum_rows(rows, 1, None, PLAIN, (out.slice(), out.width))?;
        Ok(out)
    }

    fn linear(&mut self, x: &CudaRows, linear: &EncoderLinear<CudaEncoderTypes>) -> Result<CudaRows, CudaError> {
        self.gpu.check_watch()?;
        let Some(clamp) = linear.clamp else { return self.stored_product(x, linear) };
        let within = self.memory.rows(x.n_rows, x.width)?;
        self.elements(ElementsFunction::Clamp, x, None, within.slice(), clamp.input)?;
        let mut y = self.stored_product(&within, linear)?;
        let out = y.slice_mut();
        self.elements(ElementsFunction::Clamp, &y, None, out, clamp.output)?;
        Ok(y)
    }

    fn projections(
        &mut self,
        x: &CudaRows,
        linears: [&EncoderLinear<CudaEncoderTypes>; 3],
    ) -> Result<[CudaRows; 3], CudaError> {
        self.gpu.check_watch()?;
        if let Some(rows) = self.joined_products(x, linears)? {
            return Ok(rows);
        }
        let [q, k, v] = linears;
        Ok([self.linear(x, q)?, self.linear(x, k)?, self.linear(x, v)?])
    }

    fn add_linear(
        &mut self,
        y: &mut CudaRows,
        x: &CudaRows,
        linear: &EncoderLinear<CudaEncoderTypes>,
    ) -> Result<(), CudaError> {
        if linear.clamp.is_some() {
            let product = self.linear(x, linear)?;
            return self.add(y, &product);
        }
        self.gpu.check_watch()?;
        let input = self.input(x)?;
        self.product((input, x.width), linear, y, Epilogue::Add)
    }

    fn feed_forward(
        &mut self,
        x: &CudaRows,
        feed_forward: &EncoderFeedForward<CudaEncoderTypes>,
    ) -> Result<CudaRows, CudaError> {
        let down = feed_forward.down();
        let Some((rows, width)) = self.packed_hidden(x, feed_forward)? else {
            let rows = hidden(self, x, feed_forward)?;
            return self.linear(&rows, down);
        };
        let mut y = self.memory.rows(x.n_rows, down.n_out)?;
        self.product((LinearInput::Packed(rows.slice()), width), down, &mut y, Epilogue::Store)?;
        Ok(y)
    }

    fn add_feed_forward(
        &mut self,
        y: &mut CudaRows,
        x: &CudaRows,
        feed_forward: &EncoderFeedForward<CudaEncoderTypes>,
    ) -> Result<(), CudaError> {
        let down = feed_forward.down();
        let Some((rows, width)) = self.packed_hidden(x, feed_forward)? else {
            let rows = hidden(self, x, feed_forward)?;
            return self.add_linear(y, &rows, down);
        };
        self.product((LinearInput::Packed(rows.slice()), width), down, y, Epilogue::Add)
    }

    fn norm(&mut self, x: &CudaRows, norm: &EncoderNorm<CudaEncoderTypes>) -> Result<CudaRows, CudaError> {
        let out = self.memory.rows(x.n_rows, x.width)?;
        let n_groups = x.slice().len() / norm.width.max(1);
        if n_groups > 0 {
            let args = NormArgs {
                weight: norm.weight.buffer.ptr(),
                bias: norm.bias.as_ref().map_or(DevicePtr::NULL, |bias| bias.buffer.ptr()),
                kind: norm_kind(norm.kind),
                eps: norm.eps,
                out: out.slice().ptr(),
                ..norm_args(None, x.slice(), norm.width)
            };
            // Products read the norms of whole rows.
            if norm.width == x.width && self.packs(x.n_rows) {
                let packed = self.packed_rows(x.n_rows, x.width)?;
                self.launcher(norm.width).norm(NormArgs { packed: packed.ptr(), ..args }, n_groups)?;
                return Ok(out.with_packed(packed));
            }
            self.launcher(norm.width).norm(args, n_groups)?;
        }
        Ok(out)
    }

    fn activate(&mut self, x: &mut CudaRows, activation: EncoderActivation) -> Result<(), CudaError> {
        let out = x.slice_mut();
        self.elements(function_of(activation), x, None, out, [0.0; 2])
    }

    fn activate_gated(
        &mut self,
        x: &mut CudaRows,
        activation: EncoderActivation,
        y: &CudaRows,
    ) -> Result<(), CudaError> {
        self.with_rows(function_of(activation), x, y)
    }

    fn add(&mut self, x: &mut CudaRows, y: &CudaRows) -> Result<(), CudaError> {
        self.with_rows(ElementsFunction::Add, x, y)
    }

    fn add_row(&mut self, x: &mut CudaRows, row: &EncoderVector) -> Result<(), CudaError> {
        self.with_vector(ElementsFunction::Add, x, row)
    }

    fn scale(&mut self, x: &mut CudaRows, factor: f32) -> Result<(), CudaError> {
        let out = x.slice_mut();
        self.elements(ElementsFunction::Scale, x, None, out, [factor, 0.0])
    }

    fn scale_columns(&mut self, x: &mut CudaRows, factors: &EncoderVector) -> Result<(), CudaError> {
        self.with_vector(ElementsFunction::Multiply, x, factors)
    }

    fn gather(&mut self, x: &CudaRows, rows: &[u32]) -> Result<CudaRows, CudaError> {
        let out = self.memory.rows(rows.len(), x.width)?;
        self.sum_rows(x, 1, Some(rows), PLAIN, (out.slice(), out.width))?;
        Ok(out)
    }

    fn join_rows(&mut self, x: &CudaRows, y: &CudaRows) -> Result<CudaRows, CudaError> {
        let out = self.memory.rows(x.n_rows + y.n_rows, x.width)?;
        self.sum_rows(x, 1, None, PLAIN, (out.slice(), out.width))?;
        self.sum_rows(y, 1, None, PLAIN, (out.slice().skip(x.slice().len()), out.width))?;
        Ok(out)
    }

    fn join_columns(&mut self, parts: &[&CudaRows]) -> Result<CudaRows, CudaError> {
        let n_rows = parts.first().map_or(0, |part| part.n_rows);
        let out = self.memory.rows(n_rows, parts.iter().map(|part| part.width).sum())?;
        let mut first = 0;
        for part in parts {
            self.sum_rows(part, 1, None, PLAIN, (out.slice().skip(first), out.width))?;
            first += part.width;
        }
        Ok(out)
    }

    fn mean(&mut self, x: &CudaRows, n: usize) -> Result<CudaRows, CudaError> {
        let out = self.memory.rows(x.n_rows / n.max(1), x.width)?;
        self.sum_rows(x, n, None, Sums { divisor: n as f32, ..PLAIN }, (out.slice(), out.width))?;
        Ok(out)
    }

    fn weighted_sum(
        &mut self,
        x: &CudaRows,
        rows: &[u32],
        n: usize,
        weights: &EncoderVector,
    ) -> Result<CudaRows, CudaError> {
        if weights.len != n * x.width {
            return Err(CudaError::UnsupportedPart { part: "a picture encoder whose widths differ" });
        }
        let out = self.memory.rows(rows.len() / n.max(1), x.width)?;
        self.sum_rows(x, n, Some(rows), Sums { weights: Some(weights), ..PLAIN }, (out.slice(), out.width))?;
        Ok(out)
    }

    fn interleave(&mut self, x: &CudaRows, n: usize) -> Result<CudaRows, CudaError> {
        let out = self.memory.rows(x.n_rows, x.width)?;
        let args = InterleaveArgs {
            x: x.slice().ptr(),
            out: out.slice().ptr(),
            n_rows: x.n_rows as u32,
            width: x.width as u32,
            n: n as u32,
            unused: 0,
        };
        self.launch_rows(kernels::ENCODER_INTERLEAVE, x.n_rows, x.width, &args)?;
        Ok(out)
    }

    fn rotate(&mut self, x: &mut CudaRows, table: &CudaRows, head_dim: usize, block: usize) -> Result<(), CudaError> {
        let args = RotateArgs {
            x: x.slice_mut().ptr(),
            table: table.slice().ptr(),
            n_rows: x.n_rows as u32,
            width: x.width as u32,
            head_dim: head_dim as u32,
            block: block as u32,
        };
        self.launch_rows(kernels::ENCODER_ROTATE, x.n_rows, x.width / 2, &args)
    }

    fn attention(
        &mut self,
        q: &CudaRows,
        k: &CudaRows,
        v: &CudaRows,
        head_dim: usize,
        scale: f32,
        segments: &[AttentionSegment],
    ) -> Result<CudaRows, CudaError> {
        self.gpu.check_watch()?;
        let plan = AttentionPlan::new(head_dim, self.exact, self.gpu.summary().has_wgmma(), segments)?;
        let tiles = plan.tiles(segments);
        if tiles.is_empty() {
            return self.memory.rows(q.n_rows, q.width);
        }
        match plan {
            AttentionPlan::OnUnits(plan) => self.attention_on_units(plan, [q, k, v], (head_dim, scale), &tiles),
            AttentionPlan::F32 { head_dim } => self.attention_in_f32([q, k, v], (head_dim, scale), &tiles),
        }
    }
}
