//! Synthetic picture encoders with random weights, as the bytes of `mmproj` files.

use metal_attention_gguf::{GgufWriter, Metadata, TensorDecl, TensorType};

use crate::models::Files;

/// Pixels of a patch's side.
pub const PATCH: usize = 4;
/// Width of the encoder's rows.
pub const WIDTH: usize = 16;
/// Width of its feed-forwards.
const N_FF: usize = 24;
/// Blocks.
const N_BLOCK: usize = 2;

/// An encoder as that of Gemma 3, for squares of 6 x 6 patches, of which each 3 x 3 become a row: four rows of `n_embd` values,
/// which attend to each other in both directions.
pub fn gemma3(n_embd: usize) -> Vec<u8> {
    let keys = [("image_size", 6 * PATCH), ("projector.scale_factor", 3)];
    let more = [
        ("v.position_embd.weight", vec![WIDTH, 36]),
        ("mm.soft_emb_norm.weight", vec![WIDTH]),
        ("mm.input_projection.weight", vec![n_embd, WIDTH]),
    ];
    file("gemma3", &keys, &more, n_embd)
}

/// An encoder as that of Qwen3-VL, for pictures of any size, of which each 2 x 2 patches become a row, with a second row that is
/// added after the first layer.
pub fn qwen3vl(n_embd: usize) -> Vec<u8> {
    let (keys, merged) = ([("image_size", 4 * PATCH), ("spatial_merge_size", 2)], 4 * WIDTH);
    let mut more = vec![
        ("v.position_embd.weight", vec![WIDTH, 16]),
        ("v.patch_embd.weight.1", vec![PATCH, PATCH, 3, WIDTH]),
        ("v.deepstack.0.norm.weight", vec![merged]),
        ("v.deepstack.0.norm.bias", vec![merged]),
    ];
    for (name, n_in, n_out) in [("mm.0", merged, N_FF), ("mm.2", N_FF, n_embd)] {
        more.push(if name == "mm.0" { ("mm.0.weight", vec![n_in, n_out]) } else { ("mm.2.weight", vec![n_in, n_out]) });
    }
    more.extend([("v.deepstack.0.fc1.weight", vec![merged, N_FF]), ("v.deepstack.0.fc2.weight", vec![N_FF, n_embd])]);
    file("qwen3vl_merger", &keys, &more, n_embd)
}

/// The built-in model `tiny.gguf`, an encoder for it, `tiny-mmproj.gguf`, and two pictures, `1.bmp` and `2.bmp`.
pub fn files() -> Files {
    let model = std::fs::read(crate::stories()).expect("the built-in model");
    let pictures = [1, 2].map(|seed| (format!("{seed}.bmp"), bmp(40, 30, seed)));
    let files = [("tiny.gguf".to_owned(), model), ("tiny-mmproj.gguf".to_owned(), gemma3(64))];
    files.into_iter().chain(pictures).collect()
}

/// A file with the tensors of a tower and `more`.
fn file(projector: &str, keys: &[(&str, usize)], more: &[(&str, Vec<usize>)], n_embd: usize) -> Vec<u8> {
    let mut metadata = Metadata::new();
    metadata.set("general.architecture", "clip");
    metadata.set("clip.projector_type", projector);
    metadata.set("clip.use_gelu", true);
    metadata.set("clip.vision.attention.layer_norm_epsilon", 1e-6_f32);
    metadata.set("clip.vision.image_mean", vec![0.5_f32; 3]);
    metadata.set("clip.vision.image_std", vec![0.5_f32; 3]);
    let sizes = [
        ("patch_size", PATCH),
        ("embedding_length", WIDTH),
        ("feed_forward_length", N_FF),
        ("block_count", N_BLOCK),
        ("attention.head_count", 2),
        ("projection_dim", n_embd),
    ];
    for (key, value) in sizes.iter().chain(keys) {
        metadata.set(format!("clip.vision.{key}"), *value as u32);
    }
    let mut shapes = vec![("v.patch_embd.weight".to_owned(), vec![PATCH, PATCH, 3, WIDTH])];
    shapes.push(("v.patch_embd.bias".to_owned(), vec![WIDTH]));
    for block in 0..N_BLOCK {
        let name = |part: &str| format!("v.blk.{block}.{part}");
        let matrices = ["attn_q", "attn_k", "attn_v", "attn_out"].map(|part| (part, WIDTH, WIDTH));
        for (part, n_in, n_out) in matrices.into_iter().chain([("ffn_up", WIDTH, N_FF), ("ffn_down", N_FF, WIDTH)]) {
            shapes.push((name(&format!("{part}.weight")), vec![n_in, n_out]));
            shapes.push((name(&format!("{part}.bias")), vec![n_out]));
        }
        shapes.extend(["ln1", "ln2"].map(|part| (name(&format!("{part}.weight")), vec![WIDTH])));
        shapes.extend(["ln1", "ln2"].map(|part| (name(&format!("{part}.bias")), vec![WIDTH])));
    }
    shapes.extend(["weight", "bias"].map(|part| (format!("v.post_ln.{part}"), vec![WIDTH])));
    shapes.extend(more.iter().map(|(name, shape)| ((*name).to_owned(), shape.clone())));
    let declared = shapes.into_iter().map(|(name, shape)| TensorDecl { name, shape, ty: TensorType::F32 });
    let tensors: Vec<TensorDecl> = declared.collect();
    let mut writer = GgufWriter::new(Vec::new(), 3, &metadata, &tensors).unwrap();
    let mut state = 1_u64;
    for tensor in &tensors {
        let is_norm =
            ["ln1.weight", "ln2.weight", "norm.weight", "post_ln.weight"].iter().any(|end| tensor.name.ends_with(end));
        let n: usize = tensor.shape.iter().product();
        let bytes = (0..n).flat_map(|_| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let x = (state >> 40) as f32 / (1_u64 << 24) as f32 - 0.5;
            (if is_norm { 1.0 + 0.2 * x } else { x }).to_le_bytes()
        });
        writer.write(&bytes.collect::<Vec<u8>>()).unwrap();
    }
    writer.finish().unwrap()
}

/// A picture as an uncompressed BMP file of `width` x `height` pixels: a gradient with squares, different for each `seed`.
pub fn bmp(width: usize, height: usize, seed: usize) -> Vec<u8> {
    let stride = (3 * width).next_multiple_of(4);
    let n = 54 + stride * height;
    let mut file = b"BM".to_vec();
    file.extend((n as u32).to_le_bytes());
    file.extend([0; 4]);
    file.extend(54_u32.to_le_bytes());
    file.extend(40_u32.to_le_bytes());
    file.extend((width as u32).to_le_bytes());
    file.extend((height as u32).to_le_bytes());
    file.extend(1_u16.to_le_bytes());
    file.extend(24_u16.to_le_bytes());
    file.extend([0; 24]);
    for y in 0..height {
        let start = file.len();
        for x in 0..width {
            let square = (x / 3 + y / 3 + seed) % 2 * 90;
            file.extend([(x * 5 + square) as u8, (y * 7 + seed * 31) as u8, (x + y + square) as u8]);
        }
        file.resize(start + stride, 0);
    }
    file
}
