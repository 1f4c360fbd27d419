//! Residual streams side by side (`AltUp`, arXiv 2301.13310): prediction and correction, and changes of length.

use crate::arena::Bind;
use crate::device::WgpuDevice;
use crate::dispatch::{AccessRange, Dispatch, GridExtent};
use crate::error::WgpuError;
use crate::pipelines::PipelineKey;

/// Rows of a buffer, or the same part of each row.
#[derive(Debug, Clone, Copy)]
pub struct StreamSlice<'a> {
    /// `[n_tokens, stride]`.
    pub buffer: &'a wgpu::Buffer,
    /// Elements of a row.
    pub stride: usize,
    /// The first element used.
    pub at: usize,
}

/// `y[t] = a[t]`, or `y[t] += a[t]` with `accumulate`, over `n` elements. With `b`, `a[t]` is first scaled to the
/// length (2-norm) of `b[t]`.
pub fn stretch(
    gpu: &WgpuDevice,
    n: usize,
    a: StreamSlice<'_>,
    b: Option<StreamSlice<'_>>,
    y: StreamSlice<'_>,
    accumulate: bool,
) -> Result<Dispatch, WgpuError> {
    if let Some(rows) = [Some(a), b, Some(y)].into_iter().flatten().find(|rows| rows.at + n > rows.stride) {
        let why = format!("{n} elements from the {}th on, of {}", rows.at, rows.stride);
        return Err(WgpuError::Mismatch { what: "rows to be stretched".into(), why });
    }
    let range = |rows: StreamSlice<'_>| AccessRange::Tokens(4 * rows.stride as u64);
    let mut buffers: Vec<(&dyn Bind, AccessRange)> = vec![(a.buffer, range(a)), (y.buffer, range(y))];
    buffers.extend(b.map(|b| (b.buffer as &dyn Bind, range(b))));
    let place = |rows: StreamSlice<'_>| [rows.stride, rows.at];
    let key = stretch_key(n, place(a), b.map(place), place(y), accumulate);
    Dispatch::new(gpu, &key, &buffers, [GridExtent::Tokens(1), GridExtent::Fixed(1), GridExtent::Fixed(1)])
}

fn stretch_key(n: usize, a: [usize; 2], b: Option<[usize; 2]>, y: [usize; 2], accumulate: bool) -> PipelineKey {
    let [b_stride, b_at] = b.unwrap_or_default();
    PipelineKey::new(
        "stretch",
        [
            ("n", n.into()),
            ("a_stride", a[0].into()),
            ("a_at", a[1].into()),
            ("stretch", b.is_some().into()),
            ("b_stride", b_stride.into()),
            ("b_at", b_at.into()),
            ("y_stride", y[0].into()),
            ("y_at", y[1].into()),
            ("accumulate", accumulate.into()),
        ],
    )
}

/// The scalar twin of [`stretch`] for one row, without accumulation.
pub fn stretch_twin(a: &[f32], b: Option<&[f32]>) -> Vec<f32> {
    let length = |row: &[f32]| row.iter().map(|&x| f64::from(x) * f64::from(x)).sum::<f64>().sqrt();
    let factor = b.map_or(1.0, |b| length(b) / length(a));
    a.iter().map(|&x| (f64::from(x) * factor) as f32).collect()
}

/// The buffers of [`predict_streams`] and [`correct_streams`].
#[derive(Debug, Clone, Copy)]
pub struct StreamsBuffers<'a> {
    /// `[n_tokens, n_streams]`: the router's products.
    pub router: &'a wgpu::Buffer,
    /// The matrix that turns them into coefficients: `[n_streams * n_streams, n_streams]` for a prediction,
    /// `[n_streams, n_streams]` for a correction.
    pub matrix: &'a wgpu::Buffer,
    /// `[n_tokens, n_streams, n]`: the streams, updated in place.
    pub streams: &'a wgpu::Buffer,
    /// `[n_tokens, n]`: receives the first stream; for a correction also the layer's result.
    pub x: &'a wgpu::Buffer,
}

/// `streams[i] += sum over j of c[i][j] streams[j]` with `c = matrix tanh(router)`; then `x = streams[0]`.
pub fn predict_streams(
    gpu: &WgpuDevice,
    n: usize,
    n_streams: usize,
    b: &StreamsBuffers<'_>,
) -> Result<Dispatch, WgpuError> {
    Dispatch::new(gpu, &mix_key(n, n_streams, false), &mixed(n, n_streams, n_streams * n_streams, b), columns(n))
}

/// `streams[i] += (x - streams[0]) (c[i] + 1)` with `c = matrix tanh(router)`; then `x = streams[0]` and
/// `scaled = scale x`, where `scale` is `[n]`.
pub fn correct_streams(
    gpu: &WgpuDevice,
    n: usize,
    n_streams: usize,
    b: &StreamsBuffers<'_>,
    scale: &wgpu::Buffer,
    scaled: &wgpu::Buffer,
) -> Result<Dispatch, WgpuError> {
    let mut buffers = mixed(n, n_streams, n_streams, b);
    buffers.extend([(scale as &dyn Bind, AccessRange::floats(n)), (scaled, AccessRange::Tokens(4 * n as u64))]);
    Dispatch::new(gpu, &mix_key(n, n_streams, true), &buffers, columns(n))
}

fn mixed<'a>(n: usize, n_streams: usize, n_out: usize, b: &StreamsBuffers<'a>) -> Vec<(&'a dyn Bind, AccessRange)> {
    let row = |n: usize| AccessRange::Tokens(4 * n as u64);
    vec![
        (b.router, row(n_streams)),
        (b.matrix, AccessRange::floats(n_out * n_streams)),
        (b.streams, row(n_streams * n)),
        (b.x, row(n)),
    ]
}

fn columns(n: usize) -> [GridExtent; 3] {
    [GridExtent::Fixed(n.div_ceil(256) as u32), GridExtent::Tokens(1), GridExtent::Fixed(1)]
}

fn mix_key(n: usize, n_streams: usize, correct: bool) -> PipelineKey {
    let name = if correct { "correct_streams" } else { "predict_streams" };
    let constants = [("n", n.into()), ("n_streams", n_streams.into()), ("correct", correct.into())];
    PipelineKey::new("streams_mix", constants).named(name)
}

/// The scalar twin of [`predict_streams`] for one token. `streams` is `[n_streams, n]`.
pub fn predict_streams_twin(router: &[f32], matrix: &[f32], streams: &[f32]) -> Vec<f32> {
    let (n_streams, n) = (router.len(), streams.len() / router.len());
    let coefficient = |i: usize, j: usize| tanh_product(&matrix[(i * n_streams + j) * n_streams..], router);
    let predicted = |i: usize, e: usize| {
        let sum: f64 = (0..n_streams).map(|j| coefficient(i, j) * f64::from(streams[j * n + e])).sum();
        (f64::from(streams[i * n + e]) + sum) as f32
    };
    (0..n_streams).flat_map(|i| (0..n).map(move |e| (i, e))).map(|(i, e)| predicted(i, e)).collect()
}

/// The scalar twin of [`correct_streams`] for one token: the streams after it.
pub fn correct_streams_twin(router: &[f32], matrix: &[f32], streams: &[f32], x: &[f32]) -> Vec<f32> {
    let n = x.len();
    let corrected = |i: usize, e: usize| {
        let innovation = f64::from(x[e]) - f64::from(streams[e]);
        (f64::from(streams[i * n + e]) + innovation * (tanh_product(&matrix[i * router.len()..], router) + 1.0)) as f32
    };
    (0..router.len()).flat_map(|i| (0..n).map(move |e| (i, e))).map(|(i, e)| corrected(i, e)).collect()
}

fn tanh_product(row: &[f32], router: &[f32]) -> f64 {
    row.iter().zip(router).map(|(&w, &x)| f64::from(w) * f64::from(x).tanh()).sum()
}

/// `streams[i] += y` for all streams but the first. `streams` is `[n_tokens, n_streams, n]`, `y` `[n_tokens, n]`.
pub fn add_to_idle_streams(
    gpu: &WgpuDevice,
    n: usize,
    n_streams: usize,
    streams: &wgpu::Buffer,
    y: &wgpu::Buffer,
) -> Result<Dispatch, WgpuError> {
    let row = |n: usize| AccessRange::Tokens(4 * n as u64);
    Dispatch::new(gpu, &add_key(n, n_streams), &[(streams, row(n_streams * n)), (y, row(n))], columns(n))
}

fn add_key(n: usize, n_streams: usize) -> PipelineKey {
    PipelineKey::new("streams_add", [("n", n.into()), ("n_streams", n_streams.into())]).named("add_to_idle_streams")
}

/// The scalar twin of [`add_to_idle_streams`] for one token.
pub fn add_to_idle_streams_twin(streams: &[f32], y: &[f32]) -> Vec<f32> {
    let added = |(i, &x): (usize, &f32)| if i < y.len() { x } else { x + y[i % y.len()] };
    streams.iter().enumerate().map(added).collect()
}

pub(crate) fn catalogue() -> Vec<PipelineKey> {
    vec![
        stretch_key(2048, [2048, 0], Some([2048, 0]), [8192, 2048], false),
        mix_key(2048, 4, false),
        mix_key(2048, 4, true),
        add_key(2048, 4),
    ]
}
