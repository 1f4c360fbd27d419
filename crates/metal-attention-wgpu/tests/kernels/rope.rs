//! `rope_apply`, `rope_apply_dual` and the RoPE cos/sin table, against their twins.

use crate::support::{nmse, random, run, variants};
use metal_attention_model::{BatchToken, CacheType, Rope, RopeLayout, RopeScaling};
use metal_attention_wgpu::kernels::{
    AttentionBuffers, AttentionShape, RopeShape, norm_rope_twin, rope_apply, rope_apply_dual, rope_twin,
};
use metal_attention_wgpu::{InputPlace, batch_words, batch_words_at, wgpu};

const LAYOUTS: [RopeLayout; 2] = [RopeLayout::Interleaved, RopeLayout::Halves];
const N_CTX: usize = 1024;

/// The largest NMSE: two products and a sum of 32-bit floats, each with an error of at most 2^-24. A norm adds a mean
/// of squares.
const TOLERANCE: f64 = 1e-13;

/// The RoPE cos/sin table, `[N_CTX, n_rot]`.
fn table(n_rot: usize, layout: RopeLayout) -> Vec<f32> {
    Rope::new(n_rot, layout, 10_000.0).rotation(None).table(N_CTX)
}

/// Tokens of two sequences, at positions in no order.
fn tokens() -> Vec<BatchToken> {
    [0, 1, 127, 128, 129, 1000, N_CTX - 1, 3]
        .iter()
        .enumerate()
        .map(|(i, &pos)| BatchToken { id: 0, seq: i % 2, pos, output: true })
        .collect()
}

/// The table's row of position `pos`.
fn row(table: &[f32], n_rot: usize, pos: usize) -> &[f32] {
    &table[pos * n_rot..][..n_rot]
}

#[test]
fn rope_apply_matches_its_twin() {
    let tokens = tokens();
    for gpu in variants() {
        let batch = gpu.upload("batch", &batch_words(&tokens)).unwrap();
        for layout in LAYOUTS {
            for (n_heads, head_dim, n_rot) in
                [(1, 2, 2), (3, 20, 20), (9, 64, 64), (2, 80, 32), (1, 31, 30), (2, 1024, 1024)]
            {
                let table = table(n_rot, layout);
                let x = random(1, tokens.len() * n_heads * head_dim);
                let (gx, gt) = (gpu.upload("x", &x).unwrap(), gpu.upload("rope", &table).unwrap());
                let shape = RopeShape { n_heads, head_dim, n_rot, layout, n_ctx: N_CTX };
                run(gpu, &[rope_apply(gpu, shape, &gx, &gt, &batch).unwrap()], tokens.len());
                let got: Vec<f32> = gpu.read(&gx, x.len()).unwrap();
                let heads = x.chunks(head_dim).enumerate();
                let want: Vec<f32> = heads
                    .flat_map(|(i, head)| rope_twin(layout, head, row(&table, n_rot, tokens[i / n_heads].pos)))
                    .collect();
                let error = nmse(&got, &want);
                assert!(error < TOLERANCE, "{shape:?}: {error:e}");
            }
        }
    }
}

#[test]
fn tokens_are_rotated_by_their_row_of_the_table() {
    let (n_rot, tokens) = (8, tokens());
    // The last one is beyond the table, whose end is read in its place.
    let rows = [7, 0, 128, 127, N_CTX - 1, 1, 5, N_CTX + 3];
    for gpu in variants() {
        let words = batch_words_at(&tokens, |t| InputPlace { rope_row: rows[t] as u32, ..InputPlace::of_text(9) });
        let batch = gpu.upload("batch", &words).unwrap();
        let table = table(n_rot, RopeLayout::Halves);
        let x = random(1, tokens.len() * n_rot);
        let (gx, gt) = (gpu.upload("x", &x).unwrap(), gpu.upload("rope", &table).unwrap());
        let shape = RopeShape { n_heads: 1, head_dim: n_rot, n_rot, layout: RopeLayout::Halves, n_ctx: N_CTX };
        run(gpu, &[rope_apply(gpu, shape, &gx, &gt, &batch).unwrap()], tokens.len());
        let got: Vec<f32> = gpu.read(&gx, x.len()).unwrap();
        let heads = x.chunks(n_rot).zip(rows).take(rows.len() - 1);
        let want: Vec<f32> =
            heads.flat_map(|(head, at)| rope_twin(RopeLayout::Halves, head, row(&table, n_rot, at))).collect();
        let error = nmse(&got[..want.len()], &want);
        assert!(error < TOLERANCE, "{error:e}");
        assert!(got[want.len()..].iter().all(|x| x.is_finite()));
    }
}

#[test]
fn rope_apply_dual_matches_its_twin_and_leaves_values_unchanged() {
    let tokens = tokens();
    for gpu in variants() {
        let batch = gpu.upload("batch", &batch_words(&tokens)).unwrap();
        for (layout, qk_norm_eps) in LAYOUTS.into_iter().flat_map(|l| [(l, None), (l, Some(1e-6))]) {
            for (n_head, n_head_kv, head_dim, n_rot) in
                [(1, 1, 20, 10), (9, 3, 64, 64), (8, 1, 128, 128), (2, 2, 33, 32)]
            {
                let shape = AttentionShape {
                    n_head,
                    n_head_kv,
                    head_dim,
                    scale: 1.0,
                    soft_cap: None,
                    sinks: false,
                    window: None,
                    n_ctx: N_CTX,
                    group: 0,
                    n_rot,
                    rope_layout: layout,
                    qk_norm_eps,
                    gated: false,
                    cache: CacheType::F32,
                    n_trailing: 0,
                };
                let table = table(n_rot, layout);
                let weight = random(2, 2 * head_dim);
                let qkv = random(1, tokens.len() * shape.qkv_len());
                let (gx, gt) = (gpu.upload("qkv", &qkv).unwrap(), gpu.upload("rope", &table).unwrap());
                let norm = gpu.upload("norm", &weight).unwrap();
                let unused: wgpu::Buffer = gpu.buffer("unused", 16).unwrap();
                let buffers = AttentionBuffers {
                    qkv: &gx,
                    rope: &gt,
                    qk_norm: qk_norm_eps.is_some().then_some(&norm),
                    sinks_and_slopes: None,
                    keys: &unused,
                    values: &unused,
                    attention_out: &unused,
                    partial: &unused,
                    last_seen: &unused,
                    batch: &batch,
                };
                run(gpu, &[rope_apply_dual(gpu, &shape, &buffers).unwrap()], tokens.len());
                let got: Vec<f32> = gpu.read(&gx, qkv.len()).unwrap();
                let (mut rotated, mut want) = (Vec::new(), Vec::new());
                for (i, (head, got)) in qkv.chunks(head_dim).zip(got.chunks(head_dim)).enumerate() {
                    let (token, h) = (i / (n_head + 2 * n_head_kv), i % (n_head + 2 * n_head_kv));
                    if h >= n_head + n_head_kv {
                        assert_eq!(got, head, "{shape:?}: value head {h} of token {token}");
                        continue;
                    }
                    let angles = row(&table, n_rot, tokens[token].pos);
                    rotated.extend_from_slice(got);
                    want.extend(match qk_norm_eps {
                        None => rope_twin(layout, head, angles),
                        Some(eps) => {
                            let weight = if h < n_head { &weight[..head_dim] } else { &weight[head_dim..] };
                            norm_rope_twin(layout, head, angles, weight, eps)
                        }
                    });
                }
                let error = nmse(&rotated, &want);
                assert!(error < TOLERANCE, "{shape:?}: {error:e}");
            }
        }
    }
}

#[test]
fn the_table_has_the_angles_of_the_models_scaling() {
    let rope = Rope { scaling: RopeScaling::Linear { factor: 2.0 }, ..Rope::new(4, RopeLayout::Halves, 100.0) };
    // Frequencies 1 and 100^(-1/2), halved by linear scaling, the second also divided by its factor 5.
    let table = rope.rotation(Some(&[1.0, 5.0])).table(7);
    assert_eq!(table.len(), 7 * 4);
    for (pos, row) in table.chunks(4).enumerate() {
        let (a, b) = (pos as f64 * 0.5, pos as f64 * 0.01);
        for (got, want) in row.iter().zip([a.cos(), a.sin(), b.cos(), b.sin()]) {
            assert!((f64::from(*got) - want).abs() < 1e-7, "position {pos}: {got} {want}");
        }
    }
}
