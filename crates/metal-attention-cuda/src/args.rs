//! The arguments of the kernels: structures with the layout that `kernels/` declares in C++.
//!
//! A kernel takes one structure by value. Fields have the kernel's names; those without a comment here are documented at the structure in
//! `kernels/`; `unused` fields are padding. [`kernel_args`] declares a structure with its name there, and `kernels/args_layout.cuh`, which is
//! generated from the declarations, holds the C++ structure to the same size and offsets when a kernel is compiled. For each address
//! [`KernelArgs::bounds`](crate::bounds::KernelArgs::bounds) states what a launch may touch.

mod attention;
mod decode;
mod encoder;
mod exchange;
mod experts;
mod latent;
#[cfg(test)]
mod layout;
mod products;
mod recurrent;
mod rows;

pub(crate) use attention::{
    AttentionArgs, AttentionInputsArgs, GateArgs, GeneralAttentionArgs, HeadArgs, PagesArgs, PrefillArgs,
    QueryTileArgs, TokenArgs,
};
pub(crate) use decode::{
    COPIES, DecodeArgs, DecodeOnRanksArgs, LayerArgs, MAX_OPS, OpArgs, OpMatrixArgs, RankShareArgs,
};
pub(crate) use encoder::{
    ElementsArgs, ElementsFunction, EncoderAttentionArgs, EncoderHeadsArgs, EncoderTileArgs, EncoderUnitsArgs,
    InterleaveArgs, PatchesArgs, RotateArgs, SumRowsArgs,
};
pub(crate) use exchange::{AllGatherArgs, AllReduceArgs, CountExchangesArgs, ExchangeArgs, MAX_RANKS};
pub(crate) use experts::{
    ExpertsActivationArgs, ExpertsSumArgs, FusedRouteArgs, GatherArgs, GroupedMatmulArgs, GroupedMatvecArgs, RouteArgs,
    SortArgs, WeighArgs,
};
pub(crate) use latent::{LatentAttentionArgs, LatentInputsArgs};
#[cfg(test)]
pub(crate) use layout::KernelStruct;
use products::columns;
pub(crate) use products::{
    ACTIVATED, Epilogue, MAX_MATRICES, MatmulArgs, MatmulFewArgs, MatmulWideArgs, MatrixArgs, MatvecArgs, OddRowsArgs,
    RepackArgs, ResultRowsArgs,
};
pub(crate) use recurrent::{
    ConvolutionArgs, DeltaRuleArgs, ElementwiseFunction, FunctionArgs, FusedDecodeArgs, FusedDeltaRuleArgs,
    FusedMamba2Args, GroupNormArgs, GroupNormKind, InputFunction, MAX_SIDE_PRODUCTS, Mamba2Args, MambaArgs, OutputGate,
    RowsArgs, RunsArgs, Rwkv6Args, Rwkv7Args, Rwkv7InputsArgs, ScanArgs, SelectArgs, SideProductArgs, SideProductsArgs,
    StatesArgs, TokenShiftArgs,
};
pub(crate) use rows::{
    ActivationArgs, ArgmaxArgs, BlockConvArgs, EmbeddingArgs, LogitsArgs, NormArgs, RateArgs, StreamsArgs, StretchArgs,
    TopKArgs,
};

/// Declares structures of kernel arguments, `struct RUST_NAME = "C++ name" in "file of kernels/" { fields }`, and for tests the list
/// `LAYOUTS` of their sizes and offsets.
macro_rules! kernel_args {
    ($(
        $(#[$attribute:meta])*
        $vis:vis struct $name:ident = $cpp_name:literal in $file:literal {
            $($(#[$field_attribute:meta])* $field_vis:vis $field:ident: $type:ty,)*
        }
    )*) => {
        $(
            $(#[$attribute])*
            #[repr(C)]
            #[derive(Debug, Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
            $vis struct $name {
                $($(#[$field_attribute])* $field_vis $field: $type,)*
            }

            #[cfg(test)]
            impl $crate::args::layout::KernelStruct for $name {
                const CPP_NAME: &'static str = $cpp_name;
            }
        )*

        /// The layouts of the structures of this file.
        #[cfg(test)]
        pub(super) const LAYOUTS: &[$crate::args::layout::StructLayout] = &[$(
            $crate::args::layout::StructLayout {
                cpp_name: $cpp_name,
                file: $file,
                size: size_of::<$name>(),
                offsets: &[$((stringify!($field), std::mem::offset_of!($name, $field)),)*],
            },
        )*];
    };
}
use kernel_args;
