//! Sizes of the picture encoders of well-known models, and the metadata and tensors of `mmproj` files of these sizes as llama.cpp's
//! converter writes them, for files without trained weights.

use metal_attention_gguf::{Metadata, TensorDecl, TensorType};

/// `general.file_type` of files whose matrices are F16.
const MOSTLY_F16: u32 = 1;

/// A picture encoder, with what its text model needs beside the sizes of [`ModelShape`](crate::ModelShape).
#[derive(Debug, Clone, PartialEq)]
pub struct PictureShape {
    /// The name of the text model's shape.
    pub text: &'static str,
    /// The family.
    pub family: PictureFamily,
    /// Width of the encoder's rows.
    pub width: usize,
    /// Blocks.
    pub n_block: usize,
    /// Heads.
    pub n_head: usize,
    /// Width of the feed-forwards.
    pub n_ff: usize,
    /// Pixels of a patch's side.
    pub patch: usize,
    /// Pixels of the side of a picture, or of a tile.
    pub image: usize,
}

/// A family of picture encoders.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PictureFamily {
    /// Idefics 3 and `SmolVLM`.
    Idefics3 {
        /// Patches of the side of a merge.
        merge: usize,
        /// Pixels of the longest side of a picture in tiles.
        longest: usize,
    },
    /// Qwen3-VL.
    Qwen3Vl {
        /// Patches of the side of a merge.
        merge: usize,
        /// Blocks whose rows the first layers of the text model add.
        deepstack: &'static [usize],
    },
    /// Gemma 3.
    Gemma3,
    /// Gemma 4.
    Gemma4 {
        /// Rows of each of the two tables of positions.
        n_position: usize,
    },
}

/// Every picture encoder, as in the models' published configurations.
static SHAPES: &[PictureShape] = &[
    PictureShape {
        text: "smolvlm-500m",
        family: PictureFamily::Idefics3 { merge: 4, longest: 2048 },
        width: 768,
        n_block: 12,
        n_head: 12,
        n_ff: 3072,
        patch: 16,
        image: 512,
    },
    PictureShape {
        text: "qwen3-vl-4b",
        family: PictureFamily::Qwen3Vl { merge: 2, deepstack: &[5, 11, 17] },
        width: 1024,
        n_block: 24,
        n_head: 16,
        n_ff: 4096,
        patch: 16,
        image: 768,
    },
    PictureShape {
        text: "gemma-3-4b",
        family: PictureFamily::Gemma3,
        width: 1152,
        n_block: 27,
        n_head: 16,
        n_ff: 4304,
        patch: 14,
        image: 896,
    },
    PictureShape {
        text: "gemma-4-e4b",
        family: PictureFamily::Gemma4 { n_position: 10_240 },
        width: 768,
        n_block: 16,
        n_head: 12,
        n_ff: 3072,
        patch: 16,
        // Pictures keep their size; the converter writes this.
        image: 224,
    },
];

const CHAT_ML: &str = "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n\
    {% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}";
const SMOL_VLM: &str = "<|im_start|>{% for message in messages %}{{ message['role'] | capitalize }}: {{ message['content'] }}\
    <end_of_utterance>\n{% endfor %}{% if add_generation_prompt %}Assistant:{% endif %}";
const GEMMA_3: &str = "{{ bos_token }}{% for message in messages %}<start_of_turn>\
    {{ 'model' if message['role'] == 'assistant' else message['role'] }}\n{{ message['content'] }}<end_of_turn>\n{% endfor %}\
    {% if add_generation_prompt %}<start_of_turn>model\n{% endif %}";
const GEMMA_4: &str = "{{ bos_token }}{% for message in messages %}<|turn>\
    {{ 'model' if message['role'] == 'assistant' else message['role'] }}\n{{ message['content'] }}<turn|>\n{% endfor %}\
    {% if add_generation_prompt %}<|turn>model\n{% endif %}";

impl PictureShape {
    /// Every picture encoder.
    pub fn all() -> &'static [Self] {
        SHAPES
    }

    /// The encoder of the text model's shape of this name; `None` if none is known.
    pub fn of(text: &str) -> Option<&'static Self> {
        SHAPES.iter().find(|shape| shape.text == text)
    }

    /// The special tokens of the family's text models: those around pictures and around messages.
    pub fn special_tokens(&self) -> Vec<String> {
        let tokens = |list: &[&str]| list.iter().map(|&token| token.to_owned()).collect::<Vec<_>>();
        match self.family {
            PictureFamily::Idefics3 { .. } => {
                let places = (1..=6).flat_map(|row| (1..=6).map(move |column| format!("<row_{row}_col_{column}>")));
                let others =
                    ["<|im_start|>", "<end_of_utterance>", "<fake_token_around_image>", "<image>", "<global-img>"];
                tokens(&others).into_iter().chain(places).collect()
            }
            PictureFamily::Qwen3Vl { .. } => tokens(&[
                "<|im_start|>",
                "<|im_end|>",
                "<|vision_start|>",
                "<|vision_end|>",
                "<|image_pad|>",
                "<|video_pad|>",
            ]),
            PictureFamily::Gemma3 => tokens(&[
                "<start_of_turn>",
                "<end_of_turn>",
                "<start_of_image>",
                "<end_of_image>",
                "<image_soft_token>",
            ]),
            PictureFamily::Gemma4 { .. } => tokens(&["<|turn>", "<turn|>", "<|image>", "<image|>", "<|image|>"]),
        }
    }

    /// Ordinary tokens that stand between tiles.
    pub fn other_tokens(&self) -> &'static [&'static str] {
        match self.family {
            PictureFamily::Idefics3 { .. } => &["\n\n"],
            PictureFamily::Qwen3Vl { .. } | PictureFamily::Gemma3 | PictureFamily::Gemma4 { .. } => &[],
        }
    }

    /// A chat template in the form of the family.
    pub fn chat_template(&self) -> &'static str {
        match self.family {
            PictureFamily::Idefics3 { .. } => SMOL_VLM,
            PictureFamily::Qwen3Vl { .. } => CHAT_ML,
            PictureFamily::Gemma3 => GEMMA_3,
            PictureFamily::Gemma4 { .. } => GEMMA_4,
        }
    }

    /// The metadata of the `mmproj` file for a text model of width `n_embd`.
    pub fn metadata(&self, n_embd: usize) -> Metadata {
        let number = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
        let (is_gemma4, mut m) = (matches!(self.family, PictureFamily::Gemma4 { .. }), Metadata::new());
        m.set("general.architecture", "clip");
        m.set("general.type", "mmproj");
        m.set("general.name", self.text);
        m.set("general.file_type", MOSTLY_F16);
        m.set("clip.has_vision_encoder", true);
        for (key, value) in [
            ("projection_dim", n_embd),
            ("image_size", self.image),
            ("patch_size", self.patch),
            ("embedding_length", self.width),
            ("feed_forward_length", self.n_ff),
            ("block_count", self.n_block),
            ("attention.head_count", self.n_head),
        ] {
            m.set(format!("clip.vision.{key}"), number(value));
        }
        m.set("clip.vision.image_mean", vec![if is_gemma4 { 0.0_f32 } else { 0.5 }; 3]);
        m.set("clip.vision.image_std", vec![if is_gemma4 { 1.0_f32 } else { 0.5 }; 3]);
        m.set("clip.vision.attention.layer_norm_epsilon", 1e-6_f32);
        if !is_gemma4 {
            m.set("clip.use_gelu", true);
        }
        match self.family {
            PictureFamily::Idefics3 { merge, longest } => {
                m.set("clip.projector_type", "idefics3");
                m.set("clip.vision.projector.scale_factor", number(merge));
                m.set("clip.vision.preproc_image_size", number(longest));
            }
            PictureFamily::Qwen3Vl { merge, deepstack } => {
                m.set("clip.projector_type", "qwen3vl_merger");
                m.set("clip.vision.spatial_merge_size", number(merge));
                let is_deepstack: Vec<bool> = (0..self.n_block).map(|block| deepstack.contains(&block)).collect();
                m.set("clip.vision.is_deepstack_layers", is_deepstack);
            }
            PictureFamily::Gemma3 => m.set("clip.projector_type", "gemma3"),
            PictureFamily::Gemma4 { .. } => m.set("clip.vision.projector_type", "gemma4v"),
        }
        m
    }

    /// The tensors of that file: matrices in F16, vectors, positions and the kernels of `SigLIP` in F32.
    pub fn tensors(&self, n_embd: usize) -> Vec<TensorDecl> {
        let mut list = TensorList(Vec::new());
        let (width, patch) = (self.width, self.patch);
        let n_patch = (self.image / patch).pow(2);
        list.add("v.patch_embd.weight", &[patch, patch, 3, width]);
        match self.family {
            PictureFamily::Idefics3 { .. } | PictureFamily::Gemma3 => {
                list.in_f32();
                list.add("v.patch_embd.bias", &[width]);
                list.add("v.position_embd.weight", &[width, n_patch]);
            }
            PictureFamily::Qwen3Vl { .. } => {
                list.add("v.patch_embd.weight.1", &[patch, patch, 3, width]);
                list.add("v.patch_embd.bias", &[width]);
                list.add("v.position_embd.weight", &[width, n_patch]);
            }
            PictureFamily::Gemma4 { n_position } => list.add("v.position_embd.weight", &[width, n_position, 2]),
        }
        list.in_f32();
        for block in 0..self.n_block {
            self.add_block(&mut list, &format!("v.blk.{block}"));
        }
        match self.family {
            PictureFamily::Idefics3 { merge, .. } => {
                list.add_with_bias("v.post_ln", &[width]);
                list.add("mm.model.fc.weight", &[merge * merge * width, n_embd]);
            }
            PictureFamily::Qwen3Vl { merge, deepstack } => {
                let merged = merge * merge * width;
                list.add_with_bias("v.post_ln", &[width]);
                list.add_with_bias("mm.0", &[merged, merged]);
                list.add_with_bias("mm.2", &[merged, n_embd]);
                for block in deepstack.iter().filter(|block| **block < self.n_block) {
                    list.add_with_bias(&format!("v.deepstack.{block}.norm"), &[merged]);
                    list.add_with_bias(&format!("v.deepstack.{block}.fc1"), &[merged, merged]);
                    list.add_with_bias(&format!("v.deepstack.{block}.fc2"), &[merged, n_embd]);
                }
            }
            PictureFamily::Gemma3 => {
                list.add_with_bias("v.post_ln", &[width]);
                list.add("mm.soft_emb_norm.weight", &[width]);
                list.add("mm.input_projection.weight", &[n_embd, width]);
            }
            PictureFamily::Gemma4 { .. } => list.add("mm.input_projection.weight", &[width, n_embd]),
        }
        list.0
    }

    /// Adds the tensors of a block whose names begin with `block`.
    fn add_block(&self, list: &mut TensorList, block: &str) {
        let (width, n_ff) = (self.width, self.n_ff);
        let name = |part: &str| format!("{block}.{part}");
        let square = ["attn_q", "attn_k", "attn_v", "attn_out"].map(|part| (part, [width, width]));
        let (up, down) = (("ffn_up", [width, n_ff]), ("ffn_down", [n_ff, width]));
        match self.family {
            PictureFamily::Idefics3 { .. } | PictureFamily::Gemma3 => {
                for (part, shape) in square.into_iter().chain([up, down]) {
                    list.add_with_bias(&name(part), &shape);
                }
            }
            PictureFamily::Qwen3Vl { .. } => {
                let [.., out] = square;
                for (part, shape) in [("attn_qkv", [width, 3 * width]), out, up, down] {
                    list.add_with_bias(&name(part), &shape);
                }
            }
            PictureFamily::Gemma4 { .. } => {
                for (part, shape) in square.into_iter().chain([up, ("ffn_gate", [width, n_ff]), down]) {
                    list.add(&format!("{block}.{part}.weight"), &shape);
                    for limit in ["input_min", "input_max", "output_min", "output_max"] {
                        list.add(&format!("{block}.{part}.{limit}"), &[1]);
                    }
                }
                for part in ["attn_q_norm", "attn_k_norm"] {
                    list.add(&format!("{block}.{part}.weight"), &[width / self.n_head.max(1)]);
                }
                for part in ["ln1", "ln2", "attn_post_norm", "ffn_post_norm"] {
                    list.add(&format!("{block}.{part}.weight"), &[width]);
                }
                list.add(&name("out_scale.weight"), &[1]);
                return;
            }
        }
        for part in ["ln1", "ln2"] {
            list.add_with_bias(&name(part), &[width]);
        }
    }
}

/// A list of tensors that grows.
struct TensorList(Vec<TensorDecl>);

impl TensorList {
    /// Adds a tensor: a vector in F32, another in F16.
    fn add(&mut self, name: &str, shape: &[usize]) {
        let ty = if shape.len() == 1 { TensorType::F32 } else { TensorType::F16 };
        self.0.push(TensorDecl { name: name.to_owned(), shape: shape.to_vec(), ty });
    }

    /// Adds `name.weight`, and `name.bias` of the last dimension.
    fn add_with_bias(&mut self, name: &str, shape: &[usize]) {
        self.add(&format!("{name}.weight"), shape);
        self.add(&format!("{name}.bias"), &shape[shape.len() - 1..]);
    }

    /// Makes the last tensor one of F32.
    fn in_f32(&mut self) {
        if let Some(last) = self.0.last_mut() {
            last.ty = TensorType::F32;
        }
    }
}
