//! The translation of every kernel to the shader language of every wgpu backend.

use std::collections::{HashMap, HashSet};
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

/// Translates the kernel for each feature set to each language. Equal sources are parsed once, and translated once to each
/// language.
fn translates_to_every_language(key: &PipelineKey) {
    let mut parsed = HashMap::new();
    let mut translated = HashSet::new();
    for features in feature_sets() {
        for language in ShaderLanguage::ALL {
            let source = wgsl(key.file, &key.constants, language.features(features));
            // HLSL has a version with F16 arithmetic.
            if !translated.insert((language, features.f16, source.clone())) {
                continue;
            }
            let fails = |why| -> ! { panic!("{}: {features:?}, {language:?}: {why}", key.name) };
            let module =
                parsed.entry(source.clone()).or_insert_with(|| parse(&source).unwrap_or_else(|why| fails(why)));
            let code = translate(module, source, features, language).unwrap_or_else(|why| fails(why));
            if language == ShaderLanguage::SpirV {
                // SPIR-V's magic number and version 1.6.
                assert_eq!(code[..8], [3, 2, 0x23, 7, 0, 6, 1, 0], "{}", key.name);
                continue;
            }
            let code = String::from_utf8(code).expect("text");
            let is_kernel = match language {
                ShaderLanguage::Wgsl | ShaderLanguage::SpirV => code.contains("@compute"),
                ShaderLanguage::Msl => {
                    code.contains("kernel void main_(") && code.contains("[[buffer(0)]]") && !code.contains("fake")
                }
                ShaderLanguage::Hlsl => code.contains("[numthreads(") && code.contains("register("),
            };
            assert!(is_kernel, "{}, {language:?}: {code}", key.name);
        }
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
