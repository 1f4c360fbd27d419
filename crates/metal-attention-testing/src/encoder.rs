//! A synthetic BERT encoder with random weights, with or without a reranker's classifier, as the bytes of a GGUF file.

use metal_attention_gguf::{GgufFile, GgufWriter, TensorDecl, TensorType};

/// Width of its hidden states.
pub const N_EMBD: usize = 32;
/// Positions of its position embedding, the longest input.
pub const N_CTX: usize = 64;

/// Builds the GGUF file. `is_reranker` adds the classifier, `cls` and `cls.output`, and sets the pooling type to rank.
pub fn encoder(is_reranker: bool) -> Vec<u8> {
    const N_FF: usize = 48;
    let vocabulary = GgufFile::from_bytes(&crate::vocabulary::bytes("bert-bge-cut.gguf")).unwrap();
    let mut metadata = vocabulary.metadata().clone();
    let n_vocab = metadata.strings("tokenizer.ggml.tokens").unwrap().unwrap().len();
    let sizes = [("block_count", 1), ("context_length", N_CTX), ("embedding_length", N_EMBD)];
    let more =
        [("feed_forward_length", N_FF), ("attention.head_count", 2), ("pooling_type", if is_reranker { 4 } else { 2 })];
    for (key, value) in sizes.into_iter().chain(more) {
        metadata.set(format!("bert.{key}"), value as u32);
    }
    let n_types = metadata.usize("tokenizer.ggml.token_type_count").unwrap().unwrap_or(2);
    let mut shapes: Vec<(String, Vec<usize>)> = vec![
        ("token_embd.weight".into(), vec![N_EMBD, n_vocab]),
        ("token_types.weight".into(), vec![N_EMBD, n_types]),
        ("position_embd.weight".into(), vec![N_EMBD, N_CTX]),
    ];
    let norm = |name: &str, shapes: &mut Vec<(String, Vec<usize>)>| {
        shapes.extend(["weight", "bias"].map(|part| (format!("{name}.{part}"), vec![N_EMBD])));
    };
    norm("token_embd_norm", &mut shapes);
    norm("blk.0.attn_output_norm", &mut shapes);
    norm("blk.0.layer_output_norm", &mut shapes);
    let square = ["attn_q", "attn_k", "attn_v", "attn_output"].map(|name| (format!("blk.0.{name}"), N_EMBD, N_EMBD));
    let mut matrices = square.to_vec();
    matrices.extend([("blk.0.ffn_up".into(), N_EMBD, N_FF), ("blk.0.ffn_down".into(), N_FF, N_EMBD)]);
    if is_reranker {
        matrices.extend([("cls".into(), N_EMBD, N_EMBD), ("cls.output".into(), N_EMBD, 1)]);
    }
    for (name, n_in, n_out) in matrices {
        shapes.push((format!("{name}.weight"), vec![n_in, n_out]));
        shapes.push((format!("{name}.bias"), vec![n_out]));
    }
    let declared = shapes.into_iter().map(|(name, shape)| TensorDecl { name, shape, ty: TensorType::F32 });
    let tensors: Vec<TensorDecl> = declared.collect();
    let mut writer = GgufWriter::new(Vec::new(), 3, &metadata, &tensors).unwrap();
    let mut state = 1_u64;
    for tensor in &tensors {
        let n: usize = tensor.shape.iter().product();
        let mean = if tensor.name.ends_with("norm.weight") { 1.0 } else { 0.0 };
        let bytes = (0..n).flat_map(|_| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let x = (state >> 40) as f32 / (1_u64 << 24) as f32 - 0.5;
            (mean + 0.5 * x).to_le_bytes()
        });
        writer.write(&bytes.collect::<Vec<u8>>()).unwrap();
    }
    writer.finish().unwrap()
}
