//! An encoder of each family that is compared with llama.cpp's numbers, in `tests/data/reference/pictures.json.xz`.

use metal_attention_gguf::TensorType;

use super::{Builder, N_BLOCK, N_FF, PATCH, Values, WIDTH};

/// The width of a row of all files, deepstack rows included: that of the text model with which llama.cpp runs them.
const N_EMBD: usize = 32;

/// A file, and the pictures that llama.cpp has encoded with it.
pub struct FamilyFile {
    /// Its name, that of its projector.
    pub name: &'static str,
    /// The file.
    pub bytes: Vec<u8>,
    /// The file for llama.cpp, where it is another: with the position of the class token behind those of the patches, as llama.cpp puts
    /// that token, which stands before them in the original models, behind them.
    pub for_llama_cpp: Option<Vec<u8>>,
    /// Width, height and seed of each picture, [`bmp`](super::bmp).
    pub pictures: &'static [[usize; 3]],
    /// Whether only the tiles of a picture are compared, not the whole.
    pub tiles_only: bool,
}

/// Pictures that are about as large as a square encoder's.
const SQUARE: &[[usize; 3]] = &[[37, 24, 1], [24, 50, 2]];
/// Pictures of more than one window of 112 pixels.
const LARGE: &[[usize; 3]] = &[[130, 40, 1], [120, 128, 2]];
/// Pictures for encoders that keep a picture's size.
const KEPT: &[[usize; 3]] = &[[40, 24, 1], [29, 53, 2]];

/// All files.
pub fn families() -> Vec<FamilyFile> {
    let file = |name, bytes, pictures| FamilyFile { name, bytes, for_llama_cpp: None, pictures, tiles_only: false };
    let with_class = |name, bytes: fn(bool) -> Vec<u8>, pictures| FamilyFile {
        for_llama_cpp: Some(bytes(true)),
        ..file(name, bytes(false), pictures)
    };
    // llama.cpp reads tables of positions of another size than a tile's as if they were transposed, so that there is a file for the whole
    // and one for tiles.
    let tiles = FamilyFile {
        tiles_only: true,
        ..file("deepseekocr-tiles", deepseekocr(40, 10), &[[700, 300, 1], [650, 700, 2]])
    };
    let tiles_2 = FamilyFile { tiles_only: true, ..file("deepseekocr2-tiles", deepseekocr2(48), &[[780, 300, 1]]) };
    vec![
        file("gemma3", super::gemma3(N_EMBD), SQUARE),
        file("qwen3vl_merger", super::qwen3vl(N_EMBD / 2), KEPT),
        file("nemotron_v2_vl", nemotron_v2_vl(), SQUARE),
        with_class("cogvlm", cogvlm, SQUARE),
        file("hunyuanvl", hunyuanvl(), KEPT),
        file("deepseekocr", deepseekocr(64, 16), &[[100, 60, 1]]),
        tiles,
        file("deepseekocr2", deepseekocr2(64), &[[100, 60, 1]]),
        tiles_2,
        file("exaone4_5", exaone45(), LARGE),
        file("glm5v", glm5v(), &[[40, 24, 1], [29, 53, 2], [10, 12, 3]]),
        file("ling3vl", ling3vl(), KEPT),
        file("muse-glimmer", muse_glimmer(), KEPT),
        file("youtuvl", youtuvl(), KEPT),
        file("adapter", adapter(), SQUARE),
        file("ldpv2", ldpv2(), SQUARE),
    ]
}

/// The tensors of a tower's block that differ among families.
#[derive(Clone, Copy)]
struct BlockParts {
    /// Whether queries, keys and values are one matrix.
    fused: bool,
    /// Whether the feed-forward is gated.
    gated: bool,
    /// Whether norms have biases.
    norm_bias: bool,
    /// Kernels of a patch: one with a bias, or two without.
    n_kernels: usize,
    /// Width of keys and values.
    kv_width: usize,
}

/// Layer norms, separate matrices, no gate.
const PLAIN: BlockParts = BlockParts { fused: false, gated: false, norm_bias: true, n_kernels: 1, kv_width: WIDTH };

impl Builder {
    /// A matrix whose outputs are about as large as its inputs, without a bias.
    fn matrix(&mut self, name: &str, n_in: usize, n_out: usize) {
        self.add(format!("{name}.weight"), &[n_in, n_out], Values { mean: 0.0, spread: (2.0 / n_in as f32).sqrt() });
    }

    /// A matrix with a bias.
    fn linear(&mut self, name: &str, n_in: usize, n_out: usize) {
        self.matrix(name, n_in, n_out);
        self.add(format!("{name}.bias"), &[n_out], Values::WIDE);
    }

    /// A convolution without a bias.
    fn kernel(&mut self, name: &str, side: usize, n_in: usize, n_out: usize) {
        let spread = (2.0 / (side * side * n_in) as f32).sqrt();
        self.add(format!("{name}.weight"), &[side, side, n_in, n_out], Values { mean: 0.0, spread });
    }

    /// A convolution with a bias.
    fn convolution(&mut self, name: &str, side: usize, n_in: usize, n_out: usize) {
        self.kernel(name, side, n_in, n_out);
        self.add(format!("{name}.bias"), &[n_out], Values::WIDE);
    }

    /// Sets SiLU as the activation of blocks.
    fn use_silu(&mut self) {
        self.metadata.set("clip.use_gelu", false);
        self.metadata.set("clip.use_silu", true);
    }

    /// Makes a kernel a matrix of the same elements.
    fn flatten(&mut self, name: &str) {
        for (tensor, _) in self.tensors.iter_mut().filter(|(tensor, _)| tensor.name == name) {
            let n_out = tensor.shape.pop().unwrap();
            tensor.shape = vec![tensor.shape.iter().product(), n_out];
        }
    }

    /// A norm's weight.
    fn scale(&mut self, name: &str, width: usize) {
        self.add(format!("{name}.weight"), &[width], Values::AROUND_ONE);
    }

    /// A row of embeddings.
    fn row(&mut self, name: &str) {
        self.add(name, &[N_EMBD], Values::WIDE);
    }

    /// The patches and the blocks.
    fn tower(&mut self, parts: BlockParts) {
        if parts.n_kernels == 1 {
            self.convolution("v.patch_embd", PATCH, 3, WIDTH);
        } else {
            let values = Values { mean: 0.0, spread: 0.2 };
            for name in ["v.patch_embd.weight", "v.patch_embd.weight.1"] {
                self.add(name, &[PATCH, PATCH, 3, WIDTH], values);
            }
        }
        for block in 0..N_BLOCK {
            let name = |part: &str| format!("v.blk.{block}.{part}");
            if parts.fused {
                self.linear(&name("attn_qkv"), WIDTH, WIDTH + 2 * parts.kv_width);
            } else {
                for (part, n_out) in [("attn_q", WIDTH), ("attn_k", parts.kv_width), ("attn_v", parts.kv_width)] {
                    self.linear(&name(part), WIDTH, n_out);
                }
            }
            self.linear(&name("attn_out"), WIDTH, WIDTH);
            self.linear(&name("ffn_up"), WIDTH, N_FF);
            if parts.gated {
                self.linear(&name("ffn_gate"), WIDTH, N_FF);
            }
            self.linear(&name("ffn_down"), N_FF, WIDTH);
            for norm in ["ln1", "ln2"] {
                if parts.norm_bias {
                    self.norm(&name(norm), WIDTH);
                } else {
                    self.scale(&name(norm), WIDTH);
                }
            }
        }
    }
}

fn nemotron_v2_vl() -> Vec<u8> {
    let mut file = Builder::new("nemotron_v2_vl", &[("image_size", 6 * PATCH), ("projector.scale_factor", 2)], N_EMBD);
    file.tower(BlockParts { fused: true, ..PLAIN });
    file.add("v.class_embd", &[WIDTH, 3], Values::WIDE);
    file.add("v.position_embd.weight", &[WIDTH, 36], Values::WIDE);
    file.scale("mm.model.mlp.0", 4 * WIDTH);
    file.matrix("mm.model.mlp.1", 4 * WIDTH, N_FF);
    file.matrix("mm.model.mlp.3", N_FF, N_EMBD);
    file.finish()
}

fn cogvlm(class_last: bool) -> Vec<u8> {
    let mut file = Builder::new("cogvlm", &[("image_size", 4 * PATCH)], N_EMBD);
    file.tower(BlockParts { fused: true, ..PLAIN });
    file.add("v.class_embd", &[WIDTH], Values::WIDE);
    file.add("v.position_embd.weight", &[WIDTH, 17], Values::WIDE);
    file.matrix("mm.model.fc", WIDTH, N_EMBD);
    file.norm("mm.post_fc_norm", N_EMBD);
    file.matrix("mm.up", N_EMBD, N_FF);
    file.matrix("mm.gate", N_EMBD, N_FF);
    file.matrix("mm.down", N_FF, N_EMBD);
    file.row("v.boi");
    file.row("v.eoi");
    file.class_last = class_last;
    file.finish()
}

/// Tables of positions for grids of `sam` x `sam` and `clip` x `clip` patches.
fn deepseekocr(sam: usize, clip: usize) -> Vec<u8> {
    let mut file = with_sam("deepseekocr", sam);
    file.tower(BlockParts { fused: true, ..PLAIN });
    file.add("v.class_embd", &[WIDTH], Values::WIDE);
    file.add("v.position_embd.weight", &[WIDTH, clip * clip + 1], Values::WIDE);
    file.norm("v.pre_ln", WIDTH);
    file.linear("mm.model.fc", 2 * WIDTH, N_EMBD);
    file.row("v.image_newline");
    file.row("v.view_seperator");
    file.finish()
}

/// A table of positions for a grid of `sam` x `sam` patches.
fn deepseekocr2(sam: usize) -> Vec<u8> {
    let mut file = with_sam("deepseekocr2", sam);
    file.metadata.set("clip.vision.attention.head_count_kv", 1_u32);
    file.tower(BlockParts { gated: true, norm_bias: false, kv_width: WIDTH / 2, ..PLAIN });
    file.scale("v.post_ln", WIDTH);
    file.add("v.resample_query_768.weight", &[WIDTH, 144], Values::WIDE);
    file.add("v.resample_query_1024.weight", &[WIDTH, 256], Values::WIDE);
    file.linear("mm.model.fc", WIDTH, N_EMBD);
    file.row("v.view_seperator");
    file.finish()
}

/// A file with SAM's tower.
fn with_sam(projector: &str, sam: usize) -> Builder {
    const NECK: usize = 12;
    let keys = [
        ("image_size", 1024),
        ("sam.block_count", 3),
        ("sam.head_count", 2),
        ("sam.embedding_length", WIDTH),
        ("window_size", 14),
    ];
    let mut file = Builder::new(projector, &keys, N_EMBD);
    file.convolution("v.sam.patch_embd", 16, 3, WIDTH);
    file.add("v.sam.pos_embd.weight", &[WIDTH, sam, sam], Values::WIDE);
    // The last block is one in which all patches attend to each other.
    for (block, side) in [14, 14, 64].into_iter().enumerate() {
        let name = |part: &str| format!("v.sam.blk.{block}.{part}");
        file.norm(&name("pre_ln"), WIDTH);
        file.linear(&name("attn.qkv"), WIDTH, 3 * WIDTH);
        file.add(name("attn.pos_h.weight"), &[WIDTH / 2, 2 * side - 1], Values::WIDE);
        file.add(name("attn.pos_w.weight"), &[WIDTH / 2, 2 * side - 1], Values::WIDE);
        file.linear(&name("attn.out"), WIDTH, WIDTH);
        file.norm(&name("post_ln"), WIDTH);
        file.linear(&name("mlp.lin1"), WIDTH, N_FF);
        file.linear(&name("mlp.lin2"), N_FF, WIDTH);
    }
    for (name, side, n_in, n_out) in
        [("neck.0", 1, WIDTH, NECK), ("neck.2", 3, NECK, NECK), ("net_2", 3, NECK, NECK), ("net_3", 3, NECK, WIDTH)]
    {
        file.kernel(&format!("v.sam.{name}"), side, n_in, n_out);
    }
    file.norm("v.sam.neck.1", NECK);
    file.norm("v.sam.neck.3", NECK);
    file
}

fn hunyuanvl() -> Vec<u8> {
    let keys = [
        ("image_size", 6 * PATCH),
        ("spatial_merge_size", 2),
        ("image_min_pixels", 4 * 64),
        ("image_max_pixels", 20 * 64),
    ];
    let mut file = Builder::new("hunyuanvl", &keys, N_EMBD);
    file.tower(PLAIN);
    file.add("v.position_embd.weight", &[WIDTH, 36], Values::WIDE);
    file.scale("mm.pre_norm", WIDTH);
    file.convolution("mm.0", 2, WIDTH, N_FF);
    file.convolution("mm.2", 1, N_FF, 2 * WIDTH);
    file.add("v.image_newline", &[2 * WIDTH], Values::WIDE);
    file.linear("mm.model.fc", 2 * WIDTH, N_EMBD);
    file.row("mm.image_begin");
    file.row("mm.image_end");
    file.scale("mm.post_norm", N_EMBD);
    file.finish()
}

fn exaone45() -> Vec<u8> {
    let keys = [
        ("image_size", 6 * PATCH),
        ("spatial_merge_size", 2),
        ("n_wa_pattern", 2),
        ("attention.head_count_kv", 1),
        ("image_min_pixels", 4 * 64),
        ("image_max_pixels", 200 * 64),
    ];
    let mut file = Builder::new("exaone4_5", &keys, N_EMBD);
    file.use_silu();
    let parts = BlockParts { fused: true, gated: true, norm_bias: false, n_kernels: 2, kv_width: WIDTH / 2 };
    file.tower(parts);
    file.scale("v.post_ln", WIDTH);
    file.linear("mm.0", 4 * WIDTH, N_FF);
    file.linear("mm.2", N_FF, N_EMBD);
    file.finish()
}

fn glm5v() -> Vec<u8> {
    let keys = [
        ("image_size", 6 * PATCH),
        ("spatial_merge_size", 2),
        ("image_min_pixels", 6 * 64),
        ("image_max_pixels", 20 * 64),
    ];
    let mut file = Builder::new("glm5v", &keys, N_EMBD);
    file.use_silu();
    file.metadata.set("clip.vision.swiglu_clamp", 0.75_f32);
    file.tower(BlockParts { fused: true, gated: true, norm_bias: false, n_kernels: 2, ..PLAIN });
    file.add("v.patch_embd.bias", &[WIDTH], Values::WIDE);
    file.scale("v.post_ln", WIDTH);
    file.convolution("mm.patch_merger", 2, WIDTH, N_EMBD);
    file.matrix("mm.model.fc", N_EMBD, N_EMBD);
    file.norm("mm.post_norm", N_EMBD);
    file.matrix("mm.up", N_EMBD, N_FF);
    file.matrix("mm.gate", N_EMBD, N_FF);
    file.matrix("mm.down", N_FF, N_EMBD);
    file.finish()
}

fn ling3vl() -> Vec<u8> {
    let mut file = Builder::new("ling3vl", &[("image_size", 4 * PATCH), ("spatial_merge_size", 2)], N_EMBD);
    file.tower(BlockParts { fused: true, n_kernels: 2, ..PLAIN });
    file.add("v.patch_embd.bias", &[WIDTH], Values::WIDE);
    file.add("v.position_embd.weight", &[WIDTH, 16], Values::WIDE);
    file.norm("mm.input_norm", WIDTH);
    file.linear("mm.0", 4 * WIDTH, N_FF);
    file.linear("mm.2", N_FF, N_EMBD);
    file.finish()
}

fn muse_glimmer() -> Vec<u8> {
    let mut file = Builder::new("muse-glimmer", &[("image_size", 8 * PATCH), ("spatial_merge_size", 2)], N_EMBD);
    file.tower(PLAIN);
    file.add("v.position_embd.weight", &[WIDTH, 16], Values::WIDE);
    file.norm("v.pre_ln", WIDTH);
    file.norm("v.post_ln", WIDTH);
    file.matrix("mm.0", 4 * WIDTH, N_FF);
    file.matrix("mm.1", N_FF, N_FF);
    file.matrix("mm.2", N_FF, N_EMBD);
    file.finish()
}

fn youtuvl() -> Vec<u8> {
    let keys = [("image_size", 6 * PATCH), ("spatial_merge_size", 2), ("window_size", 4 * PATCH)];
    let mut file = Builder::new("youtuvl", &keys, N_EMBD);
    file.metadata.set("clip.vision.wa_layer_indexes", vec![1_i32]);
    file.tower(PLAIN);
    file.norm("v.post_ln", WIDTH);
    file.scale("mm.input_norm", WIDTH);
    file.linear("mm.0", 4 * WIDTH, N_FF);
    file.linear("mm.2", N_FF, N_EMBD);
    file.flatten("v.patch_embd.weight");
    file.finish()
}

fn adapter() -> Vec<u8> {
    let mut file = Builder::new("adapter", &[("image_size", 6 * PATCH)], N_EMBD);
    file.tower(PLAIN);
    file.add("v.position_embd.weight", &[WIDTH, 36], Values::WIDE);
    file.norm("v.post_ln", WIDTH);
    file.convolution("adapter.conv", 2, WIDTH, N_EMBD);
    file.matrix("adapter.linear.linear", N_EMBD, N_EMBD);
    file.norm("adapter.linear.norm1", N_EMBD);
    file.matrix("adapter.linear.dense_h_to_4h", N_EMBD, N_FF);
    file.matrix("adapter.linear.gate", N_EMBD, N_FF);
    file.matrix("adapter.linear.dense_4h_to_h", N_FF, N_EMBD);
    file.row("adapter.boi");
    file.row("adapter.eoi");
    file.finish()
}

/// Without a class token: llama.cpp leaves out the first patch instead of it, so that the grid is another one.
fn ldpv2() -> Vec<u8> {
    // llama.cpp takes no other grid than 24 x 24.
    let mut file = Builder::new("ldpv2", &[("image_size", 24 * PATCH)], N_EMBD);
    file.tower(PLAIN);
    file.add("v.position_embd.weight", &[WIDTH, 24 * 24], Values::WIDE);
    file.norm("v.pre_ln", WIDTH);
    file.linear("mm.model.mlp.0", WIDTH, N_EMBD);
    file.linear("mm.model.mlp.2", N_EMBD, N_EMBD);
    // llama.cpp has this convolution with kernels in 16-bit floats alone.
    file.add("mm.model.peg.0.weight", &[3, 3, 1, N_EMBD], Values::WIDE);
    file.tensors.last_mut().unwrap().0.ty = TensorType::F16;
    file.row("mm.model.peg.0.bias");
    file.finish()
}
