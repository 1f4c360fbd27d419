//! What recipes of tensor types depend on in an architecture, as data; the recipes themselves ([`crate::Recipe`]) use no
//! names. The rules are those of llama.cpp's quantiser.

/// The properties of an architecture that rules of recipes depend on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct QuantizationTraits {
    /// The sizes of its models that count as 70B, whose values get more bits. `None`: no model does.
    pub(crate) of_70b: Option<Of70b>,
    /// Whether it has the exceptions of Falcon: fewer bits for most down and output matrices, and the head in `Q8_0`.
    pub(crate) falcon_exceptions: bool,
    /// Whether every matrix with three dimensions is one of experts. If not, only those of gate, up and down are.
    pub(crate) stacked_are_experts: bool,
    /// Parts of the names of matrices that get at least 8 bits.
    pub(crate) at_least_8_bits: &'static [&'static str],
    /// Parts of the names of matrices that are not quantised, in addition to those of all architectures.
    pub(crate) not_quantized: &'static [&'static str],
}

/// The models of an architecture that count as 70B.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Of70b {
    /// Their number of layers.
    pub(crate) n_layer: usize,
    /// Whether only those are meant whose query heads share KV heads and that do not have 8 experts.
    pub(crate) grouped_and_dense: bool,
}

/// An architecture without exceptions.
const PLAIN: QuantizationTraits = QuantizationTraits {
    of_70b: None,
    falcon_exceptions: false,
    stacked_are_experts: true,
    at_least_8_bits: &[],
    not_quantized: &[],
};

/// The traits of the architectures that have exceptions.
#[rustfmt::skip]
const TRAITS: &[(&[&str], QuantizationTraits)] = &[
    (&["llama"], QuantizationTraits { of_70b: Some(Of70b { n_layer: 80, grouped_and_dense: true }), ..PLAIN }),
    (&["deci", "olmo", "qwen2"], QuantizationTraits { of_70b: Some(Of70b { n_layer: 80, grouped_and_dense: false }), ..PLAIN }),
    (&["jais2"], QuantizationTraits { of_70b: Some(Of70b { n_layer: 68, grouped_and_dense: false }), ..PLAIN }),
    (&["falcon"], QuantizationTraits { falcon_exceptions: true, ..PLAIN }),
    (&["bailingmoe3"], QuantizationTraits { stacked_are_experts: false, ..PLAIN }),
    (&["glm5-next"], QuantizationTraits {
        at_least_8_bits: &["attn_q_a", "attn_q_b", "nextn.eh_proj"],
        not_quantized: &[
            "hc_", "indexer.attn_q_b", "indexer.attn_k", "indexer.proj", "indexer_compressor_gate",
            "indexer_compressor_ape", "ssm_f_a.weight", "ssm_f_b.weight", "ssm_g_a.weight", "ssm_g_b.weight",
            "ssm_beta.weight", "attn_kv_a_mqa.weight", "attn_k_b.weight", "attn_v_b.weight",
        ],
        ..PLAIN
    }),
];

/// The traits of an architecture, which need not be one that can be run.
pub(crate) fn quantization_traits(architecture: &str) -> QuantizationTraits {
    TRAITS.iter().find(|(names, _)| names.contains(&architecture)).map_or(PLAIN, |(_, traits)| *traits)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn architectures_have_one_entry_at_most() {
        let names: Vec<_> = TRAITS.iter().flat_map(|(names, _)| *names).collect();
        assert!(names.iter().enumerate().all(|(i, name)| !names[..i].contains(name)), "{names:?}");
        assert_eq!(quantization_traits("gpt-17"), PLAIN);
        assert!(quantization_traits("falcon").falcon_exceptions);
    }
}
