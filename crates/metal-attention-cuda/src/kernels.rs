//! The table of all kernels: in which compiled module of `prebuilt/` each one is, and of what type its argument is. An [`EntryPoint`]
//! names a kernel with the type of its argument; loaded, it is a [`Kernel`], which takes that argument and no other.

use std::collections::HashMap;
use std::marker::PhantomData;

use cudarc::driver::sys::CUfunction;
use metal_attention_model::CacheType;

use crate::args::{
    ActivationArgs, AllGatherArgs, AllReduceArgs, ArgmaxArgs, AttentionArgs, AttentionInputsArgs, BlockConvArgs,
    ConvolutionArgs, CountExchangesArgs, DecodeArgs, DecodeOnRanksArgs, DeltaRuleArgs, ElementsArgs, EmbeddingArgs,
    EncoderAttentionArgs, EncoderHeadsArgs, EncoderUnitsArgs, ExpertsActivationArgs, ExpertsSumArgs, FunctionArgs,
    FusedDeltaRuleArgs, FusedMamba2Args, FusedRouteArgs, GatherArgs, GeneralAttentionArgs, GroupNormArgs,
    GroupedMatmulArgs, GroupedMatvecArgs, InterleaveArgs, LatentAttentionArgs, LatentInputsArgs, LogitsArgs,
    Mamba2Args, MambaArgs, MatmulArgs, MatmulFewArgs, MatmulWideArgs, MatvecArgs, NormArgs, OddRowsArgs, PatchesArgs,
    PrefillArgs, RateArgs, RepackArgs, RotateArgs, RouteArgs, Rwkv6Args, Rwkv7Args, Rwkv7InputsArgs, SelectArgs,
    SideProductsArgs, SortArgs, StreamsArgs, StretchArgs, SumRowsArgs, TokenShiftArgs, TopKArgs, WeighArgs,
};
use crate::bounds::KernelArgs;
use crate::{CudaDevice, CudaError};

/// A kernel in a compiled module, whose argument is an `A`.
#[derive(Debug)]
pub(crate) struct EntryPoint<A> {
    /// The module: a file of `prebuilt/`, without its extension.
    pub(crate) module: &'static str,
    /// The kernel's name.
    pub(crate) name: &'static str,
    /// The type of the argument.
    args: PhantomData<fn(A)>,
}

impl<A> Clone for EntryPoint<A> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<A> Copy for EntryPoint<A> {}

impl<A> EntryPoint<A> {
    /// The kernel `name` of `module`. Only the table calls this.
    const fn new(module: &'static str, name: &'static str) -> Self {
        Self { module, name, args: PhantomData }
    }
}

/// A loaded kernel, whose argument is an `A`.
#[derive(Debug)]
pub(crate) struct Kernel<A> {
    /// The driver's handle.
    pub(crate) function: CUfunction,
    /// What it was loaded from.
    pub(crate) entry: EntryPoint<A>,
}

impl<A> Clone for Kernel<A> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<A> Copy for Kernel<A> {}

// SAFETY: a handle that the driver allows any thread to use.
unsafe impl<A> Send for Kernel<A> {}
// SAFETY: as above.
unsafe impl<A> Sync for Kernel<A> {}

/// The GPUs that a module is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Gpus {
    /// All of compute capability 8.0 and later.
    All,
    /// Those with warpgroup instructions: compute capability 9.0.
    WithWgmma,
    /// Those without.
    WithoutWgmma,
}

impl Gpus {
    /// Whether a GPU is one of them.
    pub(crate) fn include(self, has_wgmma: bool) -> bool {
        match self {
            Self::All => true,
            Self::WithWgmma => has_wgmma,
            Self::WithoutWgmma => !has_wgmma,
        }
    }
}

/// A compiled module.
#[derive(Debug)]
pub(crate) struct Module {
    /// Its name.
    pub(crate) name: &'static str,
    /// The GPUs that it is for.
    pub(crate) gpus: Gpus,
    /// Machine code and PTX.
    pub(crate) image: &'static [u8],
}

/// A line of the table.
#[cfg(test)]
pub(crate) struct TableEntry {
    /// The module.
    pub(crate) module: &'static str,
    /// The GPUs that it is for.
    pub(crate) gpus: Gpus,
    /// The kernel.
    pub(crate) name: &'static str,
    /// The C++ name of its argument's type.
    pub(crate) args: &'static str,
    /// Bytes of the argument.
    pub(crate) args_bytes: usize,
}

/// Declares the entry points and the modules. `kernel`: one; `family`: an array of kernels with the same type of argument.
macro_rules! kernel_table {
    ($(
        $module:literal for $gpus:ident {
            $(kernel $single:ident: $single_args:ident = $single_name:literal;)*
            $(family $family:ident: $family_args:ident = $($family_name:literal),+;)*
        }
    )*) => {
        $(
            $(pub(crate) const $single: EntryPoint<$single_args> = EntryPoint::new($module, $single_name);)*
            $(
                pub(crate) const $family: [EntryPoint<$family_args>; [$($family_name),+].len()] =
                    [$(EntryPoint::new($module, $family_name)),+];
            )*
        )*

        /// All modules.
        pub(crate) const MODULES: &[Module] = &[$(Module {
            name: $module,
            gpus: Gpus::$gpus,
            image: include_bytes!(concat!("../prebuilt/", $module, ".fatbin")),
        }),*];

        /// All lines of the table.
        #[cfg(test)]
        pub(crate) const TABLE: &[TableEntry] = &[$(
            $(TableEntry {
                module: $module,
                gpus: Gpus::$gpus,
                name: $single_name,
                args: <$single_args as crate::args::KernelStruct>::CPP_NAME,
                args_bytes: size_of::<$single_args>(),
            },)*
            $($(TableEntry {
                module: $module,
                gpus: Gpus::$gpus,
                name: $family_name,
                args: <$family_args as crate::args::KernelStruct>::CPP_NAME,
                args_bytes: size_of::<$family_args>(),
            },)+)*
        )*];
    };
}

// Families by weight layout are in the order of `WeightLayout`, those by the type of the cache in that of `of_cache`; the others are in
// ascending order of the numbers in their names.
kernel_table! {
    "repack" for All {
        kernel REPACK_F16: RepackArgs = "repack_f16";
        kernel REPACK_F32: RepackArgs = "repack_f32";
        kernel REPACK_BF16: RepackArgs = "repack_bf16";
        kernel REPACK_Q8_0: RepackArgs = "repack_q8_0";
        kernel REPACK_Q4_0: RepackArgs = "repack_q4_0";
        kernel REPACK_Q4_K: RepackArgs = "repack_q4_k";
        kernel REPACK_Q5_K: RepackArgs = "repack_q5_k";
        kernel REPACK_Q6_K: RepackArgs = "repack_q6_k";
    }
    "matvec" for All {
        family MATVEC: MatvecArgs = "matvec_1", "matvec_2", "matvec_3", "matvec_4";
    }
    "matmul_few" for All {
        family MATMUL_FEW: MatmulFewArgs = "matmul_few_1", "matmul_few_2", "matmul_few_4";
    }
    "attention" for All {
        family APPEND: AttentionArgs = "append_f16", "append_f32";
        family ATTENTION_F16: AttentionArgs = "attention_f16_1", "attention_f16_2", "attention_f16_4", "attention_f16_8";
        family ATTENTION_F32: AttentionArgs = "attention_f32_1", "attention_f32_2", "attention_f32_4", "attention_f32_8";
        family ATTENTION_APPENDED_F16: AttentionArgs = "attention_appended_f16_1", "attention_appended_f16_2",
            "attention_appended_f16_4", "attention_appended_f16_8";
        family ATTENTION_APPENDED_F32: AttentionArgs = "attention_appended_f32_1", "attention_appended_f32_2",
            "attention_appended_f32_4", "attention_appended_f32_8";
    }
    "attention_on_units" for All {
        family ATTENTION_ON_UNITS: AttentionArgs = "attention_on_units_64", "attention_on_units_128";
        family ATTENTION_APPENDED_ON_UNITS: AttentionArgs = "attention_appended_on_units_64",
            "attention_appended_on_units_128";
    }
    "prefill_attention" for All {
        kernel PREFILL_ATTENTION_32: PrefillArgs = "prefill_attention_32";
        kernel PREFILL_ATTENTION_64: PrefillArgs = "prefill_attention_64";
        kernel PREFILL_ATTENTION_96: PrefillArgs = "prefill_attention_96";
        kernel PREFILL_ATTENTION_128: PrefillArgs = "prefill_attention_128";
        kernel PREFILL_ATTENTION_256: PrefillArgs = "prefill_attention_256";
        kernel VERIFY_ATTENTION_32: PrefillArgs = "verify_attention_32";
        kernel VERIFY_ATTENTION_64: PrefillArgs = "verify_attention_64";
        kernel VERIFY_ATTENTION_96: PrefillArgs = "verify_attention_96";
        kernel VERIFY_ATTENTION_128: PrefillArgs = "verify_attention_128";
        kernel VERIFY_ATTENTION_256: PrefillArgs = "verify_attention_256";
    }
    "ends" for All {
        kernel EMBEDDING: EmbeddingArgs = "embedding";
        kernel SCALE_LOGITS: LogitsArgs = "scale_logits";
        kernel ARGMAX: ArgmaxArgs = "argmax";
    }
    "top_k" for All {
        kernel TOP_K: TopKArgs = "top_k";
    }
    "rates" for All {
        kernel RATE_READ: RateArgs = "rate_read";
        kernel RATE_COPY: RateArgs = "rate_copy";
        kernel RATE_FLOATS: RateArgs = "rate_floats";
        kernel RATE_MMA: RateArgs = "rate_mma";
        kernel RATE_LINK: RateArgs = "rate_link";
    }
    "norm" for All {
        kernel NORM_ROWS: NormArgs = "norm_rows";
        kernel NORM_MANY_ROWS: NormArgs = "norm_many_rows";
    }
    "activation" for All {
        kernel ACTIVATION: ActivationArgs = "activation";
    }
    "streams" for All {
        kernel STRETCH: StretchArgs = "stretch";
        kernel PREDICT_STREAMS: StreamsArgs = "predict_streams";
        kernel CORRECT_STREAMS: StreamsArgs = "correct_streams";
        kernel ADD_TO_IDLE_STREAMS: StreamsArgs = "add_to_idle_streams";
    }
    "block_conv" for All {
        kernel BLOCK_CONV: BlockConvArgs = "block_conv";
    }
    "attention_inputs" for All {
        family ATTENTION_INPUTS: AttentionInputsArgs = "attention_inputs_f16", "attention_inputs_f32";
    }
    "general_attention" for All {
        family GENERAL_ATTENTION: GeneralAttentionArgs = "general_attention_f16", "general_attention_f32";
    }
    "odd_rows" for All {
        kernel ODD_ROWS: OddRowsArgs = "odd_rows";
    }
    "experts" for All {
        kernel ROUTE: RouteArgs = "route";
        kernel ROUTE_ALONE: FusedRouteArgs = "route_alone";
        kernel WEIGH_INPUTS: WeighArgs = "weigh_inputs";
        kernel EXPERTS_ACTIVATION: ExpertsActivationArgs = "experts_activation";
        kernel EXPERTS_SUM: ExpertsSumArgs = "experts_sum";
    }
    "grouped_matvec" for All {
        kernel MATVEC_ROWS: MatvecArgs = "matvec_rows";
        kernel GROUPED_MATVEC: GroupedMatvecArgs = "grouped_matvec";
    }
    "grouped_matmul" for All {
        kernel SORT_BY_GROUP: SortArgs = "sort_by_group";
        kernel GATHER: GatherArgs = "gather";
        family GROUPED_MATMUL_4: GroupedMatmulArgs = "grouped_matmul_4_f16", "grouped_matmul_4_q8_0",
            "grouped_matmul_4_q4_0", "grouped_matmul_4_q4_k", "grouped_matmul_4_q5_k", "grouped_matmul_4_q6_k",
            "grouped_matmul_4_f32", "grouped_matmul_4_codes", "grouped_matmul_4_codes_and_mins";
        family GROUPED_MATMUL_16: GroupedMatmulArgs = "grouped_matmul_16_f16", "grouped_matmul_16_q8_0",
            "grouped_matmul_16_q4_0", "grouped_matmul_16_q4_k", "grouped_matmul_16_q5_k", "grouped_matmul_16_q6_k",
            "grouped_matmul_16_f32", "grouped_matmul_16_codes", "grouped_matmul_16_codes_and_mins";
    }
    "latent_attention" for All {
        kernel LATENT_MERGE: LatentAttentionArgs = "latent_merge";
        family LATENT_INPUTS: LatentInputsArgs = "latent_inputs_f16", "latent_inputs_f32";
        family LATENT_ATTENTION: LatentAttentionArgs = "latent_attention_f16", "latent_attention_f32";
    }
    "recurrent" for All {
        kernel CONVOLUTION: ConvolutionArgs = "convolution";
        kernel CONVOLUTION_LONG: ConvolutionArgs = "convolution_long";
        kernel GROUP_NORM: GroupNormArgs = "group_norm";
        kernel GROUP_NORM_SMALL: GroupNormArgs = "group_norm_small";
        kernel OF_EACH: FunctionArgs = "of_each";
    }
    "delta_rule" for All {
        family DELTA_RULE: DeltaRuleArgs = "delta_rule_4", "delta_rule_8", "delta_rule_16";
        family DELTA_RULE_OF_CHANNELS: DeltaRuleArgs = "delta_rule_of_channels_4", "delta_rule_of_channels_8",
            "delta_rule_of_channels_16";
        family DELTA_RULE_ALONE: FusedDeltaRuleArgs = "delta_rule_alone_4", "delta_rule_alone_8", "delta_rule_alone_16";
        family DELTA_RULE_OF_CHANNELS_ALONE: FusedDeltaRuleArgs = "delta_rule_of_channels_alone_4",
            "delta_rule_of_channels_alone_8", "delta_rule_of_channels_alone_16";
    }
    "mamba" for All {
        kernel MAMBA_SELECT: SelectArgs = "mamba_select";
        family MAMBA: MambaArgs = "mamba_4", "mamba_8", "mamba_16";
    }
    "mamba2" for All {
        family MAMBA2: Mamba2Args = "mamba2_4", "mamba2_8", "mamba2_16";
        family MAMBA2_ALONE: FusedMamba2Args = "mamba2_alone_4", "mamba2_alone_8", "mamba2_alone_16";
    }
    "rwkv" for All {
        kernel TOKEN_SHIFT: TokenShiftArgs = "token_shift";
        kernel RWKV7_INPUTS: Rwkv7InputsArgs = "rwkv7_inputs";
        kernel SIDE_PRODUCTS: SideProductsArgs = "side_products";
        family RWKV6: Rwkv6Args = "rwkv6_4", "rwkv6_8", "rwkv6_16";
        family RWKV7: Rwkv7Args = "rwkv7_4", "rwkv7_8", "rwkv7_16";
    }
    "exchange" for All {
        kernel ALL_REDUCE: AllReduceArgs = "all_reduce";
        kernel SUM_SLICES: AllReduceArgs = "sum_slices";
        kernel SUM_SLICES_EXACTLY: AllReduceArgs = "sum_slices_exactly";
        kernel ALL_GATHER: AllGatherArgs = "all_gather";
        kernel COUNT_EXCHANGES: CountExchangesArgs = "count_exchanges";
    }
    "encoder" for All {
        kernel ENCODER_ELEMENTS: ElementsArgs = "encoder_elements";
        kernel ENCODER_PATCHES: PatchesArgs = "encoder_patches";
        kernel ENCODER_SUM_ROWS: SumRowsArgs = "encoder_sum_rows";
        kernel ENCODER_INTERLEAVE: InterleaveArgs = "encoder_interleave";
        kernel ENCODER_ROTATE: RotateArgs = "encoder_rotate";
    }
    "encoder_attention_wide" for WithWgmma {
        family ENCODER_HEADS_WIDE: EncoderHeadsArgs = "encoder_heads_wide_64", "encoder_heads_wide_80";
        family ENCODER_ATTENTION_WIDE: EncoderUnitsArgs = "encoder_attention_wide_64", "encoder_attention_wide_80";
    }
    "encoder_attention" for All {
        kernel ENCODER_ATTENTION: EncoderAttentionArgs = "encoder_attention";
        kernel ENCODER_HEADS: EncoderHeadsArgs = "encoder_heads";
        family ENCODER_ATTENTION_ON_UNITS: EncoderUnitsArgs = "encoder_attention_on_units_64",
            "encoder_attention_on_units_80", "encoder_attention_on_units_128";
    }
    "decode" for WithWgmma {
        kernel DECODE_64: DecodeArgs = "decode_64";
        kernel DECODE_128: DecodeArgs = "decode_128";
        kernel DECODE_256: DecodeArgs = "decode_256";
        kernel DECODE_SMALL_64: DecodeArgs = "decode_small_64";
        kernel DECODE_EXPERTS_128: DecodeArgs = "decode_experts_128";
        kernel DECODE_EXPERTS_256: DecodeArgs = "decode_experts_256";
    }
    "decode_on_ranks" for WithWgmma {
        kernel DECODE_ON_RANKS_128: DecodeOnRanksArgs = "decode_on_ranks_128";
        kernel DECODE_EXPERTS_ON_RANKS_128: DecodeOnRanksArgs = "decode_experts_on_ranks_128";
    }
    "matmul_wide" for WithWgmma {
        family MATMUL_WIDE: MatmulWideArgs = "matmul_wide_16", "matmul_wide_32", "matmul_wide_64", "matmul_wide_128",
            "matmul_wide_256";
    }
    "matmul" for WithoutWgmma {
        family MATMUL: MatmulArgs = "matmul_f16", "matmul_q8_0", "matmul_q4_0", "matmul_q4_k", "matmul_q5_k", "matmul_q6_k",
            "matmul_f32", "matmul_codes", "matmul_codes_and_mins";
    }
}

/// The kernel of a family for this type of KV cache.
pub(crate) fn of_cache<A>([f16, f32]: [EntryPoint<A>; 2], cache_type: CacheType) -> EntryPoint<A> {
    match cache_type {
        CacheType::F16 => f16,
        CacheType::F32 => f32,
    }
}

/// Kernels by name, each loaded at its first use.
#[derive(Debug, Default)]
pub(crate) struct Kernels(HashMap<&'static str, Function>);

/// A handle that any thread may use.
#[derive(Debug, Clone, Copy)]
struct Function(CUfunction);

// SAFETY: a handle that the driver allows any thread to use.
unsafe impl Send for Function {}
// SAFETY: as above.
unsafe impl Sync for Function {}

impl Kernels {
    /// The kernel of an entry point, which is loaded at the first call.
    pub(crate) fn get<A: KernelArgs>(
        &mut self,
        gpu: &CudaDevice,
        entry: EntryPoint<A>,
    ) -> Result<Kernel<A>, CudaError> {
        if let Some(Function(function)) = self.0.get(entry.name) {
            return Ok(Kernel { function: *function, entry });
        }
        let kernel = gpu.kernel(entry)?;
        self.0.insert(entry.name, Function(kernel.function));
        Ok(kernel)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, BTreeSet};
    use std::path::Path;

    use super::*;
    use crate::device::argument_bytes;
    use crate::matrix::WeightLayout;

    #[test]
    fn the_table_has_the_compiled_kernels() {
        let prebuilt = Path::new(env!("CARGO_MANIFEST_DIR")).join("prebuilt");
        let report = std::fs::read_to_string(prebuilt.join("kernels.txt")).unwrap();
        let first_words = report.lines().filter_map(|line| line.split(' ').next());
        let compiled: BTreeSet<_> = first_words.filter(|word| !matches!(*word, "kernel" | "sources")).collect();
        let listed: BTreeSet<_> = TABLE.iter().map(|entry| entry.name).collect();
        assert_eq!(listed.len(), TABLE.len(), "a kernel is listed once");
        assert_eq!(listed, compiled, "the table of src/kernels.rs, and prebuilt/kernels.txt");
        let images = std::fs::read_dir(&prebuilt).unwrap().map(|entry| entry.unwrap().path());
        let images: BTreeSet<_> = images
            .filter(|path| path.extension() == Some("fatbin".as_ref()))
            .map(|path| path.file_stem().unwrap().to_str().unwrap().to_owned())
            .collect();
        let modules: BTreeSet<_> = MODULES.iter().map(|module| module.name.to_owned()).collect();
        assert_eq!(modules, images, "the modules of src/kernels.rs, and prebuilt/*.fatbin");
    }

    #[test]
    fn families_are_in_order() {
        for layout in WeightLayout::ALL {
            for (family, prefix) in [(GROUPED_MATMUL_4, "grouped_matmul_4_"), (GROUPED_MATMUL_16, "grouped_matmul_16_")]
            {
                assert_eq!(family[layout as usize].name, format!("{prefix}{}", layout.name()));
            }
            assert_eq!(MATMUL[layout as usize].name, format!("matmul_{}", layout.name()));
        }
        // Families by number: ascending.
        let mut last: BTreeMap<(&str, &str), usize> = BTreeMap::new();
        for entry in TABLE {
            let Some((name, number)) = entry.name.rsplit_once('_') else { continue };
            let Ok(number) = number.parse() else { continue };
            let before = last.insert((entry.module, name), number);
            assert!(before.is_none_or(|before| before < number), "{} comes too late", entry.name);
        }
    }

    #[test]
    fn cuda_modules_have_the_kernels_of_the_table() {
        let Some(gpu) = CudaDevice::for_tests() else { return };
        for entry in TABLE.iter().filter(|entry| entry.gpus.include(gpu.summary().has_wgmma())) {
            let function = gpu.function(entry.module, entry.name).unwrap();
            assert_eq!(argument_bytes(function).unwrap(), entry.args_bytes, "{}", entry.name);
        }
    }
}
