//! Synthetic picture encoders with random weights, as the bytes of `mmproj` files.

mod families;

pub use families::{FamilyFile, families};

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
    file("gemma3", false, &keys, &more, n_embd)
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
    more.extend([("mm.0.bias", vec![N_FF]), ("mm.2.bias", vec![n_embd])]);
    more.extend([("v.deepstack.0.fc1.bias", vec![N_FF]), ("v.deepstack.0.fc2.bias", vec![n_embd])]);
    file("qwen3vl_merger", true, &keys, &more, n_embd)
}

/// The built-in model `tiny.gguf`, an encoder for it, `tiny-mmproj.gguf`, and two pictures, `1.bmp` and `2.bmp`.
pub fn files() -> Files {
    let model = std::fs::read(crate::stories()).expect("the built-in model");
    let pictures = [1, 2].map(|seed| (format!("{seed}.bmp"), bmp(40, 30, seed)));
    let files = [("tiny.gguf".to_owned(), model), ("tiny-mmproj.gguf".to_owned(), gemma3(64))];
    files.into_iter().chain(pictures).collect()
}

/// A file with the tensors of a tower and `more`.
/// `fused`: queries, keys and values are one matrix.
fn file(projector: &str, fused: bool, keys: &[(&str, usize)], more: &[(&str, Vec<usize>)], n_embd: usize) -> Vec<u8> {
    let mut file = Builder::new(projector, keys, n_embd);
    let linear = |file: &mut Builder, name: &str, n_in: usize, n_out: usize| {
        file.add(format!("{name}.weight"), &[n_in, n_out], Values::WIDE);
        file.add(format!("{name}.bias"), &[n_out], Values::WIDE);
    };
    file.add("v.patch_embd.weight", &[PATCH, PATCH, 3, WIDTH], Values::WIDE);
    file.add("v.patch_embd.bias", &[WIDTH], Values::WIDE);
    for block in 0..N_BLOCK {
        let name = |part: &str| format!("v.blk.{block}.{part}");
        let square = |part| (part, WIDTH, WIDTH);
        let mut matrices = if fused {
            vec![("attn_qkv", WIDTH, 3 * WIDTH)]
        } else {
            ["attn_q", "attn_k", "attn_v"].map(square).to_vec()
        };
        matrices.extend([square("attn_out"), ("ffn_up", WIDTH, N_FF), ("ffn_down", N_FF, WIDTH)]);
        for (part, n_in, n_out) in matrices {
            linear(&mut file, &name(part), n_in, n_out);
        }
        for (part, values) in [("weight", Values::AROUND_ONE), ("bias", Values::WIDE)] {
            for norm in ["ln1", "ln2"] {
                file.add(name(&format!("{norm}.{part}")), &[WIDTH], values);
            }
        }
    }
    file.norm("v.post_ln", WIDTH);
    for (name, shape) in more {
        file.add(*name, shape, if name.ends_with("norm.weight") { Values::AROUND_ONE } else { Values::WIDE });
    }
    file.finish()
}

/// The distribution of a tensor's values: uniform, this far on both sides of the mean.
#[derive(Clone, Copy)]
struct Values {
    mean: f32,
    spread: f32,
}

impl Values {
    /// Of most tensors.
    const WIDE: Self = Self { mean: 0.0, spread: 0.5 };
    /// Of the weights of norms.
    const AROUND_ONE: Self = Self { mean: 1.0, spread: 0.1 };
}

/// A file under construction: its metadata, and its tensors, F32 or F16.
struct Builder {
    metadata: Metadata,
    tensors: Vec<(TensorDecl, Values)>,
    /// Whether the first row of the table of positions, that of the class token, goes behind the others.
    class_last: bool,
}

impl Builder {
    /// A file with the keys of a small tower and `keys`, which are under `clip.vision.`.
    fn new(projector: &str, keys: &[(&str, usize)], n_embd: usize) -> Self {
        let mut metadata = Metadata::new();
        metadata.set("general.architecture", "clip");
        metadata.set("clip.has_vision_encoder", true);
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
        Self { metadata, tensors: Vec::new(), class_last: false }
    }

    fn add(&mut self, name: impl Into<String>, shape: &[usize], values: Values) {
        self.tensors.push((TensorDecl { name: name.into(), shape: shape.to_vec(), ty: TensorType::F32 }, values));
    }

    /// A norm with a weight and a bias.
    fn norm(&mut self, name: &str, width: usize) {
        self.add(format!("{name}.weight"), &[width], Values::AROUND_ONE);
        self.add(format!("{name}.bias"), &[width], Values::WIDE);
    }

    /// The file with random values, the same each time.
    fn finish(self) -> Vec<u8> {
        let tensors: Vec<TensorDecl> = self.tensors.iter().map(|(tensor, _)| tensor.clone()).collect();
        let mut writer = GgufWriter::new(Vec::new(), 3, &self.metadata, &tensors).unwrap();
        let mut state = 1_u64;
        for (tensor, Values { mean, spread }) in &self.tensors {
            let n: usize = tensor.shape.iter().product();
            let bytes = (0..n).flat_map(|_| {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                let x = (state >> 40) as f32 / (1_u64 << 24) as f32 - 0.5;
                let value = mean + 2.0 * spread * x;
                if tensor.ty == TensorType::F16 {
                    half::f16::from_f32(value).to_le_bytes().to_vec()
                } else {
                    value.to_le_bytes().to_vec()
                }
            });
            let mut bytes: Vec<u8> = bytes.collect();
            if self.class_last && tensor.name == "v.position_embd.weight" {
                bytes.rotate_left(4 * tensor.shape[0]);
            }
            writer.write(&bytes).unwrap();
        }
        writer.finish().unwrap()
    }
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
