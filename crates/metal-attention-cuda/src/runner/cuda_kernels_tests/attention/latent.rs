//! Multi-head latent attention (`latent_attention.cu`): the inputs with the append to the cache, and attention over
//! compressed rows, whole and in splits that are merged.

use std::sync::Arc;

use half::f16;

use super::super::{Expected, assert_close, device, launch, poisoned, random, read, to_f64};
use super::{F32_ERROR, PAGE};
use crate::CudaDevice;
use crate::args::{LatentAttentionArgs, LatentInputsArgs, PagesArgs, TokenArgs};
use crate::device::CudaBuffer;
use crate::kernels;
use crate::launch::LaunchGrid;

const EPS: f32 = 1e-5;

/// A latent attention.
#[derive(Debug, Clone, Copy)]
struct Latent {
    n_head: usize,
    n_nope: usize,
    rank: usize,
    n_shared: usize,
    f16: bool,
}

impl Latent {
    fn key_dim(&self) -> usize {
        self.rank + self.n_shared
    }
}

/// Runs of consecutive tokens: sequence, first position, tokens. Around the 32 positions of a block and the 64 of a
/// page.
const RUNS: &[(usize, usize, usize)] =
    &[(2, 0, 1), (0, 30, 3), (5, 62, 4), (1, 96, 1), (4, 200, 1), (3, 3, 1), (6, 127, 2)];
const MAX_PAGES: usize = 5;

/// The compressed rows of all sequences in pages that have no order; NaN where no sequence has a position.
struct Cache {
    latent: Latent,
    /// All elements, `[page][position][element]`, as the device has them.
    elements: Vec<f32>,
    pages: Vec<u32>,
    tokens: Vec<TokenArgs>,
    buffer: CudaBuffer,
    page_buffer: CudaBuffer,
    token_buffer: CudaBuffer,
}

impl Cache {
    /// `appended`: the rows of the tokens of the batch are in the cache already.
    fn new(gpu: &Arc<CudaDevice>, latent: Latent, appended: bool) -> Self {
        let n_seq = RUNS.iter().map(|run| run.0 + 1).max().unwrap();
        let n_pages = n_seq * MAX_PAGES;
        let pages: Vec<u32> = (0..n_pages).map(|i| 1 + (i * 11 % n_pages) as u32).collect();
        let key_dim = latent.key_dim();
        let mut elements = vec![f32::NAN; (n_pages + 1) * PAGE * key_dim];
        for &(seq, first, n) in RUNS {
            let rows = random(90 + seq as u64, (first + n) * key_dim);
            for (pos, row) in rows.chunks(key_dim).enumerate().take(if appended { first + n } else { first }) {
                let at = (pages[seq * MAX_PAGES + pos / PAGE] as usize * PAGE + pos % PAGE) * key_dim;
                let to = elements[at..][..key_dim].iter_mut();
                to.zip(row).for_each(|(to, v)| *to = if latent.f16 { f16::from_f32(*v).to_f32() } else { *v });
            }
        }
        // The runs of even sequences are bidirectional spans.
        let token = |seq: u32, pos: u32, end: u32| TokenArgs {
            id: 0,
            seq,
            pos,
            last: if seq.is_multiple_of(2) { end } else { 0 },
            position: pos + 3,
            rope_row: (MAX_PAGES * PAGE - 1) as u32 - pos,
        };
        let tokens: Vec<_> = RUNS
            .iter()
            .flat_map(|&(seq, first, n)| {
                (first..first + n).map(move |pos| token(seq as u32, pos as u32, (first + n - 1) as u32))
            })
            .collect();
        let buffer = if latent.f16 {
            let halves: Vec<u16> = elements.iter().map(|v| f16::from_f32(*v).to_bits()).collect();
            gpu.upload("cache", &halves).unwrap()
        } else {
            gpu.upload("cache", &elements).unwrap()
        };
        Self {
            latent,
            elements,
            buffer,
            page_buffer: gpu.upload("pages", &pages).unwrap(),
            token_buffer: gpu.upload("tokens", &tokens).unwrap(),
            pages,
            tokens,
        }
    }

    /// The first element of a sequence's row.
    fn row_at(&self, seq: u32, pos: usize) -> usize {
        let page = self.pages[seq as usize * MAX_PAGES + pos / PAGE] as usize;
        (page * PAGE + pos % PAGE) * self.latent.key_dim()
    }

    fn page_args(&self) -> PagesArgs {
        PagesArgs { pages: self.page_buffer.ptr(), n_pages: MAX_PAGES as u32, unused: 0 }
    }

    fn read(&self, gpu: &Arc<CudaDevice>) -> Vec<f32> {
        if !self.latent.f16 {
            return read(gpu, &self.buffer, self.elements.len());
        }
        let halves: Vec<u16> = read(gpu, &self.buffer, self.elements.len());
        halves.iter().map(|bits| f16::from_bits(*bits).to_f32()).collect()
    }
}

/// `rotation`: 0: none, 1: interleaved, 2: halves. `growth`: of scores with the position, by the length and offset of
/// positions.
fn check_inputs(gpu: &Arc<CudaDevice>, latent: Latent, rotation: u32, (growth, length, offset): (f32, usize, usize)) {
    let what = format!("{latent:?}, rotation {rotation}, growth {growth}");
    let Latent { n_head, n_nope, rank, n_shared, .. } = latent;
    let (key_dim, head_dim, half) = (latent.key_dim(), n_nope + n_shared, n_shared / 2);
    let cache = Cache::new(gpu, latent, false);
    let n = cache.tokens.len();
    let (q, kv, norm) = (random(1, n * n_head * head_dim), random(2, n * key_dim), random(3, rank));
    let expanded = random(4, n * n_head * key_dim);
    // The part with RoPE is undefined before.
    let given: Vec<f32> =
        expanded.iter().enumerate().map(|(i, v)| if i % key_dim < rank { *v } else { f32::NAN }).collect();
    let rope: Vec<f32> = (0..MAX_PAGES * PAGE * half)
        .map(|i| (i / half) as f64 * 1e4f64.powf(-((i % half) as f64) / half as f64))
        .flat_map(|angle| [angle.cos() as f32, angle.sin() as f32])
        .collect();
    let scale = 0.3f32;
    let upload = |v: &Vec<f32>| gpu.upload("latent", v).unwrap();
    let [q_buffer, kv_buffer, norm_buffer, queries, rope_buffer] = [&q, &kv, &norm, &given, &rope].map(upload);
    let args = LatentInputsArgs {
        tokens: cache.token_buffer.ptr(),
        pages: cache.page_args(),
        cache: cache.buffer.ptr(),
        q: q_buffer.ptr(),
        kv: kv_buffer.ptr(),
        norm: norm_buffer.ptr(),
        rope: rope_buffer.ptr(),
        queries: queries.ptr(),
        n_head: n_head as u32,
        n_nope: n_nope as u32,
        rank: rank as u32,
        n_shared: n_shared as u32,
        rotation,
        eps: EPS,
        scale,
        temperature: growth,
        length: length as u32,
        offset: offset as u32,
    };
    let grid = LaunchGrid { blocks: [1 + n_head, n, 1], threads: 128, shared: 0 };
    let kernel = kernels::LATENT_INPUTS[usize::from(!latent.f16)];
    launch(gpu, kernel, grid, &args);

    let rotated = |v: &[f64], rope_row: usize| {
        let mut v = v.to_vec();
        for i in 0..if rotation == 0 { 0 } else { half } {
            let (a, b) = if rotation == 2 { (i, i + half) } else { (2 * i, 2 * i + 1) };
            let [cos, sin] = [0, 1].map(|part| f64::from(rope[2 * (rope_row * half + i) + part]));
            (v[a], v[b]) = (v[a] * cos - v[b] * sin, v[a] * sin + v[b] * cos);
        }
        v
    };
    let got = cache.read(gpu);
    let mut others = got.clone();
    let mut expected = Vec::new();
    for (i, token) in cache.tokens.iter().enumerate() {
        let (rope_row, at) = (token.rope_row as usize, cache.row_at(token.seq, token.pos as usize));
        let row = to_f64(&kv[i * key_dim..][..key_dim]);
        let square = row[..rank].iter().map(|v| v * v).sum::<f64>() / rank as f64;
        let factor = 1.0 / (square + f64::from(EPS)).sqrt();
        let mut twin: Vec<f64> = row[..rank].iter().zip(&norm).map(|(v, w)| v * factor * f64::from(*w)).collect();
        twin.extend(rotated(&row[rank..], rope_row));
        // Half a unit in the last place of F16, and a few of F32.
        let of = if latent.f16 { 1.0 / 2048.0 } else { 0.0 };
        let twin: Vec<_> = twin.iter().map(|v| Expected { value: *v, error: of * v.abs() + 1e-6 }).collect();
        assert_close(&got[at..][..key_dim], &twin, key_dim, &format!("{what}: the compressed row of token {i}"));
        others[at..][..key_dim].copy_from_slice(&cache.elements[at..][..key_dim]);
        let grown = scale * (1.0 + growth * (1.0 + ((token.position as usize + offset) / length) as f32).ln());
        for head in i * n_head..(i + 1) * n_head {
            let mut query = to_f64(&expanded[head * key_dim..][..rank]);
            query.extend(rotated(&to_f64(&q[head * head_dim + n_nope..][..n_shared]), rope_row));
            expected.extend(query.iter().map(|v| Expected { value: v * f64::from(grown), error: 6e-7 }));
        }
    }
    let same = |(a, b): (&f32, &f32)| a.to_bits() == b.to_bits() || a.is_nan() && b.is_nan();
    assert!(others.iter().zip(&cache.elements).all(same), "{what}: the cache has changed elsewhere");
    assert_close(&read(gpu, &queries, expected.len()), &expected, n_head * key_dim, &format!("{what}: queries"));
}

/// Heads; elements of a query without RoPE, of a value, and of the part with RoPE. Rows that are a multiple of a vector
/// of the cache and others, more heads than a block has, the largest rank.
const SIZES: [(usize, usize, usize, usize); 7] =
    [(1, 4, 4, 0), (1, 4, 4, 4), (3, 8, 36, 8), (8, 16, 64, 32), (9, 4, 68, 6), (17, 12, 128, 4), (2, 128, 512, 64)];

fn latents() -> impl Iterator<Item = Latent> {
    let of_type = |f16| SIZES.map(|(n_head, n_nope, rank, n_shared)| Latent { n_head, n_nope, rank, n_shared, f16 });
    [true, false].into_iter().flat_map(of_type)
}

#[test]
fn latent_inputs() {
    let Some(gpu) = device() else { return };
    for (i, latent) in latents().enumerate() {
        for rotation in 0..3 {
            let growth = if (i + rotation as usize).is_multiple_of(2) { (0.2, 16, 5) } else { (0.0, 1, 0) };
            check_inputs(&gpu, latent, rotation, growth);
        }
    }
}

fn check_attention(gpu: &Arc<CudaDevice>, latent: Latent, n_splits: usize) {
    let what = format!("{latent:?}, {n_splits} splits");
    let Latent { n_head, rank, n_shared, .. } = latent;
    let key_dim = latent.key_dim();
    let cache = Cache::new(gpu, latent, true);
    let n = cache.tokens.len();
    // Scores of some 4.
    let size = 6.0 / (key_dim as f32).sqrt();
    let queries: Vec<f32> = random(5, n * n_head * key_dim).iter().map(|v| size * v).collect();
    let query_buffer = gpu.upload("queries", &queries).unwrap();
    let (out, partial) = (poisoned(gpu, n * n_head * rank), poisoned(gpu, n * n_head * n_splits * (rank + 2)));
    let args = LatentAttentionArgs {
        tokens: cache.token_buffer.ptr(),
        pages: cache.page_args(),
        cache: cache.buffer.ptr(),
        queries: query_buffer.ptr(),
        out: out.ptr(),
        partial: partial.ptr(),
        n_head: n_head as u32,
        rank: rank as u32,
        n_shared: n_shared as u32,
        n_splits: n_splits as u32,
    };
    let bytes = if latent.f16 { 2 } else { 4 };
    let vectors = (key_dim * bytes).div_ceil(16);
    let shared = 32 * (vectors | 1) * 16 + 4 * 8 * vectors * (16 / bytes);
    let grid = LaunchGrid { blocks: [n_head.div_ceil(8), n_splits, n], threads: 256, shared };
    let kernel = kernels::LATENT_ATTENTION[usize::from(!latent.f16)];
    launch(gpu, kernel, grid, &args);
    if n_splits > 1 {
        let grid = LaunchGrid { blocks: [n_head, n, 1], threads: 128, shared: 0 };
        launch(gpu, kernels::LATENT_MERGE, grid, &args);
    }
    let mut expected = Vec::new();
    for (i, token) in cache.tokens.iter().enumerate() {
        let row = |pos: usize| to_f64(&cache.elements[cache.row_at(token.seq, pos)..][..key_dim]);
        let rows: Vec<Vec<f64>> = (0..=token.pos.max(token.last) as usize).map(row).collect();
        for head in i * n_head..(i + 1) * n_head {
            let q = to_f64(&queries[head * key_dim..][..key_dim]);
            let scores: Vec<f64> = rows.iter().map(|row| row.iter().zip(&q).map(|(k, q)| k * q).sum()).collect();
            let largest = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let weights: Vec<f64> = scores.iter().map(|score| (score - largest).exp()).collect();
            let sum: f64 = weights.iter().sum();
            let value = |e: usize| rows.iter().zip(&weights).map(|(row, weight)| weight * row[e]).sum::<f64>() / sum;
            expected.extend((0..rank).map(|e| Expected { value: value(e), error: F32_ERROR }));
        }
    }
    assert_close(&read(gpu, &out, expected.len()), &expected, n_head * rank, &what);
}

#[test]
fn latent_attention() {
    let Some(gpu) = device() else { return };
    for latent in latents() {
        // One split, some, one for each block of positions, and more.
        for n_splits in [1, 2, 3, 7, 32] {
            check_attention(&gpu, latent, n_splits);
        }
    }
}
