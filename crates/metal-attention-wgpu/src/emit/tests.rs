//! The translation of every kernel to the shader language of every wgpu backend.

use std::collections::HashSet;
use std::thread;

use super::*;
use crate::catalogue;

/// Device features, from none to all.
fn feature_sets() -> [ShaderFeatures; 6] {
    let subgroups = ShaderFeatures { subgroups: true, ..Default::default() };
    // Subgroups of 32 lanes or of 64.
    let neighbours = ShaderFeatures { neighbours: 32, ..subgroups };
    let f16 = ShaderFeatures { subgroup_size: 32, f16: true, ..neighbours };
    [
        ShaderFeatures::default(),
        subgroups,
        neighbours,
        f16,
        ShaderFeatures { cooperative_f16: true, ..f16 },
        ShaderFeatures { cooperative_f32: true, ..f16 },
    ]
}

fn translates_to_every_language(key: &PipelineKey) {
    let mut translated = HashSet::new();
    for features in feature_sets() {
        let code = |language| emit(key, features, language).unwrap_or_else(|e| panic!("{features:?}: {e}"));
        let source = |language| String::from_utf8(code(language)).expect("text");
        let wgsl = source(ShaderLanguage::Wgsl);
        assert!(wgsl.contains("@compute"), "{}: {wgsl}", key.name);
        if !translated.insert(wgsl) {
            continue;
        }
        let metal = source(ShaderLanguage::Msl);
        assert!(metal.contains("kernel void main_(") && metal.contains("[[buffer(0)]]"), "{}: {metal}", key.name);
        assert!(!metal.contains("fake"), "{}: {metal}", key.name);
        let directx = source(ShaderLanguage::Hlsl);
        assert!(directx.contains("[numthreads(") && directx.contains("register("), "{}: {directx}", key.name);
        // SPIR-V's magic number and version 1.6.
        assert_eq!(code(ShaderLanguage::SpirV)[..8], [3, 2, 0x23, 7, 0, 6, 1, 0], "{}", key.name);
    }
}

#[test]
fn every_kernel_translates_to_every_language() {
    let catalogue = catalogue();
    let n_threads = thread::available_parallelism().map_or(1, usize::from);
    thread::scope(|scope| {
        for keys in catalogue.chunks(catalogue.len().div_ceil(n_threads)) {
            scope.spawn(|| keys.iter().for_each(translates_to_every_language));
        }
    });
}

#[test]
fn names_are_unique_and_complete() {
    let mut names: Vec<_> = catalogue().into_iter().map(|key| key.name).collect();
    names.sort();
    let n = names.len();
    names.dedup();
    assert_eq!(names.len(), n, "two kernels have the same name: {names:?}");
    for name in
        "embedding_q4_0 rmsnorm matvec_q4_0 matvec_q8_0 matvec_f16 matvec_f32 matvec_q6_k matvec_q4_0_accumulate \
                 multi_token_matvec_q4_0 multi_token_matvec_q4_0_accumulate rope_apply rope_apply_dual kv_cache_copy \
                 buffer_copy decode_attention prefill_attention ffn_silu silu_matvec_q4_0_accumulate \
                 rmsnorm_matvec_q4_0 rmsnorm_matvec_f32 residual_add argmax argmax_advance top_k"
            .split_whitespace()
    {
        assert!(names.iter().any(|n| n == name), "{name} is missing");
    }
}
